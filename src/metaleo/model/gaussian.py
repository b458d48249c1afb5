"""Diagonal Gaussians over codes and over weights, and how their scale is read off a network's output."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Gaussian(eqx.Module):
    """N(mean, diag(scale²)); `scale` is the standard deviation, not the variance."""

    mean: Float[Array, "*shape"]
    scale: Float[Array, "*shape"]

    @classmethod
    def standard(cls, shape: tuple[int, ...], dtype: jnp.dtype) -> "Gaussian":
        """N(0, 1) in every number."""
        return cls(jnp.zeros(shape, dtype), jnp.ones(shape, dtype))

    def sample(self, noise: Float[Array, "*shape"] | None) -> Float[Array, "*shape"]:
        """mean + scale ∘ noise, the noise being standard normal; without noise, the mean."""
        return self.mean if noise is None else self.mean + self.scale * noise


@dataclasses.dataclass(frozen=True)
class Scale:
    """How a standard deviation σ is read off a network's output; `initial` is its value where that is 0.

    σ = initial · log₂(1 + exp(raw)) is positive, has a gradient everywhere, and is never steeper than linear. An
    exponential would do for small steps, but a latent step that lengthens a code multiplies σ, which lengthens the
    next step: at high learning rates one meta-gradient in forty overflowed.

    `official`: σ = max(exp(raw) - (1 - initial), 1e-10), as the authors' code has it: flat, so without gradient, below.
    """

    official: bool
    initial: float

    def __call__(self, raw: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        if self.official:
            return jnp.maximum(jnp.exp(raw) - (1 - self.initial), 1e-10)
        return self.initial / math.log(2) * jax.nn.softplus(raw)


def code_scale(official: bool) -> Scale:
    """σ of a code where the relation net says 0. The authors' code starts at 0, where the KL term is infinite."""
    return Scale(official, 0.0 if official else 0.1)


def weights_scale(official: bool, codes: int, size: int) -> Scale:
    """σ of weights where the decoder says 0, as Glorot's for a matrix of this shape."""
    return Scale(official, math.sqrt(2 / (codes + size)))


def kl_to_standard(gaussian: Gaussian) -> Float[Array, ""]:
    """KL(N(μ, σ²) ‖ N(0, 1)) = (σ² + μ² - 1)/2 - log σ, the mean over entries (the second term of Eq. 6)."""
    mean, scale = gaussian.mean, gaussian.scale
    return jnp.mean((scale**2 + mean**2 - 1) / 2 - jnp.log(scale))


def sampled_kl_to_standard(gaussian: Gaussian, noise: Float[Array, "*shape"]) -> Float[Array, ""]:
    """The authors' one-sample estimate of the same: log N(z; μ, σ²) - log N(z; 0, 1) at z = μ + σ ∘ noise.

    Written in the noise itself: (z - μ)/σ would be rounding error alone where σ is 1e-10.
    """
    z = gaussian.sample(noise)
    return jnp.mean((z**2 - noise**2) / 2 - jnp.log(gaussian.scale))
