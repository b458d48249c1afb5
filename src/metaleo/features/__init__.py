"""Images → vectors, once, before meta-learning: stage 1 of the paper."""
