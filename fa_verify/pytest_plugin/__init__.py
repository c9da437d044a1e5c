"""The pytest plugin: command-line options, Hypothesis profiles and the summary of a run.

Larger features have a folder each: ``fuzz`` (--fa-minutes), ``gate`` (--fa-baseline) and ``report``
(--fa-report). The checks themselves are in ``properties``.
"""
