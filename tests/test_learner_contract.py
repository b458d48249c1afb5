"""What every learner promises, whatever its algorithm: the product of learners and laws."""

import dataclasses

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
    adapt,
    check_meta_gradient,
    close,
    logits,
    make_batch,
    make_learner,
    make_task,
    meta_gradient,
    meta_loss,
    pad,
    shake,
    stack,
    whole_loss,
)  # fmt: skip
from metaleo.config import ABLATIONS, UNTRAINED
from metaleo.tasks import Batch, Task

SWITCHED = [name for name in ABLATIONS if name != "leo"]  # LEO with a part switched off: slow, so that LEO can be fast
every_learner = pytest.mark.parametrize("name", by_default([n for n in LEARNERS if n not in SWITCHED], LEARNERS))


@every_learner
@pytest.mark.parametrize("counts", by_default([(1, 4, 2, 1)], [(1, 1), (2, 2, 2), (1, 4, 2, 1), (3,) * 7]), ids=str)
def test_adapts_to_any_way_and_shot(name, counts):
    head = adapt(make_learner(name), make_batch(counts=counts)).head
    prediction = logits(head, make_batch(1, counts).inputs)
    assert prediction.shape == (sum(counts), len(counts))
    assert jnp.isfinite(prediction).all()


@every_learner
def test_gradient_steps_fit_the_support_set(name):
    """Meta-training a moment on one task makes its support set easy: the learner learns."""
    learner, task = make_learner(name), make_task(shot=4)
    fit = Task(task.support, task.support)

    for _ in range(100):
        gradient = meta_gradient(learner, fit, HYPER, None)
        learner = jax.tree.map(lambda weight, slope: weight - 0.3 * slope, learner, gradient)
    assert meta_loss(learner, fit, HYPER, None)[1]["query_accuracy"] == 1


@every_learner
def test_evaluation_is_deterministic_and_training_is_not(name):
    learner, task = make_learner(name), make_task()
    evaluated = [meta_loss(learner, task, HYPER, None)[0] for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    trained = [meta_loss(learner, task, HYPER, jax.random.key(seed))[0] for seed in (0, 0, 1)]
    assert trained[0] == trained[1]
    if name not in UNTRAINED:  # they learn nothing, so they are never perturbed
        assert trained[0] != trained[2]


@every_learner
@settings(deadline=None, max_examples=15)
@given(order=st.permutations(range(3)), seed=st.integers(0, 1000))
def test_relabelling_classes_permutes_predictions(name, order, seed):
    learner, support, query = make_learner(name), make_batch(seed, (2, 1, 3)), make_batch(seed + 1)
    renamed = Batch(support.inputs, support.targets[:, jnp.array(order)], support.mask)
    before = logits(adapt(learner, support).head, query.inputs)
    after = logits(adapt(learner, renamed).head, query.inputs)
    close(after, before[:, jnp.array(order)])


@every_learner
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000))
def test_order_of_examples_does_not_matter(name, seed):
    learner, support, query = make_learner(name), make_batch(seed, (2, 1, 3)), make_batch(seed + 1)
    order = np.random.default_rng(seed).permutation(6)
    shuffled = jax.tree.map(lambda leaf: leaf[order], support)
    close(*(logits(adapt(learner, one).head, query.inputs) for one in (shuffled, support)))


@every_learner
@pytest.mark.parametrize("rows", by_default([5], [1, 5]))
def test_padding_changes_nothing(name, rows):
    learner, task = make_learner(name), make_task()
    padded = Task(pad(task.support, rows), pad(task.query, rows))
    close(*(logits(adapt(learner, one.support).head, task.query.inputs) for one in (padded, task)))
    close(*(meta_gradient(learner, one, HYPER, None) for one in (padded, task)))


@every_learner
def test_result_does_not_depend_on_the_meta_batch(name):
    learner = make_learner(name)
    tasks = stack([make_task(seed) for seed in range(4)])
    keys = jax.random.split(jax.random.key(0), 4)
    batched, _ = jax.jit(jax.vmap(whole_loss, (None, 0, None, 0)))(learner, tasks, HYPER, keys)
    for index in range(4):
        alone, _ = meta_loss(learner, jax.tree.map(lambda leaf, i=index: leaf[i], tasks), HYPER, keys[index])
        close(batched[index], alone)


@every_learner
@pytest.mark.parametrize("training", by_default([True], [False, True]))
def test_meta_gradient_against_finite_differences(name, training, float64):
    """Through encoder, relation net, all latent steps, decoder and all fine-tuning steps."""
    if name in ("fomaml", "reptile"):
        pytest.skip("not the gradient of its loss, on purpose; see tests/learners/test_maml.py")
    task, key = make_task(), jax.random.key(3) if training else None
    hyper = dataclasses.replace(HYPER, encoder_penalty=0.0)  # no finite difference can see its stop-gradient
    check_meta_gradient(shake(make_learner(name), 0.1), task, hyper, key)


@every_learner
def test_second_call_compiles_nothing(name, count_compilations):
    learner, tasks, keys = (
        make_learner(name),
        [make_task(seed) for seed in (0, 1)],
        jax.random.split(jax.random.key(0)),
    )
    meta_gradient(learner, tasks[0], HYPER, keys[0])
    with count_compilations() as compilations:
        meta_gradient(learner, tasks[1], HYPER, keys[1])
    assert not compilations


@every_learner
def test_works_in_float64(name, float64):
    prediction = logits(adapt(make_learner(name), make_batch()).head, make_batch(1).inputs)
    assert prediction.dtype == jnp.float64
