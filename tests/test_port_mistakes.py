"""Mistakes that other ports of LEO made; each would turn one of these tests red."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from helpers.small import (
    DIM,
    HYPER,
    adapt,
    close,
    make_batch,
    make_learner,
    make_metaset,
    make_task,
    meta_gradient,
    stack,
)
from metaleo.inner_loop import descend
from metaleo.learners import LEO
from metaleo.learners.base import query_loss_and_metrics
from metaleo.learners.leo_noise import Noise, draw_noise
from metaleo.losses import encoder_penalty, orthogonality, query_loss, support_loss
from metaleo.nn.encoder_decoder import Gaussian, RelationNet
from metaleo.tasks import Batch, Episodes


def test_no_relu_after_the_relation_net():
    """It would clip codes at zero."""
    statistics = RelationNet.init(jax.random.key(0), 4)(jax.random.normal(jax.random.key(1), (6, 4)), make_batch())
    assert (statistics < 0).any()
    assert (statistics > 0).any()


def test_all_pairs_are_related():
    """625 of them in 5-way 5-shot, not the 125 within or between matching positions."""
    support = make_batch(counts=(5,) * 5)
    net = RelationNet.init(jax.random.key(0), 4)
    codes = jax.random.normal(jax.random.key(1), (25, 4))
    outputs = np.zeros((5, 8))
    for a in range(25):
        for b in range(25):
            pair = jnp.concatenate([codes[a], codes[b]])
            hidden = jax.nn.relu(jax.nn.relu(pair @ net.first) @ net.middle)
            outputs[a // 5] += np.asarray(hidden @ net.last) / (5 * 5 * 5)
    close(net(codes, support), outputs)


def test_inner_gradients_are_differentiated():
    """First-order gradients would miss the curvature: for loss c·x²/2, one step gives x′ = (1 - αc)x."""

    def after_a_step(x, first_order):
        return descend(lambda x, _: 3 * x**2 / 2, x, 0.1, 1, first_order=first_order)[0]

    assert np.isclose(jax.grad(after_a_step)(2.0, False), 1 - 0.1 * 3)
    assert np.isclose(jax.grad(after_a_step)(2.0, True), 1)
    leo, task = make_learner(), make_task()
    whole = meta_gradient(leo, task, HYPER, None)
    blind = jax.jit(jax.grad(first_order_loss))(leo, task)
    assert np.abs(whole.decoder.to_mean - blind.decoder.to_mean).max() > 1e-4


def first_order_loss(leo, task):
    """LEO written with inner gradients as constants."""
    support = task.support

    def loss(code):
        return support_loss(support.inputs @ (code @ leo.decoder.to_mean).T, support)

    code = leo.encode(support, Noise()).mean
    for _ in range(leo.latent_steps):
        code = code - leo.latent_step_size[None] * jax.lax.stop_gradient(jax.grad(loss)(code))
    return query_loss(task.query.inputs @ (code @ leo.decoder.to_mean).T, task.query)


def test_support_gradients_do_not_leak_into_the_meta_gradient():
    """Where nothing is adapted, the meta-gradient is that of the query loss alone."""
    task, hyper = make_task(), dataclasses.replace(HYPER, l2=0.0, orthogonality=0.0)
    maml = eqx.tree_at(lambda m: m.start, make_learner("meta-sgd"), 0.1 * jnp.ones((3, DIM)))
    maml = eqx.tree_at(lambda m: m.step_size, maml, jnp.zeros((3, DIM)))
    leaked = meta_gradient(maml, task, hyper, None)
    clean = jax.jit(jax.grad(lambda start: query_loss(task.query.inputs @ start.T, task.query)))(maml.start)
    close(leaked.start, clean)

    leo = make_learner()
    still = lambda leo: (leo.latent_step_size, leo.finetune_step_size)  # noqa: E731
    leo = eqx.tree_at(still, leo, jax.tree.map(jnp.zeros_like, still(leo)))
    leaked = meta_gradient(leo, task, hyper, None)

    @jax.jit
    @jax.grad
    def clean_gradient(leo):
        weights = leo.decode(leo.encode(task.support, Noise()).mean, None)
        return query_loss(task.query.inputs @ weights.T, task.query)

    clean = clean_gradient(leo)
    close((leaked.encoder, leaked.relation, leaked.decoder), (clean.encoder, clean.relation, clean.decoder))


def test_inner_steps_ignore_the_size_of_the_meta_batch():
    """An inner loss averaged over the tasks of a batch would shrink every step."""
    leo = make_learner()
    one, many = (
        jax.jit(jax.vmap(lambda support: leo.adapt(support).head.weights))(
            stack([make_task(seed).support for seed in range(size)])
        )
        for size in (1, 12)
    )
    close(one[0], many[0])


def test_support_and_query_are_disjoint():
    """Sampling with replacement would let a task be solved by memory."""
    episodes = Episodes.over(make_metaset(images=6), way=3, shot=2, query=4)
    indices = jax.jit(jax.vmap(episodes.sample_indices))(jax.random.split(jax.random.key(0), 50))
    rows = np.concatenate([indices.support, indices.query], axis=2)  # (task, way, image)
    assert all(len(set(row)) == 6 for task in rows for row in task)


def test_evaluation_uses_means():
    """Sampling at test time would add noise to every result."""
    leo, support = make_learner(), make_batch()
    trace = adapt(leo, support).trace
    close(trace.code, trace.code_distribution.mean)
    close(trace.decoded_weights, trace.adapted_code @ leo.decoder.to_mean)


def test_orthogonality_is_between_rows_of_the_decoder():
    """One row per latent dimension; its columns can never all be orthogonal."""
    rows, penalty = jnp.eye(3, 7), jax.jit(orthogonality)
    assert np.isclose(penalty(rows), 0)
    assert penalty(rows.T) > 0.05
    assert np.isclose(penalty(jnp.ones((2, 4))), 0.5)  # two of four cosines are 1 and should be 0


def test_scale_is_a_standard_deviation():
    """Not a variance: neither in sampling nor in the KL."""
    wide = Gaussian(jnp.zeros(3), jnp.full(3, 2.0))
    close(wide.sample(jnp.ones(3)), 2 * np.ones(3))
    assert np.isclose(wide.kl_to_standard(), (2**2 - 1) / 2 - np.log(2))


def test_step_sizes_are_per_dimension():
    """A larger step in one latent dimension moves the code further in that dimension alone."""
    leo, support = make_learner(), make_batch()
    leo = dataclasses.replace(leo, latent_steps=1)
    assert leo.latent_step_size.shape == (4,)
    assert leo.finetune_step_size.shape == (DIM,)
    faster = eqx.tree_at(lambda leo: leo.latent_step_size, leo, leo.latent_step_size.at[2].mul(2))
    one, two = (adapt(which, support).trace for which in (leo, faster))
    moved, further = (np.asarray(trace.adapted_code - trace.code) for trace in (one, two))
    close(further[:, 2], 2 * moved[:, 2])
    close(np.delete(further, 2, 1), np.delete(moved, 2, 1))


def test_rows_of_the_classifier_go_with_their_labels():
    """Class positions permuted while labels stay would give chance accuracy."""
    leo, support = make_learner(), make_batch(counts=(3, 3, 3))
    shuffle = np.random.default_rng(0).permutation(9)
    order = jnp.array([2, 0, 1])
    mixed = Batch(support.inputs[shuffle], support.targets[shuffle][:, order], support.mask)
    close(adapt(leo, mixed).head.weights, adapt(leo, support).head.weights[order])


def test_encoder_penalty_moves_the_encoder_only():
    codes, adapted = jnp.ones((3, 4)), jnp.zeros((3, 4))
    assert (jax.grad(encoder_penalty, 0)(codes, adapted) != 0).all()
    assert (jax.grad(encoder_penalty, 1)(codes, adapted) == 0).all()


def test_dropout_touches_every_prediction():
    """The encoder's input, each latent step, each fine-tuning step, and the query set."""
    leo, task = make_learner(), make_task()
    noise = jax.jit(draw_noise)(leo, task.support, HYPER, jax.random.key(0))
    adapt_with = jax.jit(LEO.adapt_with)

    def weights(noise):
        return np.asarray(adapt_with(leo, task.support, noise).head.weights)

    masks = ("encoder_mask", "latent_masks", "finetune_masks")
    for name in masks:
        mask = getattr(noise, name)
        for step in range(1 if mask.ndim == 2 else len(mask)):
            flipped = np.array(mask)
            flipped[... if mask.ndim == 2 else step] ^= True
            assert (
                np.abs(weights(dataclasses.replace(noise, **{name: jnp.asarray(flipped)})) - weights(noise)).max()
                > 1e-6
            )
    head = adapt_with(leo, task.support, noise).head
    losses = [jax.jit(query_loss_and_metrics)(head, task.query, HYPER, key)[0] for key in (jax.random.key(1), None)]
    assert losses[0] != losses[1]
