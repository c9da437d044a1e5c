"""Mutation testing of the kernels and of the harness that judges them."""
