"""Kernels of this repository, degraded or emulated, to be verified as other kernels are."""
