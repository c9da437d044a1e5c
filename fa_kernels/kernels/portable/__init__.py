"""Triton kernels that run on every GPU and in the interpreter.

They compute the forward, the combination of splits, the backward, pooled probabilities and lists of
tiles. Kernels for one architecture have a folder of their own.
"""
