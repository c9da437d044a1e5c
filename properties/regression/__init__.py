"""A kernel now against the same kernel before: baselines, drift of errors, speed, compiled code.

Differences are values with a confidence interval; the pytest plugin decides what to stop.
"""
