"""Attention and its gradients in float64: two implementations, in PyTorch and in NumPy.

References are the ground truth; ``bounds`` has the error that a kernel may have against them.
"""
