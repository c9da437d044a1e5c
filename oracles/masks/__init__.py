"""Masks: the algebra in ``mask``, its JSON codec, Triton predicates, the shipped masks.

A mask defines which keys each query sees. It is a frozen value, from which tensors are derived.
"""
