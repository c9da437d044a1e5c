"""The search for a problem that violates a check: draw, judge, minimise and save it.

``corpus`` stores problems that failed as JSON files. The checks are in ``checks``.
"""
