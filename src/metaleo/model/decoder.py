"""g_φd: a code to a Gaussian over the parameters that it stands for."""

import equinox as eqx
import jax.numpy as jnp
from jax.nn.initializers import glorot_uniform
from jaxtyping import Array, Float, PRNGKeyArray


class Decoder(eqx.Module):
    """mean = z M and raw scale = z S, linear and without bias (Eq. 4). Rows are latent dimensions."""

    to_mean: Float[Array, "latent dim"]
    to_raw_scale: Float[Array, "latent dim"]

    @classmethod
    def init(cls, key: PRNGKeyArray, latent: int, dim: int) -> "Decoder":
        return cls(*jnp.split(glorot_uniform()(key, (latent, 2 * dim)), 2, axis=1))

    @property
    def weight(self) -> Float[Array, "latent twice_dim"]:
        """φ_d of the paper: both matrices side by side."""
        return jnp.concatenate([self.to_mean, self.to_raw_scale], axis=1)
