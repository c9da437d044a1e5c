"""The conformance tests: a correct kernel passes them, whoever wrote it.

Each file asks for one guarantee or one kind of problem. Nothing here imports from ``tests``: in a
wheel this folder is ``fa_verify.conformance``.
"""
