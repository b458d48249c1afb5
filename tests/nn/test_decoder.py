"""The penalty on a decoder's rows."""

import jax
import jax.numpy as jnp
import numpy as np

from metaleo.losses import orthogonality
from metaleo.nn.encoder_decoder import Decoder


def directly(decoder):
    """Eq. 7 as it is printed, for each layer."""
    layers = [*decoder.hidden, decoder.weight]
    rows = [layer / jnp.linalg.norm(layer, axis=1, keepdims=True) for layer in layers]
    return sum(jnp.mean((row @ row.T - jnp.eye(len(row))) ** 2) for row in rows) / len(rows)


def test_orthogonality_and_its_gradient_are_those_of_the_paper():
    with jax.enable_x64(True):
        decoder = Decoder.init(jax.random.key(0), 4, 6, widths=(5,))
        decoder = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), decoder)
        value, gradient = jax.jit(jax.value_and_grad(lambda own: orthogonality(*own.hidden, own.weight)))(decoder)
        expected, expected_gradient = jax.jit(jax.value_and_grad(directly))(decoder)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        for one, other in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-14)


def test_a_row_of_zeros_has_no_gradient():
    weight = jnp.eye(3, 5).at[1].set(0)
    value, gradient = jax.value_and_grad(orthogonality)(weight)
    np.testing.assert_allclose(value, 1 / 9, rtol=1e-6)  # its cosine with itself is 0, not 1
    assert not np.any(gradient)
