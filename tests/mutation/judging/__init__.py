"""The steps that judge a mutant of the kernels: problems with their checks, and unit tests.

The mutants are in ``catalogue``; mutants of the harness have their own judges in ``harness``.
"""
