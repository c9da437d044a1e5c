"""What is true: problems and masks as values, float64 references, and the error bound.

Problems and outputs are here; ``masks``, ``reference`` and ``bounds`` hold the rest. No kernel is
imported, and nothing is drawn.
"""
