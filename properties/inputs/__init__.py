"""The tensors of a problem: families of values, padding values and storage layouts.

All values are computed from stream integers with exact arithmetic, so that every device gives the
same bits. ``problems`` decides which problems to draw.
"""
