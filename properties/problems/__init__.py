"""Hypothesis strategies for problems: sizes, sequence lengths, masks and batched problems.

The strategies draw descriptions, never tensors. ``inputs`` creates the tensors of a problem.
"""
