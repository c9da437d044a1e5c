"""Findings: runs of the conformance tests on every named kernel, recorded and put into words.

``python -m fa_verify.pytest_plugin.findings`` runs them and writes FINDINGS.md.
"""
