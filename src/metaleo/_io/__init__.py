"""Files and run folders."""
