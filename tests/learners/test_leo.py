"""The paper's ablations are switches: what is switched off is gone, and nothing else is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import HYPER, adapt, close, make_batch, make_learner, make_task, meta_gradient, meta_loss
from metaleo.learners.leo_noise import draw_noise
from metaleo.learners.registry import ABLATIONS

SUPPORT = make_batch()


def adapted(name):
    learner = make_learner(name)
    return learner, adapt(learner, SUPPORT)


def test_generator_only_decodes_the_mean_code():
    learner, adaptation = adapted("leo-generator")
    statistics = learner.relation(learner.encoder(SUPPORT.inputs), SUPPORT)
    close(adaptation.head.weights, statistics[:, :4] @ learner.decoder.to_mean)


def test_generator_with_finetuning_moves_the_weights_only():
    learner, adaptation = adapted("leo-generator-finetuned")
    trace = adaptation.trace
    close(trace.adapted_code, trace.code)
    weights = np.asarray(trace.decoded_weights, np.float64)
    inputs, targets = (np.asarray(part, np.float64) for part in (SUPPORT.inputs, SUPPORT.targets))
    for _ in range(2):
        logits = inputs @ weights.T
        odds = np.exp(logits - logits.max(1, keepdims=True))
        residual = odds / odds.sum(1, keepdims=True) - targets
        weights -= np.asarray(learner.finetune_step_size) * (residual.T @ inputs) / 2  # two shots
    close(adaptation.head.weights, weights, 1e-4)


def test_without_finetuning_the_weights_are_those_decoded():
    learner, adaptation = adapted("leo-no-finetuning")
    _, whole = adapted("leo")
    close(adaptation.head.weights, adaptation.trace.adapted_code @ learner.decoder.to_mean)
    close(adaptation.trace.adapted_code, whole.trace.adapted_code)


def test_random_prior_has_no_encoder_and_starts_from_nothing():
    learner, adaptation = adapted("leo-random-prior")
    assert learner.encoder is None
    assert learner.relation is None
    assert not adaptation.trace.code.any()
    assert adaptation.trace.adapted_code.any()
    keys = jax.random.split(jax.random.key(0), 2000)
    codes = jax.jit(jax.vmap(lambda key: draw_noise(learner, SUPPORT, HYPER, key).code))(keys)
    np.testing.assert_allclose([codes.mean(), codes.std()], [0, 1], atol=0.02)
    sampled = jax.jit(lambda key: learner.adapt(SUPPORT, HYPER, key).trace)(keys[0])
    close(sampled.code, codes[0])  # the prior itself: mean 0, scale 1


def test_deterministic_has_dropout_but_no_sampling():
    learner, task = make_learner("leo-deterministic"), make_task()
    keep_all = dataclasses.replace(HYPER, keep_prob=1.0, encoder_penalty=0.0)
    losses = [meta_loss(learner, task, keep_all, key)[0] for key in (None, jax.random.key(0))]
    close(*losses)
    dropped = [meta_loss(learner, task, HYPER, jax.random.key(seed))[0] for seed in (0, 1)]
    assert dropped[0] != dropped[1]
    assert "kl" not in meta_loss(learner, task, HYPER, jax.random.key(0))[1]


@pytest.mark.parametrize("name", ["leo-no-finetuning", "leo-deterministic"])
def test_the_rest_is_leo(name):
    """The same key gives the same weights to start from."""
    close(make_learner(name), make_learner("leo"))
    assert name in ABLATIONS


def test_meta_gradient_leaves_nothing_out():
    """Every leaf of every ablation is learned, except step sizes and scales that it does not use."""
    unused = {
        "leo": set(),
        "leo-generator": {"latent_step_size", "finetune_step_size"},
        "leo-random-prior": set(),
    }
    for name, idle in unused.items():
        gradient = meta_gradient(make_learner(name), make_task(), HYPER, jax.random.key(0))
        still = {field for field in ("latent_step_size", "finetune_step_size") if not jnp.any(getattr(gradient, field))}
        assert still == idle
        assert all(jnp.any(leaf) for leaf in jax.tree.leaves((gradient.encoder, gradient.relation, gradient.decoder)))
