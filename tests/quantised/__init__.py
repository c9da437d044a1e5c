"""A kernel of caches of codes in plain PyTorch, and copies of it that are wrong on purpose."""
