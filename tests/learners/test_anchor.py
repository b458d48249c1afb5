"""Anchors against their equations written out in NumPy and SciPy, and an untrained anchored LEO against its anchor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from scipy.special import log_softmax, softmax

from helpers.small import DIM, HYPER, adapt, close, logits, make_batch, make_learner, make_structure, pad, shake
from metaleo.errors import BadInput
from metaleo.learners.anchor import ANCHORS, Anchor
from metaleo.learners.leo_noise import draw_noise
from metaleo.tasks.task import Batch

COUNTS = (2, 5, 1)


def make_anchor(kind="logistic", seed=0, steps=None):
    random = np.random.default_rng(seed)
    blank = Anchor.blank(kind, DIM)
    mean, variances = random.normal(size=DIM), random.uniform(0.1, 1, size=DIM)
    prior_shots = random.uniform(0.2, 3, size=DIM)
    measured = {"mean": mean, "variances": variances, "prior_shots": prior_shots}
    measured = {name: jnp.asarray(value, jnp.float32) for name, value in measured.items()}
    return dataclasses.replace(blank, **measured, steps=blank.steps if steps is None else steps)


def numbers(anchor):
    """m, σ², κ, s and λ."""
    measured = (np.asarray(one, np.float64) for one in (anchor.mean, anchor.variances, anchor.prior_shots))
    return *measured, *(float(np.exp(one)) for one in (anchor.log_sharpness, anchor.log_regulariser))


def rows_of(support, number):
    return np.asarray(support.inputs, np.float64)[np.asarray(support.targets)[:, number] == 1]


def with_ones(batch):
    return np.concatenate([np.asarray(batch.inputs, np.float64), np.ones((len(batch.inputs), 1))], axis=1)


def test_centroids_are_posterior_means():
    """Of N(c, σ²) with the prior N(m, σ²/κ) on c, from its precisions, for each direction by itself."""
    anchor, support = make_anchor(), make_batch(0, COUNTS)
    mean, variances, kappa, sharpness, _ = numbers(anchor)
    found = anchor.centroids(support)
    for number, count in enumerate(COUNTS):
        prior, data = kappa / variances, count / variances
        centre = (prior * mean + data * rows_of(support, number).mean(0)) / (prior + data)
        np.testing.assert_allclose(found[number, :-1], 2 * sharpness * centre, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[number, -1], -sharpness * centre @ centre, rtol=1e-4)


def test_sampled_centroids_have_the_posterior_spread():
    """The fewer examples a class has, the further its sampled centres lie from their mean."""
    anchor, support = make_anchor(), make_batch(0, COUNTS)
    _, variances, kappa, sharpness, _ = numbers(anchor)
    noise = np.random.default_rng(1).normal(size=(4000, len(COUNTS), DIM)).astype(np.float32)
    sampled = jax.vmap(anchor.centroids, (None, 0))(support, jnp.asarray(noise))[:, :, :-1] / (2 * sharpness)
    expected = np.sqrt(variances / (kappa + np.array(COUNTS)[:, None]))
    np.testing.assert_allclose(np.asarray(sampled).std(0), expected, rtol=0.05)
    centres = np.asarray(anchor.centroids(support))[:, :-1] / (2 * sharpness)
    np.testing.assert_allclose(np.asarray(sampled).mean(0), centres, atol=0.05)


def test_without_a_prior_they_are_plain_centroids():
    anchor, support = dataclasses.replace(make_anchor(), prior_shots=jnp.zeros(DIM)), make_batch(0, COUNTS)
    found = np.asarray(anchor.centroids(support))[:, :-1] / (2 * numbers(anchor)[3])
    np.testing.assert_allclose(found, [rows_of(support, number).mean(0) for number in range(3)], atol=1e-5)


def test_logits_are_distances():
    anchor, support, query = make_anchor("centroid"), make_batch(0, COUNTS), make_batch(1, COUNTS)
    weights = np.asarray(anchor.centroids(support))
    sharpness = numbers(anchor)[3]
    centres, inputs = weights[:, :-1] / (2 * sharpness), np.asarray(query.inputs)
    distances = -sharpness * ((inputs[:, None] - centres[None]) ** 2).sum(2)
    ours = inputs @ weights[:, :-1].T + weights[:, -1]
    np.testing.assert_allclose(log_softmax(ours, 1), log_softmax(distances, 1), atol=1e-4)


def objective(theta, anchor, support, prior):
    inputs, targets = with_ones(support), np.asarray(support.targets, np.float64)
    losses = -(targets * log_softmax(inputs @ theta.T + np.log(COUNTS), 1)).sum()
    return losses + numbers(anchor)[4] / 2 * ((theta - prior) ** 2).sum()


def minimise(anchor, support, prior):
    found = scipy.optimize.minimize(
        lambda flat: objective(flat.reshape(prior.shape), anchor, support, prior), prior.ravel().astype(np.float64)
    )
    return found.x.reshape(prior.shape)


def make_prior():
    return np.random.default_rng(1).normal(size=(len(COUNTS), DIM + 1)).astype(np.float32)


def test_fit_reaches_the_minimum_that_scipy_finds():
    anchor, support, prior = make_anchor(steps=500), make_batch(0, COUNTS), make_prior()
    found = anchor.fit(jnp.asarray(prior), support)
    np.testing.assert_allclose(found, minimise(anchor, support, prior), atol=1e-3)


def test_the_steps_that_it_has_are_enough():
    """Also where the regulariser is weak; as many without acceleration are not."""
    anchor = dataclasses.replace(make_anchor(), log_regulariser=jnp.log(jnp.float32(0.03)))
    support, prior = make_batch(0, COUNTS), make_prior()
    least = objective(minimise(anchor, support, prior), anchor, support, prior)
    begun = objective(prior, anchor, support, prior) - least
    left = objective(np.asarray(anchor.fit(jnp.asarray(prior), support)), anchor, support, prior) - least
    assert left < 1e-5 * begun


def test_first_step_of_fit_is_a_ridge_regression_on_what_is_left_over():
    anchor, support = make_anchor("ridge"), make_batch(0, COUNTS)
    prior = np.random.default_rng(1).normal(size=(3, DIM + 1)).astype(np.float32)
    inputs = with_ones(support)
    left_over = np.asarray(support.targets) - softmax(inputs @ prior.T + np.log(COUNTS), 1)
    regulariser = numbers(anchor)[4]
    system = inputs.T @ inputs / 2 + regulariser * np.eye(DIM + 1)
    expected = prior + np.linalg.solve(system, inputs.T @ left_over).T
    np.testing.assert_allclose(anchor.fit(jnp.asarray(prior), support), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ANCHORS)
def test_untrained_it_is_its_anchor(kind):
    """Latent steps and fine-tuning included: the decoder is zero, so that no step on a code changes the weights."""
    anchor = make_anchor(kind)
    leo = dataclasses.replace(make_learner("leo-anchored", anchor=kind, finetune_steps=0), anchor=anchor)
    support, query = make_batch(0, COUNTS), make_batch(1, (5, 5, 5))
    weights = anchor.fit(anchor.centroids(support), support)
    expected = query.inputs @ weights[:, :-1].T + weights[None, :, -1]
    close(logits(adapt(leo, support).head, query.inputs), expected)


def test_classes_without_examples_get_no_probability():
    leo, full = make_learner("leo-anchored"), make_batch(0, COUNTS)
    wide = Batch(full.inputs, jnp.pad(full.targets, ((0, 0), (0, 2))), full.mask)
    query = make_batch(1, COUNTS).inputs
    narrow, wider = (jax.nn.softmax(logits(adapt(leo, one).head, query)) for one in (full, wide))
    assert (np.asarray(wider[:, 3:]) == 0).all()
    close(wider[:, :3], narrow)


def test_only_samples_of_a_solution_draw_centres():
    leo, support, key = make_learner("leo-anchored"), make_batch(0, COUNTS), jax.random.key(0)
    assert draw_noise(leo, support, HYPER, key).anchor is None
    drawn = draw_noise(leo, support, None, key).anchor
    assert drawn.shape == (len(COUNTS), DIM)
    assert draw_noise(make_learner(), support, None, key).anchor is None


def test_sampled_classifiers_agree_more_with_more_examples():
    """Their probabilities differ in proportion to what is not known."""
    leo = dataclasses.replace(make_learner("leo-anchored", finetune_steps=0), anchor=make_anchor())
    query = make_batch(1, (5, 5, 5)).inputs
    spreads = []
    for counts in ((1, 1, 1), (5, 5, 5), (40, 40, 40)):
        support = make_batch(0, counts)
        heads = jax.vmap(lambda key, support=support: leo.adapt(support, None, key).head)(
            jax.random.split(jax.random.key(0), 200)
        )
        probabilities = jax.vmap(lambda head: jax.nn.softmax(logits(head, query)))(heads)
        spreads.append(float(probabilities.std(0).mean()))
    assert spreads[0] > 1.3 * spreads[1] > 1.3**2 * spreads[2]


def test_padding_changes_no_anchor():
    anchor, support = make_anchor(), make_batch(0, COUNTS)
    results = []
    for one in (support, pad(support, 5)):
        results.append(anchor.fit(anchor.centroids(one), one))
    close(*results)


def test_only_leo_anchored_has_an_anchor():
    with pytest.raises(BadInput, match="meta-sgd has no anchor; leo-anchored has"):
        make_structure("meta-sgd", anchor="ridge").blank()


def test_shaken_it_is_more_than_its_anchor():
    leo, support = make_learner("leo-anchored"), make_batch(0, COUNTS)
    query = make_batch(1, COUNTS).inputs
    before, after = (logits(adapt(one, support).head, query) for one in (leo, shake(leo)))
    assert np.abs(before - after).max() > 0.1
