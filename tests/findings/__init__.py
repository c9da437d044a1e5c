"""What the suite finds in every kernel that it knows: ``python -m tests.findings``."""
