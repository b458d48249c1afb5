"""What is done to rows before a learner sees them, against NumPy."""

import jax.numpy as jnp
import numpy as np

from helpers.small import make_metaset
from metaleo.tasks.preparation import LEAST_BETWEEN, ClassMoments, along, emphasise, whiten


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def rows_by_class(metaset):
    return metaset.read(metaset.rows).astype(np.float64).reshape(len(metaset.counts), -1, metaset.dim)


def test_centred_whitened_and_of_length_one():
    metaset = make_metaset()
    rows = rows_by_class(metaset)
    centre = unit(rows).reshape(-1, metaset.dim).mean(0)
    centred = unit(unit(rows) - centre)
    apart = (centred - centred.mean(1, keepdims=True)).reshape(-1, metaset.dim)
    variances, directions = np.linalg.eigh(apart.T @ apart / len(apart))
    powers = (0.0, 0.25)
    for power, preparation in zip(powers, whiten(metaset, powers), strict=True):
        expected = unit(centred @ (directions * variances**-power) @ directions.T)
        np.testing.assert_allclose(preparation(jnp.asarray(rows, jnp.float32)), expected, atol=1e-5)


def test_half_the_power_whitens_entirely():
    """With p = ½ the covariance within classes becomes that of noise, before rows are scaled to length one again."""
    metaset = make_metaset(images=200)
    rows = rows_by_class(metaset)
    (preparation,) = whiten(metaset, (0.5,))
    centred = unit(unit(rows) - np.asarray(preparation.centre))
    apart = (centred - centred.mean(1, keepdims=True)).reshape(-1, metaset.dim)
    covariance, whitening = apart.T @ apart / len(apart), np.asarray(preparation.whitening, np.float64)
    np.testing.assert_allclose(whitening.T @ covariance @ whitening, np.eye(metaset.dim), atol=1e-4)


def test_a_rotation_changes_no_distance():
    metaset = make_metaset()
    (preparation,) = whiten(metaset, (0.25,))
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(metaset.dim, metaset.dim)))
    rows = jnp.asarray(metaset.read(metaset.rows))
    before, after = (np.asarray(one(rows)) for one in (preparation, along(preparation, turn)))
    np.testing.assert_allclose(after, before @ turn, atol=1e-5)


def test_directions_in_which_classes_differ_are_stretched():
    metaset = make_metaset(images=30)
    (plain,) = whiten(metaset, (0.25,))
    prepared = np.asarray(plain(jnp.asarray(rows_by_class(metaset), jnp.float32)), np.float64)
    means = prepared.mean(1)
    spread, directions = np.linalg.eigh(np.cov(means, rowvar=False))
    within = ((prepared - means[:, None]) @ directions).reshape(-1, metaset.dim)
    within = (within**2).sum(0) / (len(within) - len(means))
    between = np.maximum(spread - within / 30, 0)
    between += LEAST_BETWEEN * between.mean()
    for power, found in zip((0.0, 0.5), emphasise(plain, metaset, (0.0, 0.5)), strict=True):
        expected = unit(prepared @ directions * (between / (between + within)) ** power)
        got = np.asarray(found(jnp.asarray(rows_by_class(metaset), jnp.float32)))
        distances = [np.linalg.norm(rows[:, :, None] - rows[:, None], axis=-1) for rows in (got, expected)]
        np.testing.assert_allclose(*distances, atol=1e-4)


def test_moments_of_classes():
    metaset = make_metaset(images=30)
    (preparation,) = whiten(metaset, (0.125,))
    found = ClassMoments.of(preparation, metaset)
    rows = np.asarray(preparation(jnp.asarray(rows_by_class(metaset), jnp.float32)), np.float64)
    np.testing.assert_allclose(found.means, rows.mean(1), atol=1e-5)
    np.testing.assert_allclose(found.variances, rows.var(1, ddof=1).mean(0), rtol=1e-4)
    np.testing.assert_allclose(found.between(), rows.mean(1).var(0, ddof=1) - found.variances / 30, atol=1e-5)
