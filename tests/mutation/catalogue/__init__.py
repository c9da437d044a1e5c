"""Mutants of the kernels: operators on the syntax tree, faults of hardware, equivalent mutants.

The faults on record, which the product ships, are in ``fa_verify.diagnosis``.
"""
