"""Hypothesis strategies for problems: sizes, sequence lengths, masks, and batched problems.

A description is drawn, never a tensor. ``inputs`` makes tensors of it.
"""
