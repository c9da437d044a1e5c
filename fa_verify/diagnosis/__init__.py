"""The catalogue of faults, and what applies them to copies of the kernels.

Mutants are values; ``copies`` imports an edited copy of the package. Judges of mutants are in
``tests/mutation``.
"""
