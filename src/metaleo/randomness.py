"""Noise and dropout of the inner loop, drawn from JAX's keys by a hash that costs an eighth of JAX's own generator.

A meta-step draws a million numbers; with `jax.random` they took a quarter of its time on a CPU. Here a number is a hash
of its position and of the 64 bits of a key: two rounds of multiplying, shifting and exclusive or, with constants of
Wellons' hash prospector, each keyed by half of it. Being a function of position alone, a mask needs no memory: XLA
computes it where it is used.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

GOLDEN = 0x9E3779B9
ROUNDS = ((16, 0x21F0AAAD, 15, 0x735A2D97, 15), (16, 0x7FEB352D, 15, 0x846CA68B, 16))
"""Shift, factor, shift, factor, shift: bijections of 32 bits in which every input bit flips half of the output bits."""


def words(key: PRNGKeyArray, shape: tuple[int, ...], stream: int = 0) -> UInt32[Array, "*shape"]:
    """Random 32-bit words; another stream of the same key is independent of this one."""
    first, second = jax.random.key_data(key).reshape(-1)[:2]
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"a stream has 2³² words, not {size}")
    x = jax.lax.iota(jnp.uint32, size).reshape(shape) * jnp.uint32(GOLDEN) + first
    for start, (a, b, c, d, e) in zip(
        (jnp.uint32(0), second + jnp.uint32(stream * GOLDEN % 2**32)), ROUNDS, strict=True
    ):
        x = x + start
        x = (x ^ (x >> a)) * jnp.uint32(b)
        x = (x ^ (x >> c)) * jnp.uint32(d)
        x = x ^ (x >> e)
    return x


def masks(
    key: PRNGKeyArray, keep: float | Float[Array, ""], shape: tuple[int, ...], stream: int = 0
) -> Bool[Array, "*shape"]:
    """True with probability `keep`, to the nearest 2⁻²⁴."""
    uniform = (words(key, shape, stream) >> 8).astype(jnp.int32)
    return uniform < jnp.round(jnp.asarray(keep, jnp.float32) * 2**24).astype(jnp.int32)


def normals(key: PRNGKeyArray, shape: tuple[int, ...], stream: int = 0) -> Float[Array, "*shape"]:
    """Standard normal numbers, in pairs (r cos φ, r sin φ) after Box and Muller."""
    size = math.prod(shape)
    half = -(-size // 2)
    lengths, angles = words(key, (2, half), stream)
    radius = jnp.sqrt(-2 * jnp.log(unit(lengths)))
    cos, sin = on_the_circle(angles)
    return jnp.concatenate([radius * cos, radius * sin])[:size].reshape(shape)


def unit(word: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """24 bits of a word as a number between 0 and 1, neither of which it is."""
    return (word >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24) + jnp.float32(2**-25)


def on_the_circle(word: UInt32[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Cosine and sine of a random angle: within an eighth of a turn of one of four directions.

    By their series, whose next terms are below rounding there: the ones of XLA are ten times as slow on a CPU.
    """
    angle = (unit(word) - 0.5) * jnp.float32(math.pi / 2)
    square = angle * angle
    sin = angle * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square / 362880))))
    cos = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square / 40320)))
    sideways, backwards = (word & 1) == 1, (word & 2) == 2
    sign = jnp.where(backwards, jnp.float32(-1), jnp.float32(1))
    return sign * jnp.where(sideways, -sin, cos), sign * jnp.where(sideways, cos, sin)
