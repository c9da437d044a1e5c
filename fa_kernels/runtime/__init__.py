"""The ground that launches stand on: the allocator, the current device, compiled launches.

These modules depend on PyTorch and Triton, and on nothing of ``fa_kernels``. Only ``private`` names
private attributes of PyTorch.
"""
