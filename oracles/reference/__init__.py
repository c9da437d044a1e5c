"""Attention and its gradients in float64, written twice: in PyTorch and in NumPy.

References say what is true. How far a kernel may be from them is in ``bounds``.
"""
