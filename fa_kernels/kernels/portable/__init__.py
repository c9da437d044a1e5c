"""Triton kernels that run on every GPU and in the interpreter.

Forward, its combination of splits, the backward's kernels, pooled probabilities, and the kernels
that make lists of tiles. Kernels for one architecture have a folder of their own.
"""
