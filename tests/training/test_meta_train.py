"""The outer loop: clipping, Adam, the guard against NaN, early stopping, and runs side by side."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers.small import HYPER, close, make_learner, make_metaset
from metaleo.engines import all_engines
from metaleo.learners.base import HyperParams
from metaleo.tasks import Episodes
from metaleo.training import meta_train as outer_loop
from metaleo.training.meta_train import (
    clip_each_norm,
    make_optimiser,
    meta_gradient,
    meta_train,
    start_run,
)

pytestmark = pytest.mark.usefixtures("loose_dtypes")
ARRAYS = jax.tree.map(jnp.float32, HYPER)


@pytest.fixture(scope="module")
def episodes():
    metaset = make_metaset()
    return {
        "training": Episodes.over(metaset.subset("train"), 3, 1, 4),
        "validation": Episodes.over(metaset.subset("val"), 3, 1, None),
    }


def test_clips_by_value_then_by_global_norm():
    optimiser = make_optimiser("global")
    gradient = {"a": jnp.array([3.0, -0.05]), "b": jnp.array([0.02])}
    by_value = np.array([0.1, -0.05, 0.02])
    expected = by_value * 0.1 / np.linalg.norm(by_value)
    state = optimiser.init(gradient)
    _, state = optimiser.update(gradient, state)
    first_moment = state.inner_state[-1].mu  # Adam's first moment is a tenth of what it was given
    np.testing.assert_allclose(np.concatenate([first_moment["a"], first_moment["b"]]), 0.1 * expected, rtol=1e-5)


def test_clips_each_tensor_by_itself_on_request():
    optimiser = make_optimiser("per-tensor")
    gradient = {"a": jnp.array([3.0, -4.0]), "b": jnp.array([0.02])}
    _, state = optimiser.update(gradient, optimiser.init(gradient))
    first_moment = state.inner_state[-1].mu
    np.testing.assert_allclose(first_moment["a"], 0.1 * np.array([0.1, -0.1]) / np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose(first_moment["b"], [0.1 * 0.02], rtol=1e-5)


def test_first_step_is_the_learning_rate(episodes):
    """Adam's first step is η · sign(gradient), whatever the gradient's size."""
    optimiser = make_optimiser()
    state = start_run(make_learner("meta-sgd"), optimiser)
    after, _ = advance(state, ARRAYS, jax.random.key(0), episodes["training"], num_steps=1)
    moved = np.abs(np.asarray(after.learner.step_size - state.learner.step_size))
    np.testing.assert_allclose(moved[moved > 0], HYPER.learning_rate, rtol=2e-3)


@functools.partial(jax.jit, static_argnames=("num_steps", "meta_batch", "unroll"))
def advance(state, hyper, key, episodes, num_steps, meta_batch=4, unroll=1):
    optimiser = make_optimiser()
    return outer_loop.advance(state, hyper, key, episodes, optimiser, meta_batch, num_steps, unroll=unroll)


def test_meta_gradient_is_the_mean_over_tasks(episodes):
    """Each with its own noise; and the regulariser's."""
    tasks, learner, keys = episodes["training"], make_learner("meta-sgd"), jax.random.split(jax.random.key(1), 3)
    indices = jax.vmap(tasks.sample_indices)(keys)
    own, infos = jax.jit(
        lambda learner: meta_gradient(learner, tasks, indices, ARRAYS, keys, all_engines()["reference"])
    )(learner)
    one = jax.jit(jax.grad(lambda learner, key: learner.meta_loss(tasks.sample(key), ARRAYS, key), has_aux=True))
    alone = [one(learner, key) for key in keys]
    penalty = jax.grad(lambda learner: learner.regulariser(ARRAYS))(learner)  # once, whatever the number of tasks
    mean = jax.tree.map(lambda rest, *leaves: sum(leaves) / 3 + rest, penalty, *(gradient for gradient, _ in alone))
    assert close(own, mean, 1e-5)
    assert close(infos["query_loss"], jnp.stack([info["query_loss"] for _, info in alone]), 1e-5)


@pytest.mark.slow
def test_steps_in_twos_are_the_same_steps(episodes):
    state = start_run(make_learner("meta-sgd"), make_optimiser())
    ones, twos = (
        advance(state, ARRAYS, jax.random.key(1), episodes["training"], num_steps=4, unroll=n)[0] for n in (1, 2)
    )
    assert twos.step == 4
    assert close(ones.learner, twos.learner, 1e-6)


def test_cutting_a_run_changes_nothing(episodes):
    state = start_run(make_learner("meta-sgd"), make_optimiser())
    whole, _ = advance(state, ARRAYS, jax.random.key(1), episodes["training"], num_steps=6)
    for _ in range(2):
        state, _ = advance(state, ARRAYS, jax.random.key(1), episodes["training"], num_steps=3)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_learning_rate_falls_along_half_a_cosine(episodes):
    """Adam's first step has the length of the learning rate, whatever the gradient: at step t (1 + cos πt/T)/2 of η."""

    @functools.partial(jax.jit, static_argnames="decay_over")
    def first_step(step, decay_over):
        state = start_run(make_learner("maml"), make_optimiser())
        state = dataclasses.replace(state, step=step)
        training, optimiser = episodes["training"], make_optimiser()
        after, _ = outer_loop.advance(state, ARRAYS, jax.random.key(1), training, optimiser, 4, 1, decay_over)
        return jnp.abs(after.learner.start - state.learner.start).max()

    for step, share in ((0, 1.0), (25, 0.853553), (50, 0.5), (99, 0.000247)):
        np.testing.assert_allclose(first_step(jnp.int32(step), 100), share * ARRAYS.learning_rate, rtol=1e-2)
    np.testing.assert_allclose(first_step(jnp.int32(50), None), ARRAYS.learning_rate, rtol=1e-2)


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_nan_and_inf_never_enter_the_weights(episodes, poison):
    state = start_run(make_learner("meta-sgd"), make_optimiser())
    hyper = dataclasses.replace(ARRAYS, l2=jnp.float32(poison))
    after, _ = advance(state, hyper, jax.random.key(0), episodes["training"], num_steps=3)
    close(after.learner, state.learner, 0)
    assert int(after.skipped) == int(after.skipped_in_a_row) == 3
    healed, _ = advance(after, ARRAYS, jax.random.key(0), episodes["training"], num_steps=3)
    assert int(healed.skipped) == 3
    assert int(healed.skipped_in_a_row) == 0
    assert np.abs(healed.learner.step_size - state.learner.step_size).max() > 0


@functools.partial(jax.jit, static_argnames=("patience", "num_tasks"))
def validate(state, key, episodes, patience, num_tasks=20):
    return outer_loop.validate(state, key, episodes, patience, num_tasks)


def test_best_is_kept_and_patience_stops(episodes):
    state = start_run(make_learner("meta-sgd"), make_optimiser())
    state = dataclasses.replace(state, step=jnp.int32(10))
    state, accuracy = validate(state, jax.random.key(0), episodes["validation"], patience=25)
    assert float(state.best_score) == float(accuracy)
    assert int(state.best_step) == 10
    state = dataclasses.replace(state, learner=jax.tree.map(jnp.zeros_like, state.learner))  # guesses class 0
    for step, stopped in ((20, False), (30, False), (40, True)):
        state = dataclasses.replace(state, step=jnp.int32(step))
        state, accuracy = validate(state, jax.random.key(0), episodes["validation"], patience=25)
        assert float(accuracy) < float(state.best_score)
        assert bool(state.stopped) is stopped
        assert int(state.best_step) == 10
    frozen, _ = advance(state, ARRAYS, jax.random.key(0), episodes["training"], num_steps=2)
    close(frozen.learner, state.learner, 0)
    assert int(frozen.step) == 40


@pytest.mark.slow
def test_runs_side_by_side_are_the_runs_alone(episodes):
    """A population over hyper-parameters and seeds is a vmap of one pure function."""

    def run(hyper, key):
        return meta_train(
            initial, hyper, key, **episodes, optimiser=make_optimiser(),
            steps=6, meta_batch=3, validate_every=3, validation_tasks=10,
        )  # fmt: skip

    def initial(key):
        return jax.tree.map(lambda leaf: leaf * (1 + jax.random.uniform(key)), make_learner("meta-sgd"))

    rates = jnp.array([1e-3, 1e-2])
    hypers = HyperParams(**{name: jnp.full(2, value) for name, value in vars(HYPER).items()})
    hypers = dataclasses.replace(hypers, learning_rate=rates)
    keys = jax.random.split(jax.random.key(0))
    states, accuracies = jax.jit(jax.vmap(run))(hypers, keys)
    assert accuracies.shape == (2, 2)
    alone = jax.jit(run)
    for index in range(2):
        state, accuracy = alone(jax.tree.map(lambda leaf, i=index: leaf[i], hypers), keys[index])
        close(jax.tree.map(lambda leaf, i=index: leaf[i], states.learner), state.learner, 1e-4)
        close(accuracies[index], accuracy, 1e-3)


@pytest.mark.slow
def test_training_learns(episodes):
    """A moment of meta-training on a toy problem beats the start, on classes never seen."""
    optimiser = make_optimiser()
    state = start_run(make_learner(latent_steps=1, finetune_steps=0, latent_step_size=0.01), optimiser)
    before = validate(state, jax.random.key(9), episodes["validation"], patience=10**6, num_tasks=200)[1]
    state, _ = advance(state, ARRAYS, jax.random.key(0), episodes["training"], num_steps=150, meta_batch=8)
    after = validate(state, jax.random.key(9), episodes["validation"], patience=10**6, num_tasks=200)[1]
    assert float(after) > float(before) + 0.1


def test_clip_each_norm_leaves_small_tensors():
    small = {"a": jnp.array([0.01, 0.02])}
    updates, _ = clip_each_norm(0.1).update(small, optax.EmptyState())
    close(updates, small)


@pytest.mark.parametrize("name", ["reptile", "maml"])
def test_learners_take_tasks_as_the_outer_loop_lends_them(episodes, name):
    """Whose queries say where they lie: Reptile, which joins them with the support set, once stumbled over it."""
    state = start_run(make_learner(name), make_optimiser())
    after, _ = advance(state, ARRAYS, jax.random.key(0), episodes["training"], num_steps=1)
    assert np.abs(after.learner.start - state.learner.start).max() > 0
