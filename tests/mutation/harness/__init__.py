"""Mutants of the harness: oracles, bounds, checks and generators, judged by their unit tests.

Mutants of the kernels, which the harness judges, are in ``catalogue``.
"""
