"""Checks of what a call may be given: arguments, cu_seqlens, block masks, score modifications.

Every error names the argument, the value it got and the value it needs. Which tiles run is decided
in ``schedule``, and nothing here launches a kernel.
"""
