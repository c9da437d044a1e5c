"""Repairs of Triton's interpreter, so that it computes the same bits as a GPU.

``repair`` installs the patches. ``launches``, ``addresses``, ``rounding`` and ``types`` implement
parts of them.
"""
