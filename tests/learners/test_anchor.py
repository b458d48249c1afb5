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
from metaleo.tasks.preparation import Moments
from metaleo.tasks.task import Batch
from metaleo.training.run import choose_anchor

COUNTS = (2, 5, 1)


def make_anchor(kind="logistic", classes=4, seed=0, steps=None):
    random = np.random.default_rng(seed)
    blank = Anchor.blank(kind, DIM, classes)
    means = jnp.asarray(random.normal(size=(classes, DIM)), jnp.float32)
    departure = jnp.asarray(0.1 * random.normal(size=(DIM, DIM)), jnp.float32)
    embedding = dataclasses.replace(blank.embedding, departure=departure)
    steps = blank.steps if steps is None else steps
    return dataclasses.replace(blank, means=means, embedding=embedding, steps=steps)


def numbers(anchor):
    """E, the μ_j, κ, τ, s and λ."""
    embed = np.eye(DIM) + np.asarray(anchor.embedding.departure, np.float64)
    logs = anchor.log_prior_shots, anchor.log_focus, anchor.log_sharpness, anchor.log_regulariser
    return embed, np.asarray(anchor.means, np.float64) @ embed, *(float(np.exp(one)) for one in logs)


def unit(x):
    return x / np.linalg.norm(x)


def with_ones(batch):
    return np.concatenate([np.asarray(batch.inputs, np.float64), np.ones((len(batch.inputs), 1))], axis=1)


@pytest.mark.parametrize("training", [False, True])
def test_centroids_by_hand(training):
    anchor, support = make_anchor(), make_batch(0, COUNTS)
    embed, means, kappa, tau, sharpness, _ = numbers(anchor)
    found = anchor.centroids(anchor.embed(support), training)
    for number, count in enumerate(COUNTS):
        own = np.asarray(support.inputs)[np.asarray(support.targets)[:, number] == 1] @ embed
        cosines = np.array([unit(own.mean(0)) @ unit(mean) for mean in means])
        if training:
            cosines[cosines.argmax()] = -1
        prior = softmax(tau * cosines) @ means
        centre = (kappa * prior + count * own.mean(0)) / (kappa + count)
        np.testing.assert_allclose(found[number, :-1], 2 * sharpness * centre, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[number, -1], -sharpness * centre @ centre, rtol=1e-4)


def test_logits_are_distances():
    anchor, support, query = make_anchor("centroid"), make_batch(0, COUNTS), make_batch(1, COUNTS)
    weights = np.asarray(anchor.centroids(support))
    sharpness = numbers(anchor)[4]
    centres, inputs = weights[:, :-1] / (2 * sharpness), np.asarray(query.inputs)
    distances = -sharpness * ((inputs[:, None] - centres[None]) ** 2).sum(2)
    ours = inputs @ weights[:, :-1].T + weights[:, -1]
    np.testing.assert_allclose(log_softmax(ours, 1), log_softmax(distances, 1), atol=1e-4)


def test_fit_reaches_the_minimum_that_scipy_finds():
    anchor, support = make_anchor(steps=500), make_batch(0, COUNTS)
    prior = np.random.default_rng(1).normal(size=(3, DIM + 1)).astype(np.float32)
    inputs = with_ones(support)
    targets, regulariser = np.asarray(support.targets, np.float64), numbers(anchor)[5]

    def objective(flat):
        theta = flat.reshape(prior.shape)
        return -(targets * log_softmax(inputs @ theta.T, 1)).sum() + regulariser / 2 * ((theta - prior) ** 2).sum()

    best = scipy.optimize.minimize(objective, prior.ravel().astype(np.float64)).x.reshape(prior.shape)
    np.testing.assert_allclose(anchor.fit(jnp.asarray(prior), support), best, atol=1e-3)


def test_first_step_of_fit_is_a_ridge_regression_on_what_is_left_over():
    anchor, support = make_anchor("ridge"), make_batch(0, COUNTS)
    prior = np.random.default_rng(1).normal(size=(3, DIM + 1)).astype(np.float32)
    inputs = with_ones(support)
    left_over = np.asarray(support.targets) - softmax(inputs @ prior.T, 1)
    regulariser = numbers(anchor)[5]
    system = inputs.T @ inputs / 2 + regulariser * np.eye(DIM + 1)
    expected = prior + np.linalg.solve(system, inputs.T @ left_over).T
    np.testing.assert_allclose(anchor.fit(jnp.asarray(prior), support), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ANCHORS)
def test_untrained_it_is_its_anchor(kind):
    """Latent steps and fine-tuning included: the decoder is zero, so that no step on a code changes the weights."""
    anchor = make_anchor(kind)
    leo = dataclasses.replace(make_learner("leo-anchored", anchor=kind, finetune_steps=0), anchor=anchor)
    support, query = make_batch(0, COUNTS), make_batch(1, (5, 5, 5))
    seen = anchor.embed(support)
    weights = anchor.fit(anchor.centroids(seen), seen)
    expected = anchor.embedding(query.inputs) @ weights[:, :-1].T + weights[None, :, -1]
    close(logits(adapt(leo, support).head, query.inputs), expected)


def test_classes_without_examples_get_no_probability():
    leo, full = make_learner("leo-anchored"), make_batch(0, COUNTS)
    wide = Batch(full.inputs, jnp.pad(full.targets, ((0, 0), (0, 2))), full.mask)
    query = make_batch(1, COUNTS).inputs
    narrow, wider = (jax.nn.softmax(logits(adapt(leo, one).head, query)) for one in (full, wide))
    assert (np.asarray(wider[:, 3:]) == 0).all()
    close(wider[:, :3], narrow)


def test_in_training_the_class_itself_is_no_prior():
    """With dropout and noise the nearest mean is left out; samples without hyper-parameters are for new classes."""
    leo, support = make_learner("leo-anchored"), make_batch(0, COUNTS)
    key = jax.random.key(0)
    assert draw_noise(leo, support, HYPER, key).training
    assert not draw_noise(leo, support, None, key).training


def test_padding_changes_no_anchor():
    anchor, support = make_anchor(), make_batch(0, COUNTS)
    results = []
    for one in (support, pad(support, 5)):
        seen = anchor.embed(one)
        results.append(anchor.fit(anchor.centroids(seen), seen))
    close(*results)


def test_only_leo_anchored_has_an_anchor():
    with pytest.raises(BadInput, match="meta-sgd has no anchor; leo-anchored has"):
        make_structure("meta-sgd", anchor="ridge").blank()


def test_means_and_preparation_are_measured_on_training_classes(tiny_config, tiny_data):
    anchor = choose_anchor(tiny_config, tiny_data)
    train = tiny_data.subset("train")
    assert anchor.means.shape == (len(train.counts), DIM)
    first = train.read(train.rows[: train.counts[0]])
    close(anchor.means[0], anchor.preparation(jnp.asarray(first)).mean(0))
    close(anchor.preparation.centre, Moments.of(train).centre)


@pytest.fixture
def tiny_data():
    from helpers.small import make_metaset

    return make_metaset()


@pytest.fixture
def tiny_config(tiny_data):
    from metaleo.config.presets import resolve_config

    return resolve_config(DIM, learner="leo-anchored", way=3, ways=(2, 4), shots=(1, 3), validation_tasks=5)


def test_shaken_it_is_more_than_its_anchor():
    leo, support = make_learner("leo-anchored"), make_batch(0, COUNTS)
    query = make_batch(1, COUNTS).inputs
    before, after = (logits(adapt(one, support).head, query) for one in (leo, shake(leo)))
    assert np.abs(before - after).max() > 0.1
