"""The search for a problem that violates a claim: draw, judge, minimise, and keep it.

``corpus`` holds problems that failed as JSON files. Verdicts come from ``checks``.
"""
