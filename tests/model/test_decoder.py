"""The penalty on a decoder's rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metaleo.devices import AXIS, in_parts
from metaleo.model.decoder import Decoder
from metaleo.objective import orthogonality


def directly(decoder):
    """Eq. 7 as it is printed, for each layer."""
    layers = [*decoder.hidden, decoder.weight]
    rows = [layer / jnp.linalg.norm(layer, axis=1, keepdims=True) for layer in layers]
    return sum(jnp.mean((row @ row.T - jnp.eye(len(row))) ** 2) for row in rows) / len(rows)


def test_orthogonality_and_its_gradient_are_those_of_the_paper():
    """Although it is written out."""
    with jax.enable_x64(True):
        decoder = Decoder.init(jax.random.key(0), 4, 6, widths=(5,))
        decoder = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), decoder)
        value, gradient = jax.jit(jax.value_and_grad(lambda own: orthogonality(*own.hidden, own.weight)))(decoder)
        expected, expected_gradient = jax.jit(jax.value_and_grad(directly))(decoder)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        for one, other in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-14)


@pytest.mark.slow
def test_devices_share_the_rows_of_orthogonality():
    """The mean of what they have is the gradient, and each has a part of it; rows that cannot be shared all have."""

    def on_two(weight):
        def own(_):
            with in_parts():
                return jax.value_and_grad(orthogonality)(weight)

        return jax.vmap(own, axis_name=AXIS)(jnp.arange(2))

    for rows in (6, 5):
        weight = jax.random.normal(jax.random.key(0), (rows, 8))
        value, gradient = jax.value_and_grad(orthogonality)(weight)
        values, gradients = on_two(weight)
        np.testing.assert_allclose(values.mean(), value, rtol=1e-6)
        np.testing.assert_allclose(gradients.mean(0), gradient, atol=1e-7)
        assert np.any(gradients[0, 3:]) == np.any(gradients[1, :3]) == (rows == 5)
