"""Gluon kernels for Hopper: TMA copies, asynchronous products, warp-specialised programs.

``launch.hopper`` chooses them by device and shape. They compute the sums of the portable kernels in
the same order, and share ``common`` with them.
"""
