"""Device functions that several kernels share: addressing, masks, the softmax, score modifications.

The modules define no kernels, and no function depends on one family of kernels.
"""
