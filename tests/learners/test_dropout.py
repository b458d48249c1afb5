"""Dropout: the expectation stays, and where nothing is dropped nothing changes. (The shares: test_randomness.py.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from helpers.small import HYPER, make_batch
from metaleo.learners.learner import QUERY, SUPPORT, drop, dropped
from metaleo.randomness import masks


def test_expectation_stays():
    inputs = jnp.ones((500, 400))
    values = drop(inputs, masks(jax.random.key(1), 0.36, inputs.shape), 0.36)
    assert abs(float(values.mean()) - 1) < 4 * float(values.std()) / np.sqrt(inputs.size)
    assert (drop(inputs, None, 0.36) == inputs).all()


def test_keeping_all_changes_nothing():
    batch, key = make_batch(), jax.random.key(0)
    assert (dropped(batch, dataclasses.replace(HYPER, keep=1.0), key) == batch.inputs).all()
    assert (dropped(batch, None, key) == batch.inputs).all()
    assert (dropped(batch, HYPER, None) == batch.inputs).all()


def test_support_and_query_are_masked_apart():
    batch, key = make_batch(counts=(40, 40, 40)), jax.random.key(0)
    one, other = (dropped(batch, HYPER, key, stream) == 0 for stream in (SUPPORT, QUERY))
    assert abs(float(np.corrcoef(one.ravel(), other.ravel())[0, 1])) < 5 / np.sqrt(one.size)
