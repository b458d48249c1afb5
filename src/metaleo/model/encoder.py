"""g_φe: one example to its hidden code."""

import equinox as eqx
from jax.nn.initializers import glorot_uniform
from jaxtyping import Array, Float, PRNGKeyArray


class Encoder(eqx.Module):
    """h = x W, linear and without bias (Appendix B.3)."""

    weight: Float[Array, "dim hidden"]

    @classmethod
    def init(cls, key: PRNGKeyArray, dim: int, hidden: int) -> "Encoder":
        return cls(glorot_uniform()(key, (dim, hidden)))

    def __call__(self, inputs: Float[Array, "example dim"]) -> Float[Array, "example hidden"]:
        return inputs @ self.weight
