"""Triton's interpreter made to compute the bits that a GPU computes.

``repair`` installs the patches; a launch, addresses and type rules have a module each.
"""
