"""The faults that a diagnosis can name: float64 passes of attention, and changes of them.

A module holds the changes of one part of a pass, and the entries of the dictionary that use them.
``entries`` joins them. Edits of the kernels are in the folder above.
"""
