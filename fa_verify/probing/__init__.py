"""Probing finds out by itself which inputs a kernel takes, its conventions and how it rounds.

Each answer has its evidence, an input that replays, and its certainty. Probing draws nothing by
chance and needs no Hypothesis. Verdicts are not here: ``fa_verify.conformance`` judges a kernel.
"""
