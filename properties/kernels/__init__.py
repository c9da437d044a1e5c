"""Kernels under test: a callable with its declarations, how it is loaded, and what it supports.

The kernels themselves are not here: a subject is passed in.
"""
