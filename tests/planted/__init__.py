"""Kernels with one planted fault each, and the share of them that the suite describes truly.

``faults`` has the kernels, ``labels.toml`` the truth about each, ``test_planted.py`` the proof of
the labels. ``python -m tests.planted`` compares the causes that ``fa-verify check`` prints with the
labels. Nobody tunes the naming of causes to these kernels.
"""
