"""A run that draws problems until its time is over, on all workers, and keeps what it finds."""
