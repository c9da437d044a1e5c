"""Mutants: faults put into copies of the kernels and of their referee, to see them found."""
