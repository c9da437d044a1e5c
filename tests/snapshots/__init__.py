"""Snapshots of what a refactoring must leave as it is: outputs, compiled code, claims, mutants.

``python -m tests.snapshots outputs --write FILE`` records one, ``--compare FILE`` compares with it.
"""
