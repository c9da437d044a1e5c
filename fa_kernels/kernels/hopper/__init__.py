"""Gluon kernels for Hopper: TMA copies, asynchronous products, warp-specialised programs.

``launch.hopper`` selects them by device and shape. They compute sums in the same order as the
portable kernels, and share ``common`` with them.
"""
