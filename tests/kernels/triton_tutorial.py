"""Triton's tutorial 06, with its signature and without declarations: the probe finds its limits."""

from brought import module

attention = module("triton-lang/triton", "python/tutorials/06-fused-attention.py").attention
