"""The report of a run (--fa-report): an HTML page and a JSON file with the same content."""
