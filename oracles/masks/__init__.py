"""Masks: the algebra in ``mask``, its JSON codec, Triton predicates, the shipped masks.

A mask says which query sees which key. It is a frozen value; tensors follow from it.
"""
