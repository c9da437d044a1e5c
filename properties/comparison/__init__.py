"""Comparisons of tensors that NaN cannot pass, and the findings that they report.

``agreement`` compares two runs, ``compare`` a run with the oracle. Which runs are compared is
decided in ``checks``.
"""
