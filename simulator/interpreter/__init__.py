"""Repairs of Triton's interpreter, so that it computes the same bits as a GPU.

``repair`` installs the patches. ``launches``, ``addresses``, ``rounding``, ``types`` and
``operators`` implement parts of them.
"""
