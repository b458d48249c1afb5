"""Meta-training: the outer loop, many runs side by side, and run folders."""
