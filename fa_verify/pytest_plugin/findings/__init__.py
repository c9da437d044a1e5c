"""Findings: the results of the conformance tests on every registered kernel.

``python -m fa_verify.pytest_plugin.findings`` runs the tests and writes FINDINGS.md.
"""
