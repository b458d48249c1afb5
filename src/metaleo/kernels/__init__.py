"""The inner loop as CUDA kernels, and for many runs what is around it, for GPUs whose blocks form clusters.

`closed_form.py` is the inner loop for all others, `randomness.py` the noise, `learners.learner.judge` the query loss.
"""
