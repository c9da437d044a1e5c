"""Speed and memory, as ratios beside peers."""
