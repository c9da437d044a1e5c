"""The pytest plugin: command-line options, Hypothesis profiles and the summary of a run.

Larger features have a folder each: ``fuzz`` (--minutes), ``gate`` (--baseline), ``report``
(--report) and ``findings`` (--findings). The checks themselves are in ``properties``.
"""
