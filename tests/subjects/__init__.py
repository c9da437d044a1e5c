"""Adapters of the registered kernels, with their declarations and the problems that they refuse.

``fa_verify.registry`` lists them by name. In a wheel this folder is ``fa_verify.subjects``.
"""
