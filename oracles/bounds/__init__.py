"""The error bound of every element, derived from the inputs, and the variance of its errors.

Written twice: in PyTorch, and in NumPy (``numpy_*``) as a check of the first. Bounds are a function
of the problem and of the declared numerics alone; no constant is fitted to a kernel.
"""
