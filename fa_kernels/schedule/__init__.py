"""The schedule: which tiles a tile visits, which of them need a mask, and in which order they run.

Integer arithmetic and lists of tiles; a kernel and its launcher read both. Launches are in
``launch``, and the kernels that compute attention in ``kernels``.
"""
