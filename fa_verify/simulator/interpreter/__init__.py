"""Repairs of Triton's interpreter, so that it computes the same bits as a GPU.

``repair`` installs the patches. The other modules implement parts of them: ``types``, ``operators``
and ``functions`` make launches quick.
"""
