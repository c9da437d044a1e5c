"""--fa-minutes: draw problems on all workers until the time is over, and keep those that fail."""
