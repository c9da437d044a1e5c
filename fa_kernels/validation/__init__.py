"""Checks of a call's arguments: tensors, cu_seqlens, block masks, score modifications.

Every error names the argument, the value it got and the value it needs. ``schedule`` decides which
tiles run; nothing here launches a kernel.
"""
