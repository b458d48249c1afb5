"""E: features to where a baseline compares them."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float


class Embedding(eqx.Module):
    """E x = x + x D, linear and without bias: the features themselves at first, and what is learned is D."""

    departure: Float[Array, "dim dim"]

    @classmethod
    def init(cls, dim: int) -> "Embedding":
        return cls(jnp.zeros((dim, dim)))

    def __call__(self, inputs: Float[Array, "*example dim"]) -> Float[Array, "*example dim"]:
        return inputs + inputs @ self.departure

    def transpose(self, weights: Float[Array, "way dim"]) -> Float[Array, "way dim"]:
        """Eᵀ w, for which (Eᵀ w)·x = w·(E x): a head on embedded inputs becomes one on inputs."""
        return weights + weights @ self.departure.T
