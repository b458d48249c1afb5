"""The inner loops as CUDA kernels, for GPUs whose blocks form clusters; `closed_form.py` is the same for all others."""
