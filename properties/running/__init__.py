"""Run a problem through a subject and the oracle.

Contains trials, guard bands, the watchdog, worker processes and the tally. The checks of the
results are in ``guarantees``.
"""
