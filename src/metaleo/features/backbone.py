"""Building blocks of all backbones: convolutions and batch norms, as records of weights and pure functions."""

import abc
import dataclasses
import math
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

Side = Literal["rectified", "raw"]
"""Whether an activation is taken after its norm and ReLU (`rectified`) or before them (`raw`)."""


class Moments(NamedTuple):
    """Mean and variance of each channel, of a batch or as running averages; always float32."""

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
    """The learned parameters of a batch norm; `Pass` supplies the moments."""

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
    """The settings of one forward pass (moments, dropout, mixup) and the activations and moments it records.

    Without `running` moments, norms use those of the batch. A `Pass` must not outlive the traced function it is in.
    """

    running: list[Moments] | None = None
    key: PRNGKeyArray | None = None
    """Random key for dropout; `None` disables dropout."""
    keep_prob: float = 1.0
    mixing: Float[Array, " site"] | None = None
    """For each site of manifold mixup, the weight of an image; its partner gets the rest."""
    seen: list[Moments] = dataclasses.field(default_factory=list)
    """The moments that each norm used, in order of execution."""
    taps: dict[tuple[int, str], Array] = dataclasses.field(default_factory=dict)
    """Recorded activations by (layer, side)."""

    def tap(self, layer: int, side: Side, values: Float[Array, "image h w channel"]) -> None:
        self.taps[layer, side] = values

    def norm(self, norm: Norm, inputs: Float[Array, "image h w channel"]) -> Float[Array, "image h w channel"]:
        """Return (x - mean) / sqrt(variance + 1e-5) · scale + offset, computed in float32 at least."""
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
        """Keep each activation with probability `keep_prob` (to the nearest 1/256), and divide it by that."""
        limit = round(self.keep_prob * 256)
        if self.key is None or limit == 256:
            return inputs
        self.key, key = jax.random.split(self.key)
        words = jax.random.bits(key, (*inputs.shape[:-1], -(-inputs.shape[-1] // 4)), jnp.uint32)
        bits = jax.lax.bitcast_convert_type(words, jnp.uint8)  # four draws from each random word
        draws = bits.reshape(*inputs.shape[:-1], -1)[..., : inputs.shape[-1]]
        return jnp.where(draws < jnp.uint8(limit), inputs * (256 / limit), jnp.zeros((), inputs.dtype))

    def mix(self, site: int, values: Float[Array, "image h w channel"]) -> Float[Array, "image h w channel"]:
        """Apply manifold mixup: mix image i of a batch of n with image n - 1 - i."""
        if self.mixing is None:
            return values
        weight = self.mixing[site].astype(values.dtype)
        return weight * values + (1 - weight) * values[::-1]


class Backbone(eqx.Module):
    """A network from images to the activations of numbered layers."""

    MIX_SITES = 3

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Number of features per image in the last layer, after pooling."""

    @property
    @abc.abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose activations are recorded; the last feeds the classifier."""

    @abc.abstractmethod
    def __call__(self, images: Float[Array, "image height width channel"], through: Pass) -> None:
        """Run the images through the network and record activations and moments in the pass."""


def precise(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Convert to float32, or keep float64."""
    return values if values.dtype == jnp.float64 else values.astype(jnp.float32)


def pool(values: Float[Array, "image h w channel"]) -> Float[Array, "image channel"]:
    """Average over height and width, in float32 or float64."""
    return precise(values).mean((1, 2))


def relu(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.maximum(values, 0)
