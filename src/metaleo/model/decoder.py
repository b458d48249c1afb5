"""g_φd: a code to a Gaussian over the parameters that it stands for."""

import equinox as eqx
from jax.nn.initializers import glorot_uniform
from jaxtyping import Array, Float, PRNGKeyArray


class Decoder(eqx.Module):
    """(mean, raw scale) = z W, linear and without bias (Eq. 4). Rows of W are latent dimensions."""

    weight: Float[Array, "latent twice_dim"]

    @classmethod
    def init(cls, key: PRNGKeyArray, latent: int, dim: int) -> "Decoder":
        return cls(glorot_uniform()(key, (latent, 2 * dim)))

    @property
    def to_mean(self) -> Float[Array, "latent dim"]:
        return self.weight[:, : self.weight.shape[1] // 2]

    @property
    def to_raw_scale(self) -> Float[Array, "latent dim"]:
        return self.weight[:, self.weight.shape[1] // 2 :]
