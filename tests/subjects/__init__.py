"""Adapters of named kernels: the call, what it refuses and why, and what it declares.

``fa_verify.registry`` lists their names. In a wheel this folder is ``fa_verify.subjects``.
"""
