"""Hardware that is not there: Triton's interpreter repaired, and Gluon's Hopper subset on a CPU.

Nothing here knows about attention. Each repair names the symptom that it removes.
"""
