"""Device functions that several kernels share: addressing, masks, the softmax, score modifications.

No kernel is launched from here, and no function depends on one family of kernels.
"""
