"""The foundation of launches: the allocator, the current device, cached compiled kernels.

These modules import PyTorch and Triton, and nothing of ``fa_kernels``. Launch shortcuts through
private attributes of PyTorch and Triton belong here.
"""
