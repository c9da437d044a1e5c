"""What must hold of a correct kernel: problems to draw, checks, the search for failures.

A kernel is passed in as a ``Subject``; nothing here imports one. ``oracles`` says what is true, and
``fa_verify.verify`` runs everything and returns a verdict.
"""
