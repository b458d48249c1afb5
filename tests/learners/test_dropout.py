"""Dropout: the expectation stays, and where nothing is dropped nothing changes. (The shares: test_randomness.py.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from helpers.small import HYPER, make_batch
from metaleo._jax.random import apply_dropout, dropout_masks
from metaleo.learners.base import QUERY, SUPPORT, dropout_inputs


def test_expectation_stays():
    inputs = jnp.ones((500, 400))
    values = apply_dropout(inputs, dropout_masks(jax.random.key(1), 0.36, inputs.shape), 0.36)
    assert abs(float(values.mean()) - 1) < 4 * float(values.std()) / np.sqrt(inputs.size)
    assert (apply_dropout(inputs, None, 0.36) == inputs).all()


def test_keeping_all_changes_nothing():
    batch, key = make_batch(), jax.random.key(0)
    assert (dropout_inputs(batch, dataclasses.replace(HYPER, keep_prob=1.0), key) == batch.inputs).all()
    assert (dropout_inputs(batch, None, key) == batch.inputs).all()
    assert (dropout_inputs(batch, HYPER, None) == batch.inputs).all()


def test_support_and_query_are_masked_apart():
    batch, key = make_batch(counts=(40, 40, 40)), jax.random.key(0)
    one, other = (dropout_inputs(batch, HYPER, key, stream) == 0 for stream in (SUPPORT, QUERY))
    assert abs(float(np.corrcoef(one.ravel(), other.ravel())[0, 1])) < 5 / np.sqrt(one.size)
