"""The foundation of launches: the allocator, the current device, cached compiled kernels.

These modules import PyTorch and Triton, and nothing of ``fa_kernels``. Only ``private`` names
private attributes of PyTorch.
"""
