"""The gate (--fa-baseline): compare a run with a stored baseline."""
