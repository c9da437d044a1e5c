"""Gluon kernels for Hopper, run from their own sources on a CPU.

``machine`` is a multiprocessor with partitions, barriers and asynchronous copies; ``emulation``
translates a module of kernels to it.
"""
