"""Compare a kernel with its baseline: errors, coverage, speed and compiled code.

Differences are values with confidence intervals. The pytest plugin fails the run on alarms.
"""
