"""The ground truth: problems and masks as values, float64 references, and the error bound.

This package holds problems and outputs; ``masks``, ``reference`` and ``bounds`` hold the rest. It
imports no kernel and draws no random problem.
"""
