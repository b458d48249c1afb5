"""Meta-training: the outer loop, parallel runs, and run folders."""
