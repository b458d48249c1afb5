"""Complete experiments: the quickstart, a comparison of learners, the paper's protocol."""
