"""The schedule: the tiles that a tile visits, those that need a mask, and the order of programs.

It makes lists of tiles, which launchers pass to the kernels. ``launch`` launches the kernels that
compute attention, which are in ``kernels``.
"""
