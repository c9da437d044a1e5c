"""The report of a run (--report): an HTML page and a JSON file with the same content."""
