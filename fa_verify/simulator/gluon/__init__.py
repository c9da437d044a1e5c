"""Run Gluon kernels for Hopper from their sources on a CPU.

``machine`` simulates programs, partitions, barriers and asynchronous copies. ``emulation`` provides
Gluon's modules on top of it.
"""
