"""The catalogue of faults, and the tools that apply them to copies of the kernels.

Mutants are values; ``copies`` imports an edited copy of ``fa_kernels``. The code that runs the
checks on mutants is in ``tests/mutation``.
"""
