"""Sanitizers of NVIDIA and of Triton on the kernels, each with a planted fault that it has to find.

``python -m tests.sanitizers [name ...]`` runs them on a GPU.
"""
