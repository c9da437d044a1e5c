"""Findings: the results of the conformance tests on every registered kernel.

``python -m benchmarks.findings`` runs the tests and writes FINDINGS.md.
"""
