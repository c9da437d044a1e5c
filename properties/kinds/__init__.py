"""The kinds of calls: how each is drawn, run, shrunk and described.

A kind is one record of functions, in a file of its own; ``registry`` holds them by name. Kinds do
not judge: ``checks`` compares what they have run. ``search`` sees nothing of them but the records.
"""
