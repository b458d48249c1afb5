"""Stage 1 of the paper: turn images into feature vectors, once, before meta-learning."""
