"""Masks beyond windows and lengths, one a file: examples to read, verified like everything else."""
