"""The ground that launches stand on: the allocator, the current device, compiled launches.

These modules depend on PyTorch and Triton, and on nothing of ``fa_kernels``. Private attributes of
PyTorch and Triton are used here alone.
"""
