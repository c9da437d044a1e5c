"""Mutants of the kernels, and of the harness that judges them: each fault has to be found."""
