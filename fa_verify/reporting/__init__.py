"""The results of a run, in files and as a verdict."""
