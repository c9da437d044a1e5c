"""The Triton kernels: forward, delta, dk/dv and dq, and the acts they share."""
