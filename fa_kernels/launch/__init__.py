"""Launches: outputs and scratch are allocated here, and parameters of kernels put together.

``portable`` and ``hopper`` launch the two families of kernels, ``call_cache`` memoises validation.
The launch itself, and the one allocator, are in ``runtime``.
"""
