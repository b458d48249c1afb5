"""Kernels as functions of arrays: which are built, and how they are launched.

Arrays have an axis of runs in front, each with a learner of its own, then one of tasks; `vmap` adds runs.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array

Arrays = tuple[Array, ...]
Shape = tuple[int, ...]

LIBRARY = Path(__file__).parent / "libmetaleo_kernels.so"
MOST_NUMBERS = 2**31 - 1
"""Of an array that a kernel reads or writes: it counts in 32 bits."""
TF32 = (None, "default", "fastest", "tensorfloat32")


def usable() -> bool:
    """Whether there are kernels for this GPU, and their precision, that of JAX unless more is asked for, will do."""
    return has_clusters() and library() is not None and jax.config.values["jax_default_matmul_precision"] in TF32


def has_clusters() -> bool:
    """Whether JAX computes on an NVIDIA GPU of compute capability 9.0 or later."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    return float(device.compute_capability) >= 9


@functools.cache
def library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None


@functools.cache
def built(name: str) -> bool:
    """Whether there is a kernel of this name, which says the problem it is for; if so, XLA knows it from now on."""
    function = getattr(library(), name, None)
    if function is None:
        return False
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="CUDA")
    return True


def call(name: str, results: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[..., Arrays]:
    """A kernel as a function of the arrays of all runs."""
    return lambda *arrays: tuple(jax.ffi.ffi_call(name, results)(*arrays))


@functools.cache
def launcher(name: str, shapes: tuple[Shape, ...], from_table: bool = False) -> Callable[..., Arrays]:
    """A kernel as a function of the arrays of a run, with results of these shapes.

    Where it reads from a table, that is the last array, and the one before it has numbers of its rows.
    """

    @custom_vmap
    def launch(*arrays: Array) -> Arrays:
        runs = len(arrays[0])
        own = arrays[:-1] if from_table else arrays
        largest = max(*(array.size for array in own), *(runs * math.prod(shape) for shape in shapes))
        if runs > 1 and largest > MOST_NUMBERS:
            cuts, rest = (slice(runs // 2), slice(runs // 2, runs)), arrays[len(own) :]
            halves = (launch(*(array[cut] for array in own), *rest) for cut in cuts)
            return tuple(map(jnp.concatenate, zip(*halves, strict=True)))
        return call(name, tuple(jax.ShapeDtypeStruct((runs, *shape), jnp.float32) for shape in shapes))(*arrays)

    @launch.def_vmap
    def more_runs(size: int, batched: list[bool], *arrays: Array) -> tuple[Arrays, tuple[bool, ...]]:
        every = [
            array if own or (from_table and i == len(arrays) - 1) else jnp.broadcast_to(array, (size, *array.shape))
            for i, (array, own) in enumerate(zip(arrays, batched, strict=True))
        ]
        tables = []
        if from_table:
            table = every.pop()
            if batched[-1]:  # one below the other
                first = jnp.arange(size, dtype=every[-1].dtype) * table.shape[1]
                every[-1] += first.reshape(-1, *[1] * (every[-1].ndim - 1))
                table = table.reshape(-1, table.shape[2])
            tables = [table]
        results = launch(*(array.reshape(-1, *array.shape[2:]) for array in every), *tables)
        return tuple(array.reshape(size, -1, *array.shape[1:]) for array in results), (True,) * len(results)

    def of_one_run(*arrays: Array) -> Arrays:
        own = [array[None] for array in arrays]
        return tuple(array[0] for array in launch(*([*own[:-1], arrays[-1]] if from_table else own)))

    return of_one_run
