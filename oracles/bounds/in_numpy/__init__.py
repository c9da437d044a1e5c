"""The bounds and variances a second time, written in NumPy from the derivation alone.

Tests compare them with the PyTorch modules of the folder above. Nothing here imports those.
"""
