"""What must hold: strategies, input families, checks, the subject contract, reports."""
