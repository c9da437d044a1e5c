"""The tolerance rules of other attention suites and this project's checks, on the same mutants.

``python -m benchmarks.peer_rules`` writes results/peer-rules.md. The machinery of mutants is in
``fa_verify.diagnosis`` and ``tests.mutation``.
"""
