"""The report of a run: one page and its JSON."""
