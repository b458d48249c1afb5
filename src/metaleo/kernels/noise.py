"""Noise as a kernel, on a CPU or of many runs: it draws numbers in pairs; XLA each by itself, and everything twice."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.kernels import launching
from metaleo.kernels.launching import LANES, Kernel, apart_by, core_kernel, hurried, on_cores, trusted, usable
from metaleo.randomness import FACTORS, GOLDEN, halves, normals

GENERATOR = ("golden", GOLDEN), ("first_factor", FACTORS[0]), ("second_factor", FACTORS[1])
THREADS = 256
FEWEST = 4096
"""Numbers of a task that are worth a kernel."""


def many_normals(key: PRNGKeyArray, shape: tuple[int, ...], stream: int = 0) -> Float[Array, "*shape"]:
    """`randomness.normals`, and on a CPU or where there are many runs the same by a kernel."""
    size = math.prod(shape)
    left = hurried() or size < FEWEST or size % (2 * LANES)
    if left or not usable(jnp.dtype(jnp.float32)) or not trusted(difference, stream):
        return normals(key, shape, stream)
    return drawn(key, size, stream).reshape(shape)


def drawn(key: PRNGKeyArray, size: int, stream: int) -> Float[Array, " size"]:
    return launching.launcher(kernel(size, stream))(halves(key))[0]


def kernel(size: int, stream: int) -> Kernel:
    if on_cores():
        return core_kernel("draw_normals", (("stream", stream),), ((size,),))
    parts = -(-size // (8 * THREADS))
    constants = *GENERATOR, ("size", size), ("parts", parts), ("stream", stream)
    return Kernel("draw_normals", ("random.cuh", "noise.cu"), constants, parts, 1, THREADS, 0, ((size,),))


def difference(stream: int) -> float:
    key = jax.random.key(0)
    return apart_by((drawn(key, FEWEST + 32, stream),), (normals(key, (FEWEST + 32,), stream),))
