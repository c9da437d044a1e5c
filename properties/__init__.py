"""The properties of a correct kernel: strategies for problems, checks, and the search for failures.

The kernel under test is passed in as a ``Subject``; this package imports none. ``oracles`` computes
the reference results and bounds. ``fa_verify.verify`` runs all checks.
"""
