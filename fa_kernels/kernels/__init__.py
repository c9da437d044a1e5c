"""The kernels: ``portable`` in Triton, ``hopper`` in Gluon, and shared device code in ``common``.

These modules hold device code and its constants. ``validation`` checks arguments, and ``launch``
launches the kernels.
"""
