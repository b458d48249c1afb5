"""g_φd: a code to a Gaussian over the parameters that it stands for."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.model.encoder import layers, through


class Decoder(eqx.Module):
    """mean = z M and raw scale = z S, linear and without bias (Eq. 4). Rows are latent dimensions.

    With hidden layers (Appendix A.2) z is what they make of the code. With a `start`, the mean is a departure from it.
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
    ) -> "Decoder":
        *hidden, weight = layers(key, (latent, *widths, 2 * size))
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
        """Mean and raw scale."""
        features = through(self.hidden, code)
        mean = features @ self.to_mean
        return mean if self.start is None else self.start[None, :] + mean, features @ self.to_raw_scale
