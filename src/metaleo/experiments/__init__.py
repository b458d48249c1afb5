"""Whole experiments: a first look, a comparison of learners, the paper's protocol."""
