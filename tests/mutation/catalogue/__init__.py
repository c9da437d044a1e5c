"""Mutants of the kernels: faults on record and of hardware, and operators on the syntax tree.

Mutants are values; ``copies`` imports an edited copy of ``fa_kernels``, and an outcome says how a
mutant ended. The code that runs the checks on mutants is in ``judging``.
"""
