"""Snapshots that a refactoring must not change: outputs, compiled code, test names, mutants.

``python -m tests.snapshots outputs --write FILE`` writes one; ``--compare FILE`` compares with it.
"""
