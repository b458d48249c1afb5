"""What is done to rows before a learner sees them, against NumPy."""

import jax.numpy as jnp
import numpy as np

from helpers.small import make_metaset
from metaleo.tasks.preparation import Moments, class_means


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_centred_whitened_and_of_length_one():
    metaset = make_metaset()
    rows = metaset.read(metaset.rows).astype(np.float64).reshape(len(metaset.counts), -1, metaset.dim)
    centre = unit(rows).reshape(-1, metaset.dim).mean(0)
    centred = unit(unit(rows) - centre)
    apart = (centred - centred.mean(1, keepdims=True)).reshape(-1, metaset.dim)
    variances, directions = np.linalg.eigh(apart.T @ apart / len(apart))
    for power in (0.0, 0.25):
        expected = unit(centred @ (directions * variances**-power) @ directions.T)
        preparation = Moments.of(metaset).preparation(power)
        np.testing.assert_allclose(preparation(jnp.asarray(rows, jnp.float32)), expected, atol=1e-5)
        np.testing.assert_allclose(class_means(preparation, metaset), expected.mean(1), atol=1e-5)


def test_half_the_power_whitens_entirely():
    """With p = ½ the covariance within classes becomes that of noise, before rows are scaled to length one again."""
    metaset = make_metaset(images=200)
    moments = Moments.of(metaset)
    covariance = (moments.directions * moments.variances) @ moments.directions.T
    whitening = np.asarray(moments.preparation(0.5).whitening, np.float64)
    np.testing.assert_allclose(whitening @ covariance @ whitening, np.eye(metaset.dim), atol=1e-4)
