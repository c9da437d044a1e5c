"""The verdict of a run: its failures, grouped by cause."""
