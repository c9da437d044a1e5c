"""Adapters of the registered kernels, with their declarations and the problems that they refuse.

``registry`` lists them by name.
"""
