"""What is true: problem and mask values, float64 references, the derived error bound."""
