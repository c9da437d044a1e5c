"""The gate (--baseline): compare a run with a stored baseline."""
