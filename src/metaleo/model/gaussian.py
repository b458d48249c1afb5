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

    def sample(self, noise: Float[Array, "*shape"] | None) -> Float[Array, "*shape"]:
        """mean + scale ∘ noise, the noise being standard normal; without noise, the mean."""
        return self.mean if noise is None else self.mean + self.scale * noise


def smooth_scale(raw: Float[Array, "*shape"], initial: float) -> Float[Array, "*shape"]:
    """σ = initial · log₂(1 + exp(raw)): positive and with a gradient everywhere, and never steeper than linear.

    An exponential would do for small steps, but a latent step that lengthens a code multiplies σ, which lengthens
    the next step: at high learning rates one meta-gradient in forty overflowed.
    """
    return initial / math.log(2) * jax.nn.softplus(raw)


def official_scale(raw: Float[Array, "*shape"], initial: float) -> Float[Array, "*shape"]:
    """σ = max(exp(raw) - (1 - initial), 1e-10), as the authors' code has it: flat, so without gradient, below."""
    return jnp.maximum(jnp.exp(raw) - (1 - initial), 1e-10)


@dataclasses.dataclass(frozen=True)
class Slopes:
    """σ(raw) of one of the two, with its first and second derivative."""

    official: bool
    initial: float

    def __call__(self, raw: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], ...]:
        if self.official:
            growth = jnp.exp(raw)
            scale = growth - (1 - self.initial)
            slope = jnp.where(scale > 1e-10, growth, jnp.zeros_like(growth))
            return jnp.maximum(scale, 1e-10), slope, slope
        small = jnp.exp(-jnp.abs(raw))
        share = jnp.where(raw >= 0, jnp.ones_like(raw), small) / (1 + small)  # the logistic function
        factor = self.initial / math.log(2)
        return factor * (jnp.maximum(raw, 0) + jnp.log(1 + small)), factor * share, factor * share * (1 - share)


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
