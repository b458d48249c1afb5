"""The penalty on a decoder's rows."""

import jax
import jax.numpy as jnp
import numpy as np

from metaleo.model.decoder import Decoder
from metaleo.objective import orthogonality


def directly(decoder):
    """Eq. 7 as it is printed, for each layer."""
    layers = [*decoder.hidden, decoder.weight]
    rows = [layer / jnp.linalg.norm(layer, axis=1, keepdims=True) for layer in layers]
    return sum(jnp.mean((row @ row.T - jnp.eye(len(row))) ** 2) for row in rows) / len(rows)


def test_orthogonality_and_its_gradient_are_those_of_the_paper():
    """Although only one half of the gradient is computed."""
    with jax.enable_x64(True):
        decoder = Decoder.init(jax.random.key(0), 4, 6, widths=(5,))
        decoder = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), decoder)
        value, gradient = jax.value_and_grad(lambda own: orthogonality(*own.hidden, own.weight))(decoder)
        expected, expected_gradient = jax.value_and_grad(directly)(decoder)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        for one, other in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-14)
