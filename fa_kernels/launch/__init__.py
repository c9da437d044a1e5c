"""Launchers: allocate outputs and scratch, and assemble the arguments of kernels.

``portable`` and ``hopper`` launch the two families of kernels; ``call_cache`` memoises validation.
``runtime`` has the allocator and the low-level launch.
"""
