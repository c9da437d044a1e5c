"""Values of tensors: families of q, k, v, gradients and padding, storage layouts, and ``tensors``.

All are made of stream integers by exact arithmetic, so every device gives the same bits. Which
problem is asked is decided in ``problems``.
"""
