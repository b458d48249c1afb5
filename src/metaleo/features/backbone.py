"""What every backbone is made of: convolutions and batch norms, as records of weights and pure functions."""

import abc
import dataclasses
import math
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

Side = Literal["rectified", "raw"]
"""An activation after its norm and ReLU, or before them."""


class Moments(NamedTuple):
    """Mean and variance of each channel, over a batch or running; always float32."""

    mean: Float[Array, " channel"]
    variance: Float[Array, " channel"]

    @classmethod
    def standard(cls, channels: int) -> "Moments":
        return cls(jnp.zeros(channels), jnp.ones(channels))


class Convolution(eqx.Module):
    """A k x k convolution without a bias, padded by k // 2 on each side."""

    weight: Float[Array, "height width input output"]
    stride: int = eqx.field(static=True)

    @classmethod
    def init(cls, key: PRNGKeyArray, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> "Convolution":
        scale = math.sqrt(2 / (size * size * outputs))  # He et al., fan-out
        return cls(scale * jax.random.normal(key, (size, size, inputs, outputs)), stride)

    def __call__(self, images: Float[Array, "image height width input"]) -> Float[Array, "image h w output"]:
        pad = self.weight.shape[0] // 2
        return jax.lax.conv_general_dilated(
            images,
            self.weight.astype(images.dtype),
            (self.stride, self.stride),
            ((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


class Norm(eqx.Module):
    """The learned half of a batch norm; its moments come with each pass."""

    scale: Float[Array, " channel"]
    offset: Float[Array, " channel"]

    @classmethod
    def init(cls, channels: int) -> "Norm":
        return cls(jnp.ones(channels), jnp.zeros(channels))


class Dense(eqx.Module):
    """A linear layer."""

    weight: Float[Array, "output input"]
    bias: Float[Array, " output"]

    @classmethod
    def init(cls, key: PRNGKeyArray, inputs: int, outputs: int) -> "Dense":
        bound = 1 / math.sqrt(inputs)
        return cls(jax.random.uniform(key, (outputs, inputs), minval=-bound, maxval=bound), jnp.zeros(outputs))

    def __call__(self, inputs: Float[Array, "*batch input"]) -> Float[Array, "*batch output"]:
        return inputs @ self.weight.T + self.bias[(None,) * (inputs.ndim - 1)]


@dataclasses.dataclass
class Pass:
    """One pass through a backbone: which moments its norms use, its dropout, its mixing, and what it met.

    Without `running` moments the norms use those of the batch. Lives inside one traced function only.
    """

    running: list[Moments] | None = None
    key: PRNGKeyArray | None = None
    """Of dropout; none without it."""
    keep_prob: float = 1.0
    mixing: Float[Array, " site"] | None = None
    """At each site where manifold mixup may happen, the weight of an image against its partner's."""
    seen: list[Moments] = dataclasses.field(default_factory=list)
    """The moments of each norm, in the order in which they were used."""
    taps: dict[tuple[int, str], Array] = dataclasses.field(default_factory=dict)
    """Activations by (layer, side)."""

    def tap(self, layer: int, side: Side, values: Float[Array, "image h w channel"]) -> None:
        self.taps[layer, side] = values

    def norm(self, norm: Norm, inputs: Float[Array, "image h w channel"]) -> Float[Array, "image h w channel"]:
        """(x - mean) / sqrt(variance + 1e-5) · scale + offset, in float32 inside."""
        values = precise(inputs)
        if self.running is None:
            mean = values.mean((0, 1, 2))
            moments = Moments(mean, jnp.maximum((values**2).mean((0, 1, 2)) - mean**2, 0))
        else:
            moments = self.running[len(self.seen)]
        self.seen.append(moments)
        slope = norm.scale * jax.lax.rsqrt(moments.variance + 1e-5)
        shift = norm.offset - moments.mean * slope
        return (values * slope[None, None, None] + shift[None, None, None]).astype(inputs.dtype)

    def dropout(self, inputs: Float[Array, "image h w channel"]) -> Float[Array, "image h w channel"]:
        """Keep each number with probability `keep_prob` (to the nearest 1/256), scaled by its inverse."""
        limit = round(self.keep_prob * 256)
        if self.key is None or limit == 256:
            return inputs
        self.key, key = jax.random.split(self.key)
        words = jax.random.bits(key, (*inputs.shape[:-1], -(-inputs.shape[-1] // 4)), jnp.uint32)
        bits = jax.lax.bitcast_convert_type(words, jnp.uint8)  # four draws from each random word
        draws = bits.reshape(*inputs.shape[:-1], -1)[..., : inputs.shape[-1]]
        return jnp.where(draws < jnp.uint8(limit), inputs * (256 / limit), jnp.zeros((), inputs.dtype))

    def mix(self, site: int, values: Float[Array, "image h w channel"]) -> Float[Array, "image h w channel"]:
        """Manifold mixup: each image with its partner, the one as far from the other end of the batch."""
        if self.mixing is None:
            return values
        weight = self.mixing[site].astype(values.dtype)
        return weight * values + (1 - weight) * values[::-1]


class Backbone(eqx.Module):
    """Images to activations of numbered layers."""

    MIX_SITES = 3

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Numbers per image in the last layer, after pooling."""

    @property
    @abc.abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that can be tapped; the last feeds the classifier."""

    @abc.abstractmethod
    def __call__(self, images: Float[Array, "image height width channel"], through: Pass) -> None:
        """Run the images through; activations and moments are left in the pass."""


def precise(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """In float32 at least."""
    return values if values.dtype == jnp.float64 else values.astype(jnp.float32)


def pool(values: Float[Array, "image h w channel"]) -> Float[Array, "image channel"]:
    """The average over space, in float32 at least."""
    return precise(values).mean((1, 2))


def relu(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.maximum(values, 0)
