"""Small problems that every test can afford: eight numbers per example, made up but separable."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metaleo import data
from metaleo.checkpoints import Candidate, TrainedModel
from metaleo.config.schema import TrainConfig
from metaleo.data.metaset import MetaSet
from metaleo.errors import BadInput
from metaleo.evaluation.evaluate import TaskSuite
from metaleo.learners import HyperParams
from metaleo.learners.base import query_loss_and_metrics
from metaleo.learners.registry import LEARNERS as LEARNERS
from metaleo.learners.registry import Structure
from metaleo.tasks import Batch, Task
from metaleo.tasks.task import Tasks

DIM = 8
HYPER = HyperParams(learning_rate=1e-2, kl=0.1, encoder_penalty=0.1, l2=1e-3, orthogonality=0.1, keep_prob=0.8)


def make_learner(name="leo", way=3, seed=0, **changes):
    """A learner with weights of a size that matters, so that no term of a loss hides behind another."""
    return initialise(make_structure(name, way, **changes), jax.random.key(seed))


@functools.partial(jax.jit, static_argnames="structure")
def initialise(structure, key):
    return structure.init(key)


def make_structure(name="leo", way=3, **changes):
    sizes = {"latent": 4, "latent_steps": 2, "finetune_steps": 2}
    steps = {"latent_step_size": 0.5, "finetune_step_size": 0.3}
    return Structure(**{"learner": name, "dim": DIM, "way": way, **sizes, **steps, **changes})


def make_model(name="leo", way=3, header=None, **changes):
    """As from a model file, of a learner away from its symmetric start."""
    structure = make_structure(name, way, **changes)
    return TrainedModel(shake(initialise(structure, jax.random.key(0))), structure, {} if header is None else header)


def shake(learner, size=0.3, seed=0):
    """The same learner away from its symmetric start, as after some training."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf) + size * random.normal(size=leaf.shape), leaf.dtype), learner
    )  # added by NumPy, which compiles nothing


def make_batch(seed=0, counts=(2, 2, 2)):
    """Examples around one direction per class; `counts` of each."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    inputs = np.eye(DIM)[labels % DIM] + 0.5 * random.normal(size=(len(labels), DIM))
    inputs /= np.linalg.norm(inputs, axis=1, keepdims=True)
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    return Batch(
        jnp.asarray(inputs, dtype),
        jnp.asarray(np.eye(len(counts))[labels], dtype),
        jnp.asarray(np.ones(len(labels), bool)),
    )  # as `labelled` makes it, but compiling nothing


def make_task(seed=0, way=3, shot=2, query=4):
    return Task(make_batch(seed, (shot,) * way), make_batch(seed + 1000, (query,) * way))


def pad(batch: Batch, rows: int) -> Batch:
    """The same batch with rows of rubbish behind the mask."""
    rubbish = np.full((rows, batch.inputs.shape[1]), 7)
    first = np.tile(np.eye(batch.way)[0], (rows, 1))
    return Batch(
        jnp.asarray(np.concatenate([batch.inputs, rubbish]), batch.inputs.dtype),
        jnp.asarray(np.concatenate([batch.targets, first]), batch.targets.dtype),
        jnp.asarray(np.concatenate([batch.mask, np.zeros(rows, bool)])),
    )


def stack(trees):
    """Trees of arrays as one tree with a leading axis; by NumPy, which compiles nothing."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *trees)


def make_metaset(classes=(8, 5, 5), images=12, seed=0) -> MetaSet:
    """train, val and test classes that differ in one of the eight numbers or in a pair of them."""
    random = np.random.default_rng(seed)
    directions = random.normal(size=(sum(classes), 1, DIM))
    features = directions + 0.6 * random.normal(size=(sum(classes), images, DIM))
    splits = [split for split, count in zip(("train", "val", "test"), classes, strict=True) for _ in range(count)]
    names = tuple(f"class{i}" for i in range(sum(classes)))
    return MetaSet.from_classes(features.astype(np.float32), names, tuple(splits))


def make_candidate(folder, structure, metaset=None, shot=2):
    """A model of this structure, with weights that matter, and where to look at it."""
    config = TrainConfig(data=str(folder / "features.npz"), way=3, shot=shot, structure=structure)
    if structure.noise is not None:
        config = dataclasses.replace(config, data="sines-and-lines")
    else:
        data.save_data(make_metaset() if metaset is None else metaset, config.data)
    model = TrainedModel(shake(initialise(structure, jax.random.key(0))), structure, {"config": config.to_json()})
    candidate = Candidate(structure.learner, folder, Path("run/model.safetensors"), model)
    return candidate, TaskSuite([candidate])


class Given(Tasks):
    """Tasks that there are, by their numbers."""

    tasks: Task

    def sample(self, key):
        return self.gather(jax.random.randint(key, (), 0, len(self.tasks.support.mask)))

    def gather(self, indices):
        return jax.tree.map(lambda leaf: leaf[indices], self.tasks)


def meta_loss_with(leo, task, hyper, noise, key=None):
    """The loss of a LEO on one task (Eq. 6) with the noise of adaptation given; a key is for dropout of queries."""
    adaptation = leo.adapt_with(task.support, noise)
    loss, info = query_loss_and_metrics(adaptation.head, task.query, hyper, key, leo.network)
    penalty, more = leo.penalties(adaptation.trace, hyper, noise)
    return loss + penalty, info | more


def own_loss(network, theta, support):
    """Σ_i loss_i / (examples of a code), from nothing but what f_θ says of each example; up to a constant."""
    predictions = jax.vmap(lambda x: jax.vmap(network.apply, (0, None))(theta, x))(support.inputs)
    predictions = predictions if network.per_class else predictions[:, 0]
    if network.classifies:
        each = jnp.log(jnp.exp(predictions).sum(1)) - (predictions * support.targets).sum(1)
    else:
        each = ((predictions - support.targets) ** 2).sum(1) / (2 * 0.3**2)
    codes = support.targets.shape[1] if network.per_class else 1
    return codes * jnp.where(support.mask, each, 0.0).sum() / support.mask.sum().astype(each.dtype)


@jax.jit
def adapt(learner, support):
    return learner.adapt(support)


@jax.jit
def meta_loss(learner, task, hyper, key):
    return whole_loss(learner, task, hyper, key)


def whole_loss(learner, task, hyper, key):
    """Of a meta-step with this one task, and its diagnostics."""
    loss, info = learner.meta_loss(task, hyper, key)
    return loss + learner.regulariser(hyper), info


@jax.jit
def meta_gradient(learner, task, hyper, key):
    return jax.grad(lambda one: whole_loss(one, task, hyper, key)[0])(learner)


@jax.jit
def logits(head, inputs):
    return jax.vmap(head)(inputs)


def close(a, b, tolerance=1e-5):
    """Trees equal to within `tolerance` of their largest entry."""
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        assert np.abs(one - other).max(initial=0) <= tolerance * max(1e-30, np.abs(other).max(initial=0))
    return True


def check_meta_gradient(learner, task, hyper, key, rtol=1e-5, atol=1e-8):
    """Every leaf's gradient, along a random direction, against a finite difference; in double precision."""
    random = np.random.default_rng(1)
    leaves, structure = jax.tree.flatten(learner)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(learner)]

    @jax.jit
    def loss(leaves):
        return whole_loss(jax.tree.unflatten(structure, leaves), task, hyper, key)[0]

    gradients = jax.jit(jax.grad(loss))(leaves)
    for index, leaf in enumerate(leaves):
        direction = random.normal(size=leaf.shape)
        ahead, behind = (
            loss([*leaves[:index], leaf + shift * direction, *leaves[index + 1 :]]) for shift in (1e-6, -1e-6)
        )
        slope = float(jnp.sum(gradients[index] * direction))
        if paths[index] in (".anchor.mean", ".anchor.variances", ".anchor.prior_shots"):  # measured, not learned
            assert slope == 0
            continue
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=rtol, atol=atol)


def message(action) -> str:
    """What the user is told: one line."""
    try:
        action()
    except BadInput as error:
        text = str(error)
    else:
        pytest.fail("it was not refused")
    assert "\n" not in text
    return text
