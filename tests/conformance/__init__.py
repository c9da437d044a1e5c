"""The conformance tests, which every correct attention kernel passes.

Each file tests one guarantee or one kind of problem. This folder must not import from ``tests``,
because it is ``fa_verify.conformance`` in a wheel.
"""
