"""Noise and dropout of the inner loop, drawn from JAX keys by a hash that costs a fraction of JAX's own generator.

A meta-step draws a million numbers; with `jax.random` they took a quarter of its time on a CPU. Here a number is a hash
of its position and of the 64 bits of a key: multiplications, shifts and exclusive or, with constants from Wellons' hash
prospector. Each entry of a mask depends only on its position and the key, so XLA computes it where it is used, without
storing the mask.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

GOLDEN = 0x9E3779B9
FACTORS = 0x21F0AAAD, 0x735A2D97
"""With these and the shifts below, every bit of a position flips half of the bits of its word."""
STREAM = 2**28
"""Words per stream: eight streams that start GOLDEN positions apart share no word."""


def key_words(key: PRNGKeyArray) -> UInt32[Array, "2"]:
    """The 64 bits of a key that the hash uses."""
    return jax.random.key_data(key).reshape(-1)[:2]


def random_words(key: PRNGKeyArray, shape: tuple[int, ...], stream: int = 0) -> UInt32[Array, "*shape"]:
    """Random 32-bit words. The eight streams of a key are parts of one sequence, in which no word occurs twice."""
    x = leading(key, shape, stream)
    return x ^ (x >> 15)


def leading(key: PRNGKeyArray, shape: tuple[int, ...], stream: int = 0) -> UInt32[Array, "*shape"]:
    """Like `random_words`, but only the leading bits are fully mixed."""
    first, second = key_words(key)
    size = math.prod(shape)
    if size > STREAM:
        raise ValueError(f"a stream has 2²⁸ words, not {size}")
    start = first + second * jnp.uint32(FACTORS[1]) + jnp.uint32(stream * GOLDEN**2 % 2**32)
    x = jax.lax.iota(jnp.uint32, size).reshape(shape) * jnp.uint32(GOLDEN) + start
    x = (x ^ (x >> 16)) * jnp.uint32(FACTORS[0]) + second
    return (x ^ (x >> 15)) * jnp.uint32(FACTORS[1])


def dropout_masks(
    key: PRNGKeyArray, keep_prob: float | Float[Array, ""], shape: tuple[int, ...], stream: int = 0
) -> Bool[Array, "*shape"]:
    """True with probability `keep_prob`, to the nearest 2⁻²⁴."""
    uniform = (leading(key, shape, stream) >> 8).astype(jnp.int32)
    return uniform < jnp.round(jnp.asarray(keep_prob, jnp.float32) * 2**24).astype(jnp.int32)


def apply_dropout(
    inputs: Float[Array, "example *input"],
    mask: Bool[Array, "example *input"] | None,
    keep_prob: float | Float[Array, ""],
) -> Float[Array, "example *input"]:
    """Inputs where the mask is true, scaled by 1/`keep_prob` to preserve their expectation, and 0 elsewhere."""
    if mask is None:
        return inputs
    scale = (1 / jnp.asarray(keep_prob)).astype(inputs.dtype)
    return jnp.where(mask, inputs * scale, jnp.zeros((), inputs.dtype))


def normals(key: PRNGKeyArray, shape: tuple[int, ...], stream: int = 0) -> Float[Array, "*shape"]:
    """Standard normal numbers, in pairs (r cos φ, r sin φ) by the Box-Muller method."""
    size = math.prod(shape)
    half = -(-size // 2)
    lengths, angles = random_words(key, (2, half), stream)
    radius = jnp.sqrt(-2 * jnp.log(unit(lengths)))
    cos, sin = on_the_circle(angles)
    return jnp.concatenate([radius * cos, radius * sin])[:size].reshape(shape)


def unit(word: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The leading 24 bits of a word as a number strictly between 0 and 1."""
    return (word >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24) + jnp.float32(2**-25)


def on_the_circle(word: UInt32[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Cosine and sine of a random angle: within an eighth of a turn of one of four directions.

    It uses their Taylor series, whose next terms are below rounding error there. On a CPU, XLA's functions are ten
    times as slow.
    """
    angle = (unit(word) - 0.5) * jnp.float32(math.pi / 2)
    square = angle * angle
    sin = angle * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square / 362880))))
    cos = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square / 40320)))
    sideways, backwards = (word & 1) == 1, (word & 2) == 2
    sign = jnp.where(backwards, jnp.float32(-1), jnp.float32(1))
    return sign * jnp.where(sideways, -sin, cos), sign * jnp.where(sideways, cos, sin)
