"""Adapters for kernels of other repositories, and ``make kernels``, which brings their files.

``kernels.toml`` names repositories, commits, licences and files with their hashes. None of their
code is part of this repository, and none runs in its tests.
"""
