"""The inner loop and what is around it as kernels: in CUDA for GPUs whose blocks form clusters, in C++ for CPUs.

`closed_form.py` is the inner loop for all others, `randomness.py` the noise, `learners.learner.judge` the query loss
and `outer_loop.make_optimiser` the optimiser.
"""
