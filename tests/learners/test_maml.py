"""MAML, Meta-SGD and Reptile against steps worked out by hand."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from helpers.small import (
    DIM,
    HYPER,
    adapt,
    close,
    logits,
    make_batch,
    make_learner,
    make_task,
    meta_gradient,
    meta_loss,
    pad,
    shake,
)  # fmt: skip


def residuals(weights, batch):
    """(softmax - target)/K of each example: the gradient of the inner loss with respect to its logits."""
    exponentials = np.exp(np.asarray(batch.inputs @ weights.T))
    shots = len(batch.inputs) / batch.way
    return (exponentials / exponentials.sum(1, keepdims=True) - np.asarray(batch.targets)) / shots


def test_one_step_by_hand():
    support = make_batch()
    maml = make_learner("maml", finetune_steps=1)
    expected = -0.3 * residuals(np.zeros((3, DIM)), support).T @ np.asarray(support.inputs)
    close(adapt(maml, support).head.weights, expected)
    sgd = make_learner("meta-sgd", finetune_steps=1)
    step_size = np.random.default_rng(0).uniform(0.1, 2, (3, DIM))
    sgd = eqx.tree_at(lambda sgd: sgd.step_size, sgd, jnp.asarray(step_size, jnp.float32))
    close(adapt(sgd, support).head.weights, expected / 0.3 * step_size)


def test_first_order_gradient_is_that_of_the_query_loss_at_the_end():
    task, hyper = make_task(), dataclasses.replace(HYPER, l2=0.0)
    fomaml, maml = make_learner("fomaml"), make_learner("maml")
    end = adapt(fomaml, task.support).head.weights
    close(end, adapt(maml, task.support).head.weights)
    at_the_end = residuals(end, task.query).T @ np.asarray(task.query.inputs) / 3  # a mean, not a sum per shot
    close(meta_gradient(fomaml, task, hyper, None).start, at_the_end)
    assert np.abs(meta_gradient(maml, task, hyper, None).start - at_the_end).max() > 1e-3


def test_another_way_starts_from_the_mean_row():
    sgd = make_learner("meta-sgd", finetune_steps=0)
    start = jnp.asarray(np.random.default_rng(0).normal(size=(3, DIM)), jnp.float32)
    sgd = eqx.tree_at(lambda sgd: sgd.start, sgd, start)
    close(adapt(sgd, make_batch(counts=(2,) * 5)).head.weights, np.tile(start.mean(0), (5, 1)))
    close(adapt(sgd, make_batch()).head.weights, start)


def test_reptile_goes_where_descent_on_all_examples_leads():
    task, reptile = make_task(), shake(make_learner("reptile", finetune_steps=3))
    start = np.asarray(reptile.start)

    def descend(*batches):
        weights, inputs = start, np.concatenate([np.asarray(batch.inputs) for batch in batches])
        shots = len(inputs) / 3
        for _ in range(3):
            gradients = [residuals(weights, b).T @ np.asarray(b.inputs) * len(b.inputs) / 3 for b in batches]
            weights = weights - 0.3 * sum(gradients) / shots
        return weights

    direction = start - descend(task.support, task.query)
    close(meta_gradient(reptile, task, HYPER, None).start, direction + HYPER.l2 * start)
    loss, info = meta_loss(reptile, task, HYPER, None)
    np.testing.assert_allclose(loss, np.sum(direction**2) / 2 + HYPER.l2 * np.sum(start**2) / 2, rtol=1e-5)
    adapted = descend(task.support)  # it reports how it does with the support set alone
    close(adapt(reptile, task.support).head.weights, adapted)
    scores = np.exp(np.asarray(task.query.inputs) @ adapted.T)
    right = np.sum(scores * np.asarray(task.query.targets), 1) / scores.sum(1)
    np.testing.assert_allclose(info["query_loss"], -np.log(right).mean(), rtol=1e-5)


def test_protomaml_starts_as_a_prototypical_net():
    support, inputs = make_batch(0, (2, 5, 3)), make_batch(1).inputs
    proto = shake(make_learner("protomaml", finetune_steps=0))
    net = dataclasses.replace(
        make_learner("prototypical"), embedding=proto.embedding, log_sharpness=proto.log_sharpness
    )
    close(*(logits(adapt(learner, support).head, inputs) for learner in (proto, net)))


def test_one_step_of_protomaml_by_hand(float64):
    """Of weights and bias, on embedded examples, by the mean over examples times the classes."""
    support, inputs = make_batch(0, (2, 5, 3)), np.asarray(make_batch(1).inputs)
    proto = shake(make_learner("protomaml", finetune_steps=1))
    embed = np.eye(DIM) + np.asarray(proto.embedding.departure)
    rows, targets = np.asarray(support.inputs) @ embed, np.asarray(support.targets)
    sharpness = np.exp(proto.log_sharpness)
    prototypes = targets.T @ rows / targets.sum(0)[:, None]
    weights, bias = 2 * sharpness * prototypes, -sharpness * np.sum(prototypes**2, 1)
    powers = np.exp(rows @ weights.T + bias)
    wrong = (powers / powers.sum(1, keepdims=True) - targets) * 3 / len(rows)
    weights = weights - float(proto.step_size) * wrong.T @ rows
    bias = bias - float(proto.step_size) * wrong.sum(0)
    found = adapt(proto, pad(support, 2))
    np.testing.assert_allclose(logits(found.head, inputs), inputs @ embed @ weights.T + bias, rtol=1e-9)
    right = 1 - np.abs(wrong).sum(1) * len(rows) / 6
    np.testing.assert_allclose(found.trace.support_losses, -3 * np.log(right).mean())
