"""The pages of the documentation, and the commands that write their tables and pictures."""
