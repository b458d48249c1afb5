"""g_φe: one example to its hidden code."""

import itertools

import equinox as eqx
import jax
from jax.nn.initializers import glorot_uniform
from jaxtyping import Array, Float, PRNGKeyArray


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
    """Matrices from each size to the next."""
    keys = [key] if len(sizes) == 2 else jax.random.split(key, len(sizes) - 1)
    return [glorot_uniform()(one, shape) for one, shape in zip(keys, itertools.pairwise(sizes), strict=True)]


def through(hidden: tuple[Float[Array, "_ _"], ...], values: Float[Array, "*batch _"]) -> Float[Array, "*batch _"]:
    """ReLU layers without biases."""
    for weight in hidden:
        values = jax.nn.relu(values @ weight)
    return values
