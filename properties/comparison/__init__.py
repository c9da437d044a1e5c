"""Comparisons of tensors in which NaN never passes, and the findings that they report.

``agreement`` compares two runs, ``compare`` defines ratios and findings. ``checks`` decides which
runs to compare.
"""
