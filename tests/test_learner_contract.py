"""What every learner promises, whatever its algorithm and whichever engine computes it: learners × engines × laws.

The reference engine is the learner as written. What an engine does not support falls back: see test_engine_law.py.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.marks import by_default
from helpers.small import (
    HYPER,
    LEARNERS,
    Given,
    adapt,
    check_meta_gradient,
    close,
    logits,
    make_batch,
    make_learner,
    make_structure,
    make_task,
    meta_gradient,
    meta_loss,
    pad,
    shake,
    stack,
)  # fmt: skip
from metaleo.engines import Engine, all_engines
from metaleo.learners.base import Adaptation, Learner
from metaleo.learners.registry import ABLATIONS, ANCHORED, UNTRAINED
from metaleo.tasks import Batch, Task

SWITCHED = [name for name in ABLATIONS if name != "leo"]  # LEO with a part switched off: slow, so that LEO can be fast
PAIRS = [
    (name, engine.name)
    for engine in all_engines().values()
    for name in LEARNERS
    if engine.supports(make_structure(name).blank(), 1)
]
FAST = [*((name, "reference") for name in LEARNERS if name not in SWITCHED), ("leo", "closed-form")]
every_pair = pytest.mark.parametrize("pair", by_default(FAST, PAIRS), ids=" on ".join)


class ByEngine(Learner):
    """A learner whose numbers are an engine's, of a batch of one task."""

    learner: Learner
    engine: Engine = eqx.field(static=True)

    def adapt(self, support, hyper=None, key=None):
        assert key is None, "engines adapt as in evaluation"
        return Adaptation(first(self.engine.adapt(self.learner, batch_of_one(support))))

    def meta_loss(self, task, hyper, key):
        if key is None:  # as evaluation does it: the query loss after `adapt`
            return super().meta_loss(task, hyper, key)
        tasks = Given(batch_of_one(task))
        return first(self.engine.meta_losses(self.learner, tasks, jnp.arange(1), hyper, key[None]))

    def regulariser(self, hyper):
        return self.engine.regulariser(self.learner, hyper)


def batch_of_one(tree):
    return jax.tree.map(lambda leaf: leaf[None], tree)


def first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def make(pair):
    name, engine = pair
    learner = make_learner(name)
    return learner if engine == "reference" else ByEngine(learner, all_engines()[engine])


def without_dropout(pair):
    """Hyper-parameters and key of a meta-gradient. The learner as written needs no key; engines differentiate only
    what they compute with one."""
    if pair[1] == "reference":
        return HYPER, None
    return dataclasses.replace(HYPER, keep_prob=1.0), jax.random.key(3)


@every_pair
@pytest.mark.parametrize("counts", by_default([(1, 4, 2, 1)], [(1, 1), (2, 2, 2), (1, 4, 2, 1), (3,) * 7]), ids=str)
def test_adapts_to_any_way_and_shot(pair, counts):
    head = adapt(make(pair), make_batch(counts=counts)).head
    prediction = logits(head, make_batch(1, counts).inputs)
    assert prediction.shape == (sum(counts), len(counts))
    assert jnp.isfinite(prediction).all()


@every_pair
def test_gradient_steps_fit_the_support_set(pair):
    """Meta-training a moment on one task makes its support set easy: the learner learns."""
    learner, task = make(pair), make_task(shot=4)
    fit, (hyper, key) = Task(task.support, task.support), without_dropout(pair)

    rate = 0.0003 if pair[0] == ANCHORED else 0.3  # an anchor is sharp from the start
    for _ in range(100 if key is None else 200):  # under noise it takes longer, by the reference too
        gradient = meta_gradient(learner, fit, hyper, key)
        learner = jax.tree.map(lambda weight, slope: weight - rate * slope, learner, gradient)
    assert meta_loss(learner, fit, HYPER, None)[1]["query_accuracy"] == 1


@every_pair
def test_evaluation_is_deterministic_and_training_is_not(pair):
    learner, task = make(pair), make_task()
    evaluated = [meta_loss(learner, task, HYPER, None)[0] for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    trained = [meta_loss(learner, task, HYPER, jax.random.key(seed))[0] for seed in (0, 0, 1)]
    assert trained[0] == trained[1]
    if pair[0] not in UNTRAINED:  # they learn nothing, so they are never perturbed
        assert trained[0] != trained[2]


@every_pair
@settings(deadline=None, max_examples=15)
@given(order=st.permutations(range(3)), seed=st.integers(0, 1000))
def test_relabelling_classes_permutes_predictions(pair, order, seed):
    learner, support, query = make(pair), make_batch(seed, (2, 1, 3)), make_batch(seed + 1)
    renamed = Batch(support.inputs, support.targets[:, jnp.array(order)], support.mask)
    before = logits(adapt(learner, support).head, query.inputs)
    after = logits(adapt(learner, renamed).head, query.inputs)
    close(after, before[:, jnp.array(order)])


@every_pair
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000))
def test_order_of_examples_does_not_matter(pair, seed):
    learner, support, query = make(pair), make_batch(seed, (2, 1, 3)), make_batch(seed + 1)
    order = np.random.default_rng(seed).permutation(6)
    shuffled = jax.tree.map(lambda leaf: leaf[order], support)
    close(*(logits(adapt(learner, one).head, query.inputs) for one in (shuffled, support)))


@every_pair
@pytest.mark.parametrize("rows", by_default([5], [1, 5]))
def test_padding_changes_nothing(pair, rows):
    learner, task = make(pair), make_task()
    padded = Task(pad(task.support, rows), pad(task.query, rows))
    close(*(logits(adapt(learner, one.support).head, task.query.inputs) for one in (padded, task)))
    close(*(meta_gradient(learner, one, *without_dropout(pair)) for one in (padded, task)))


@every_pair
def test_result_does_not_depend_on_the_meta_batch(pair):
    learner, engine = make(pair), all_engines()[pair[1]]
    tasks = stack([make_task(seed) for seed in range(4)])
    keys = jax.random.split(jax.random.key(0), 4)

    @jax.jit
    def together(learner):
        losses, _ = engine.meta_losses(learner, Given(tasks), jnp.arange(4), HYPER, keys)
        return losses + engine.regulariser(learner, HYPER)

    batched = together(make_learner(pair[0]))
    for index in range(4):
        alone, _ = meta_loss(learner, jax.tree.map(lambda leaf, i=index: leaf[i], tasks), HYPER, keys[index])
        close(batched[index], alone)


@every_pair
@pytest.mark.parametrize("training", by_default([True], [False, True]))
def test_meta_gradient_against_finite_differences(pair, training, float64):
    """Through encoder, relation net, all latent steps, decoder and all fine-tuning steps."""
    if pair[0] in ("fomaml", "reptile"):
        pytest.skip("not the gradient of its loss, on purpose; see tests/learners/test_maml.py")
    hyper, key = (HYPER, jax.random.key(3)) if training else without_dropout(pair)
    hyper = dataclasses.replace(hyper, encoder_penalty=0.0)  # no finite difference can see its stop-gradient
    check_meta_gradient(shake(make(pair), 0.1), make_task(), hyper, key)


@every_pair
def test_second_call_compiles_nothing(pair, count_compilations):
    learner, tasks, keys = (
        make(pair),
        [make_task(seed) for seed in (0, 1)],
        jax.random.split(jax.random.key(0)),
    )
    meta_gradient(learner, tasks[0], HYPER, keys[0])
    with count_compilations() as compilations:
        meta_gradient(learner, tasks[1], HYPER, keys[1])
    assert not compilations


@every_pair
def test_works_in_float64(pair, float64):
    prediction = logits(adapt(make(pair), make_batch()).head, make_batch(1).inputs)
    assert prediction.dtype == jnp.float64
