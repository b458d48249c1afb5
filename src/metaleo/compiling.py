"""The device: how it is asked to compile the long loops, and how much it holds."""

import os
from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit`; on a GPU the many small kernels of a meta-step may also run side by side, a fifth faster."""
    gpu = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"} if jax.default_backend() == "gpu" else None
    return jax.jit(function, compiler_options=gpu, **options)


def memory_bytes() -> int:
    """The memory of the device that JAX computes on."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
