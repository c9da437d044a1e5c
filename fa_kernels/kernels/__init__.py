"""The kernels: ``portable`` in Triton, ``hopper`` in Gluon, and what they share in ``common``.

Only device code and its constants. Arguments are validated and launches made elsewhere.
"""
