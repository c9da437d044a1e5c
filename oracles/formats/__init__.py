"""Formats of 8 bits as values, with casts of our own in two writings.

``element.py`` has the formats, ``in_torch.py`` and ``in_numpy.py`` the casts from float64 to codes
and back.
"""
