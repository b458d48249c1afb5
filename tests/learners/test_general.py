"""LEO beyond linear classifiers: any network, one code or one per class, several samples."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.marks import by_default
from helpers.small import (
    DIM,
    HYPER,
    adapt,
    check_meta_gradient,
    close,
    logits,
    make_batch,
    make_learner,
    make_task,
    message,
    meta_gradient,
    meta_loss,
    meta_loss_with,
    shake,
    stack,
    whole_loss,
)
from metaleo.learners import LEO, HyperParams, MetaSGD
from metaleo.learners.leo_noise import Noise, draw_noise
from metaleo.losses import cross_entropy, mixture_loss
from metaleo.nn.encoder_decoder import Encoder
from metaleo.nn.heads import Network, dot, linear_network, named_network
from metaleo.tasks import Batch, Task
from metaleo.tasks.sines_and_lines import SinesAndLines

WAY = 3
KEY = jax.random.key(7)
REGRESSION = {"network": "mlp", "dim": 1, "hidden": 5, "codes": "task", "noise": 0.3, "width": 6, "max_grad_norm": 5.0}
KINDS = {
    "regression": REGRESSION,
    "regression-from-start": {**REGRESSION, "from_start": True, "samples": 3},
    "mlp-per-class": {"network": "mlp", "hidden": 4, "layers": 2, "from_start": True},
    "mlp-one-code": {"network": "mlp", "hidden": 4, "layers": 2, "codes": "task", "width": 6},
    "gru-per-class": {"network": "gru", "hidden": 3, "channels": 2, "from_start": True},
}
SLOW = [pytest.mark.slow]


def make(kind, name="leo"):
    return make_learner(name, WAY, **KINDS[kind])


def task_of(kind, seed=0):
    regression = kind.startswith("regression")
    return SinesAndLines(5, 6).sample(jax.random.key(seed)) if regression else make_task(seed, WAY)


def as_doubles(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.zeros(()).dtype) if leaf.dtype == jnp.float32 else leaf, tree)


def disguised(dim):
    """The linear classifier, but not recognised as such: it takes the general way."""
    return Network(lambda weights, x: dot(weights, x), linear_network(dim).start, (dim,), None, cross_entropy, True)


# The classification learner is the general one


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_shorter_ways_for_the_linear_classifier_change_no_number(training):
    """Latent steps through Dᵀ and fine-tuning through inner products, against Algorithm 1 as it is written."""
    short = shake(make_learner(way=WAY), 0.1)
    plain = dataclasses.replace(short, network=disguised(DIM))
    task, key = make_task(), KEY if training else None
    close(*(meta_loss(leo, task, HYPER, key)[0] for leo in (short, plain)))
    close(*(jax.tree.leaves(meta_gradient(leo, task, HYPER, key)) for leo in (short, plain)), 2e-4)


def generated_linear(way):
    """All rows of a linear classifier as one network, generated from one code."""
    model = eqx.nn.Linear(DIM, way, use_bias=False, key=KEY)
    return Network.of(model, cross_entropy, (DIM,), (way,), dropout=True)


def side_by_side(matrix, way):
    """A block-diagonal matrix: what a decoder does to each of several codes, done to all of them in one row."""
    return jnp.kron(jnp.eye(way), matrix)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_one_code_with_a_linear_head_is_the_classification_learner(training):
    """One code of all classes' codes side by side, from the prior: the same heads, losses and meta-gradients.

    The classification loss is a sum over classes, that of one code a mean over examples: step sizes make up for it.
    """
    classes = make_learner("leo-random-prior", WAY)
    one = LEO(
        None,
        None,
        eqx.tree_at(
            lambda d: (d.to_mean, d.to_raw_scale),
            classes.decoder,
            tuple(side_by_side(m, WAY) for m in (classes.decoder.to_mean, classes.decoder.to_raw_scale)),
        ),
        WAY * jnp.tile(classes.latent_step_size, WAY),
        WAY * jnp.tile(classes.finetune_step_size, WAY),
        generated_linear(WAY),
        classes.latent_steps,
        classes.finetune_steps,
    )
    task = make_task()
    noise = draw_noise(classes, task.support, HYPER, KEY) if training else None
    flat = noise
    if noise is not None:
        # the same standard normals; σ of weights has a factor sqrt(2 / (codes + size)) that differs
        factor = np.sqrt(2 / (WAY + DIM)) / np.sqrt(2 / (1 + WAY * DIM))
        weights = factor * noise.weights.reshape(len(noise.weights), 1, -1)
        flat = Noise(noise.code.reshape(1, -1), weights, *jax.tree.leaves((noise.encoder_mask, noise.latent_masks,
                     noise.finetune_masks)), noise.keep_prob)  # fmt: skip
    adapt_with = jax.jit(lambda leo, noise: leo.adapt_with(task.support, noise))
    theirs, ours = adapt_with(classes, noise), adapt_with(one, flat)
    close(ours.trace.adapted_code.reshape(WAY, -1), theirs.trace.adapted_code, 1e-4)
    close(ours.head.parameters.reshape(WAY, DIM), theirs.head.weights, 1e-4)
    close(logits(ours.head, task.query.inputs), logits(theirs.head, task.query.inputs), 1e-4)

    plain = dataclasses.replace(HYPER, l2=0.0, orthogonality=0.0)
    slopes = [
        jax.jit(jax.grad(lambda leo, noise=noise: meta_loss_with(leo, task, plain, noise)[0]))(leo)
        for leo, noise in ((classes, noise), (one, flat))
    ]
    blocks = slopes[1].decoder.to_mean.reshape(WAY, 4, WAY, DIM)
    close(sum(blocks[n, :, n] for n in range(WAY)), slopes[0].decoder.to_mean, 1e-3)
    close(WAY * slopes[1].latent_step_size.reshape(WAY, -1).sum(0), slopes[0].latent_step_size, 1e-3)


def test_the_encoder_of_one_code_is_that_of_a_task_with_one_class():
    """With one class there is one code; an encoder that ignores targets then makes the same of the examples."""
    support = make_batch(counts=(4,))
    classes = make_learner(way=1)
    ignoring = Encoder(jnp.concatenate([classes.encoder.weight, jnp.zeros((1, 4))]))
    one = dataclasses.replace(classes, encoder=ignoring, network=generated_linear(1))
    codes = [jax.jit(lambda leo: leo.encode(support, Noise()))(leo) for leo in (one, classes)]
    close(*codes)
    assert jnp.any(codes[0].mean)


def test_the_encoder_of_one_code_sees_targets():
    leo, support = make("regression"), task_of("regression").support
    other = Batch(support.inputs, support.targets + 1, support.mask)
    codes = [jax.jit(lambda support: leo.encode(support, Noise()).mean)(one) for one in (support, other)]
    assert np.abs(codes[0] - codes[1]).max() > 1e-4


# Laws that hold for every network


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        pytest.param(kind, training, marks=[] if training and kind == "gru-per-class" else SLOW)
        for kind in KINDS
        for training in (False, True)
    ],
)
def test_meta_gradient_against_finite_differences(kind, training, float64):
    """Through encoder, relation net, latent steps, deep decoder, any network, fine-tuning and the mixture."""
    task, key = as_doubles(task_of(kind)), KEY if training else None
    hyper = dataclasses.replace(HYPER, encoder_penalty=0.0)  # no finite difference can see its stop-gradient
    check_meta_gradient(shake(make(kind), 0.05), task, hyper, key, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("kind", by_default(["mlp-per-class"], KINDS))
def test_padding_and_order_change_nothing(kind):
    leo, task = make(kind), task_of(kind)
    support = task.support
    order = np.random.default_rng(0).permutation(len(support.mask))
    inputs, targets = (jnp.concatenate([leaf[order], 7 * leaf[:2]]) for leaf in (support.inputs, support.targets))
    padded = Batch(inputs, targets, jnp.arange(len(inputs)) < len(order))
    heads = [jax.jit(lambda leo, support: leo.adapt(support))(leo, one).head for one in (support, padded)]
    close(*(logits(head, task.query.inputs) for head in heads), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_meta_batch_is_its_tasks(kind):
    leo, keys = make(kind), jax.random.split(KEY, 3)
    tasks = [task_of(kind, seed) for seed in range(3)]
    stacked = stack(tasks)
    batched, _ = jax.jit(jax.vmap(whole_loss, (None, 0, None, 0)))(leo, stacked, HYPER, keys)
    close(
        batched, jnp.stack([meta_loss(leo, task, HYPER, key)[0] for task, key in zip(tasks, keys, strict=True)]), 1e-4
    )


@pytest.mark.parametrize("kind", by_default(["regression"], KINDS))
def test_inner_steps_fit_the_support_set(kind):
    leo = dataclasses.replace(make(kind), latent_steps=5)
    leo = eqx.tree_at(lambda leo: leo.latent_step_size, leo, jnp.full(4, 0.02))
    leo = eqx.tree_at(lambda leo: leo.finetune_step_size, leo, 0.001 + 0 * leo.finetune_step_size)
    losses = adapt(leo, task_of(kind).support).trace.support_losses
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["maml", "meta-sgd", "reptile"])
@pytest.mark.parametrize("kind", by_default(["regression"], ["regression", "mlp-per-class"]))
def test_the_others_descend_on_any_network(name, kind):
    """From the network's own parameters, against plain gradient steps."""
    learner, task = make(kind, name), task_of(kind)
    network, support = learner.network, task.support
    theta = jnp.tile(jnp.asarray(network.start), (network.codes(support), 1))

    def loss(theta):
        return network.support_loss(jax.vmap(network.head(theta))(support.inputs), support)

    for _ in range(2):
        slope = jax.jit(jax.grad(loss))(theta)
        length = jnp.sqrt(jnp.sum(slope**2))
        theta -= 0.3 * slope * (min(1.0, float(5.0 / length)) if kind == "regression" else 1.0)
    head = adapt(learner, support).head
    close(head.parameters, theta, 1e-4)


# Samples


def test_mixture_loss_is_the_likelihood_of_the_mixture():
    query = Batch(jnp.zeros((4, 1)), jnp.zeros((4, 1)), jnp.array([True, True, True, False]))
    losses = np.array([0.5, 1.5, 3.0])
    expected = -np.log(np.mean(np.exp(-3 * losses))) / 3
    np.testing.assert_allclose(mixture_loss(jnp.asarray(losses, jnp.float32), query), expected, rtol=1e-5)
    close(mixture_loss(jnp.array([0.7]), query), jnp.array(0.7))


def test_several_samples_are_judged_together():
    leo, task = make("regression"), task_of("regression")
    several = dataclasses.replace(leo, samples=4)
    keys = jax.random.split(KEY, 4)
    each = [meta_loss(leo, task, HYPER, key) for key in keys]
    loss, info = meta_loss(several, task, HYPER, KEY)
    apart = jnp.stack([own["query_loss"] for _, own in each])
    close(info["query_loss"], mixture_loss(apart, task.query), 1e-4)
    rest = jnp.stack([total - own["query_loss"] for total, own in each]).mean()
    close(loss, mixture_loss(apart, task.query) + rest, 1e-4)
    assert float(info["query_loss"]) <= float(apart.mean()) + 1e-5  # Jensen


def test_a_key_alone_samples_but_drops_nothing():
    leo, support = make_learner(way=WAY), make_batch()
    noise = jax.eval_shape(functools.partial(draw_noise, leo), support, None, KEY)
    assert noise.encoder_mask is None
    assert noise.code is not None
    sample = jax.jit(lambda learner, key: learner.adapt(support, None, key).head.weights)
    heads = [sample(leo, key) for key in (KEY, KEY, jax.random.key(1))]
    close(heads[0], heads[1])
    assert np.abs(heads[0] - heads[2]).max() > 1e-3
    deterministic = make_learner("leo-deterministic", WAY)
    for learner in (deterministic, make_learner("maml", WAY)):
        close(sample(learner, KEY), adapt(learner, support).head.weights)


def test_real_inputs_are_never_dropped():
    leo, support = make("regression"), task_of("regression").support
    assert jax.eval_shape(functools.partial(draw_noise, leo), support, HYPER, KEY).encoder_mask is None


# Bad input


def test_targets_of_the_wrong_shape():
    leo, task = make("regression"), task_of("regression")
    wide = Batch(task.support.inputs, jnp.tile(task.support.targets, (1, 2)), task.support.mask)
    assert "targets of shape (2)" in message(lambda: jax.eval_shape(lambda: leo.adapt(wide).head))
    assert "targets of shape (2)" in message(
        lambda: jax.eval_shape(lambda: leo.meta_loss(Task(task.support, wide), HyperParams(), None))
    )
    sgd = MetaSGD.init(named_network("mlp", 1, hidden=5, layers=3, channels=1, targets=1, noise=0.3))
    assert "targets of shape (2)" in message(lambda: jax.eval_shape(lambda: sgd.adapt(wide).head))


def test_learners_without_a_network_to_choose():
    assert "prototypical has no network" in message(lambda: make_learner("prototypical", WAY, network="mlp"))
