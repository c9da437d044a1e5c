"""The error bound of every element, derived from the inputs, and the variance of its error.

There are two implementations, here in PyTorch and in ``in_numpy``, which check each other. Bounds
depend on the problem and the declared numerics alone; no constant is fitted to a kernel.
"""
