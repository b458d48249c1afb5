"""Batches: one-hot targets, and averages over the examples of a class that are present."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metaleo.tasks.task import labelled

INPUTS = jnp.arange(10.0).reshape(5, 2)
LABELS = np.array([2, 0, 2, 1, 2])


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_labelled(as_array):
    batch = labelled(INPUTS, as_array(LABELS), 4)
    np.testing.assert_array_equal(batch.targets, np.eye(4)[LABELS])
    np.testing.assert_array_equal(batch.inputs, INPUTS)
    assert batch.mask.all()
    assert batch.mask.shape == (5,)
    assert batch.targets.dtype == INPUTS.dtype


def test_way_is_the_number_of_classes_even_of_those_absent():
    assert labelled(INPUTS, LABELS, 3).way == 3
    assert labelled(INPUTS, LABELS, 7).way == 7


def test_labelled_keeps_the_mask():
    mask = jnp.array([True, False, True, True, False])
    np.testing.assert_array_equal(labelled(INPUTS, LABELS, 3, mask).mask, mask)


def test_labelled_in_double_precision(float64):
    batch = labelled(jnp.ones((5, 2), jnp.float64), LABELS, 3)
    assert batch.targets.dtype == jnp.float64
    assert batch.class_weights().dtype == jnp.float64


def test_class_weights():
    third = 1 / 3
    np.testing.assert_allclose(
        labelled(INPUTS, LABELS, 3).class_weights(),
        [[0, 1, 0, 0, 0], [0, 0, 0, 1, 0], [third, 0, third, 0, third]],
        rtol=1e-6,
    )


def test_class_weights_pass_over_what_is_masked():
    mask = jnp.array([True, True, False, True, True])
    np.testing.assert_allclose(
        labelled(INPUTS, LABELS, 3, mask).class_weights(),
        [[0, 1, 0, 0, 0], [0, 0, 0, 1, 0], [0.5, 0, 0, 0, 0.5]],
    )


def test_masked_examples_change_no_mean():
    """Padding may hold any finite number."""
    padded = jnp.concatenate([INPUTS, jnp.full((3, 2), 1e6)])
    labels = np.concatenate([LABELS, [0, 1, 2]])
    mask = jnp.arange(8) < 5
    bare, full = labelled(INPUTS, LABELS, 3), labelled(padded, labels, 3, mask)
    means = jax.jit(lambda batch: batch.class_weights() @ batch.inputs)
    np.testing.assert_allclose(means(full), means(bare), rtol=1e-6)
    np.testing.assert_allclose(means(bare), [[2, 3], [6, 7], [4, 5]], rtol=1e-6)
