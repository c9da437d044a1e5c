"""Simulate GPU kernels on a CPU: a repaired Triton interpreter, and Gluon's subset for Hopper.

This package does not depend on attention. Each repair names the symptom that it removes.
"""
