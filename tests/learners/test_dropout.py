"""Dropout: the right share is kept, and the expectation stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metaleo.learners.learner import draw_masks, drop


@pytest.mark.parametrize("keep", [1 / 256, 0.3, 0.711524088, 1.0])
def test_share_kept(keep):
    mask = draw_masks(jax.random.key(0), keep, (300, 701))
    deviation = np.sqrt(keep * (1 - keep) / mask.size)
    assert abs(float(mask.mean()) - keep) <= 4 * deviation + 1 / 512
    if keep == 1:
        assert mask.all()


def test_expectation_stays():
    inputs = jnp.ones((500, 400))
    dropped = drop(inputs, draw_masks(jax.random.key(1), 0.36, inputs.shape), 0.36)
    assert abs(float(dropped.mean()) - 1) < 4 * float(dropped.std()) / np.sqrt(inputs.size)
    assert (drop(inputs, None, 0.36) == inputs).all()


def test_entries_are_independent_across_a_word():
    """Four entries come from each random word; neighbours must not agree more than chance."""
    mask = np.asarray(draw_masks(jax.random.key(2), 0.5, (400_000,)), float)
    for lag in (1, 2, 3, 4):
        assert abs(np.corrcoef(mask[:-lag], mask[lag:])[0, 1]) < 0.01
