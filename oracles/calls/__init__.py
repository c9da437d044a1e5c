"""The calls other than attention to padded tensors, as values: caches, merges, rings and codes."""
