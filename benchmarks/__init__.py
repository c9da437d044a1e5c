"""Benchmarks of speed and memory, as ratios to other implementations."""
