"""Networks that map a support set to codes (Eq. 3), and a code to parameters (Eq. 4).

encoder g_φe: one example → its hidden code; relation net g_φr: every ordered pair of examples → one Gaussian code per
class; decoder g_φd: a code → a Gaussian over parameters.
"""

import dataclasses
import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import glorot_uniform
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.tasks.task import Batch


class Gaussian(eqx.Module):
    """N(mean, diag(scale²)); `scale` is the standard deviation, not the variance."""

    mean: Float[Array, "*shape"]
    scale: Float[Array, "*shape"]

    @classmethod
    def standard(cls, shape: tuple[int, ...], dtype: jnp.dtype) -> "Gaussian":
        """N(0, 1) for every entry."""
        return cls(jnp.zeros(shape, dtype), jnp.ones(shape, dtype))

    def sample(self, noise: Float[Array, "*shape"] | None) -> Float[Array, "*shape"]:
        """mean + scale ∘ noise, for standard normal noise; without noise, the mean."""
        return self.mean if noise is None else self.mean + self.scale * noise

    def kl_to_standard(self) -> Float[Array, ""]:
        """KL(N(μ, σ²) ‖ N(0, 1)) = (σ² + μ² - 1)/2 - log σ, averaged over entries (the second term of Eq. 6)."""
        return jnp.mean((self.scale**2 + self.mean**2 - 1) / 2 - jnp.log(self.scale))

    def sampled_kl_to_standard(self, noise: Float[Array, "*shape"]) -> Float[Array, ""]:
        """The authors' one-sample estimate of the same: log N(z; μ, σ²) - log N(z; 0, 1) at z = μ + σ ∘ noise.

        It uses the noise itself, because (z - μ)/σ would be pure rounding error where σ is 1e-10.
        """
        return jnp.mean((self.sample(noise) ** 2 - noise**2) / 2 - jnp.log(self.scale))


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps the raw output of a network to a standard deviation σ; `initial` is the value of σ at raw output 0.

    σ = initial · log₂(1 + exp(raw)) is positive, has a gradient everywhere, and grows at most linearly. An exponential
    would work for small steps, but a latent step that lengthens a code multiplies σ, which lengthens the next step: at
    high learning rates one meta-gradient in forty overflowed.

    `official`: σ = max(exp(raw) - (1 - initial), 1e-10), as in the authors' code; at the lower bound the gradient is 0.
    """

    official: bool
    initial: float

    def __call__(self, raw: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        if self.official:
            return jnp.maximum(jnp.exp(raw) - (1 - self.initial), 1e-10)
        return self.initial / math.log(2) * jax.nn.softplus(raw)


def code_scale(official: bool) -> Scale:
    """The scale of codes: σ = 0.1 where the relation net outputs 0. The authors use 0: an infinite KL term."""
    return Scale(official, 0.0 if official else 0.1)


def weights_scale(official: bool, codes: int, size: int) -> Scale:
    """The scale of weights: where the decoder outputs 0, σ is Glorot's for a matrix of this shape."""
    return Scale(official, math.sqrt(2 / (codes + size)))


class Encoder(eqx.Module):
    """h = x W, linear and without bias (Appendix B.3); with hidden layers, an MLP with ReLU (Appendix A.2)."""

    weight: Float[Array, "width code"]
    hidden: tuple[Float[Array, "_ width"], ...] = ()

    @classmethod
    def init(cls, key: PRNGKeyArray, dim: int, code: int, widths: tuple[int, ...] = ()) -> "Encoder":
        *hidden, weight = layers(key, (dim, *widths, code))
        return cls(weight, tuple(hidden))

    def __call__(self, inputs: Float[Array, "example dim"]) -> Float[Array, "example code"]:
        return through(self.hidden, inputs) @ self.weight


def layers(key: PRNGKeyArray, sizes: tuple[int, ...]) -> list[Float[Array, "_ _"]]:
    """Weight matrices from each size to the next."""
    keys = [key] if len(sizes) == 2 else jax.random.split(key, len(sizes) - 1)
    return [glorot_uniform()(one, shape) for one, shape in zip(keys, itertools.pairwise(sizes), strict=True)]


def through(hidden: tuple[Float[Array, "_ _"], ...], values: Float[Array, "*batch _"]) -> Float[Array, "*batch _"]:
    """Apply ReLU layers without biases."""
    for weight in hidden:
        values = jax.nn.relu(values @ weight)
    return values


PAIRS_AT_ONCE = 2**16
"""Pairs processed at a time; all pairs of many examples would fill the memory."""


class RelationNet(eqx.Module):
    """An MLP without biases over all (NK)² pairs, with ReLU between layers and none after the last (Eq. 3)."""

    first: Float[Array, "pair hidden"]
    middle: Float[Array, "hidden hidden"]
    last: Float[Array, "hidden out"]

    @classmethod
    def init(cls, key: PRNGKeyArray, code: int) -> "RelationNet":
        pair = 2 * code  # also the width of the hidden layers, and of the output: mean and scale of a code
        return cls(*(glorot_uniform()(layer_key, (pair, pair)) for layer_key in jax.random.split(key, 3)))

    def __call__(
        self, hidden_codes: Float[Array, "example code"], support: Batch, per_class: bool = True
    ) -> Float[Array, "codes out"]:
        """(1/NK²) Σ_k Σ_m Σ_k′ g([h_nk, h_mk′]) for each class n: the mean over pairs whose first element is in n.

        Without `per_class` there is one code for the task, from the mean over all pairs.

        Two rearrangements save most of the work without changing the result: the first layer acts on the two halves
        of a pair separately, and the mean over pairs is taken before the last layer, which is linear.
        """
        left, right = hidden_codes @ self.first.reshape(2, hidden_codes.shape[1], -1)
        partners = support.weights()

        def mean_over_partners(own: Float[Array, " hidden"]) -> Float[Array, " hidden"]:
            return partners @ jax.nn.relu(jax.nn.relu(own[None, :] + right) @ self.middle)

        at_once = max(1, PAIRS_AT_ONCE // len(left))
        if len(left) <= at_once:
            means = jax.vmap(mean_over_partners)(left)
        else:
            means = jax.lax.map(mean_over_partners, left, batch_size=at_once)
        return self.first_elements(support, per_class) @ means @ self.last

    def first_elements(self, support: Batch, per_class: bool) -> Float[Array, "codes example"]:
        """The weight of each example, as the first of a pair, in the mean of each code."""
        return support.class_weights() if per_class else support.weights()[None, :]


class Decoder(eqx.Module):
    """mean = z M and raw scale = z S, linear and without bias (Eq. 4). Rows of M and S are latent dimensions.

    With hidden layers (Appendix A.2), z is their output for the code. With a `start`, z M is added to it.
    """

    to_mean: Float[Array, "width size"]
    to_raw_scale: Float[Array, "width size"]
    hidden: tuple[Float[Array, "_ _"], ...] = ()
    start: Float[Array, " size"] | None = None

    @classmethod
    def init(
        cls,
        key: PRNGKeyArray,
        latent: int,
        size: int,
        widths: tuple[int, ...] = (),
        start: Float[np.ndarray, " size"] | None = None,
        zero: bool = False,
    ) -> "Decoder":
        *hidden, weight = layers(key, (latent, *widths, 2 * size))
        weight = jnp.zeros_like(weight) if zero else weight
        to_mean, to_raw_scale = jnp.split(weight, 2, axis=1)
        return cls(to_mean, to_raw_scale, tuple(hidden), None if start is None else jnp.asarray(start, float))

    @property
    def weight(self) -> Float[Array, "width twice_size"]:
        """φ_d of the paper: both matrices side by side."""
        return jnp.concatenate([self.to_mean, self.to_raw_scale], axis=1)

    @property
    def linear(self) -> bool:
        return not self.hidden and self.start is None

    def __call__(
        self, code: Float[Array, "code latent"]
    ) -> tuple[Float[Array, "code size"], Float[Array, "code size"]]:
        """The mean and raw scale of the parameters."""
        features = through(self.hidden, code)
        mean = features @ self.to_mean
        return mean if self.start is None else self.start[None, :] + mean, features @ self.to_raw_scale
