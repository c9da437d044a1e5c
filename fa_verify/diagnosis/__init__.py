"""The naming of a kernel's fault: the known faults, and the search for the one that it shows."""
