"""The gate: a run compared with a baseline."""
