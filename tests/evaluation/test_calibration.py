"""Temperatures: the best one is found, and divides the logits of the right number of shots."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from helpers.marks import by_default
from helpers.small import DIM, adapt, close, make_learner, make_metaset, make_model, shake
from helpers.small import logits as logits_of
from metaleo.checkpoints import load_model, save_model
from metaleo.config.schema import TrainConfig
from metaleo.evaluation.calibration import QUERY_LOGITS, best_temperature, calibrate_model, learn_temperatures
from metaleo.learners import NearestCentroid
from metaleo.tasks.episodes import Episodes
from metaleo.tasks.task import labelled
from metaleo.training import run as runs

random = np.random.default_rng(0)


def query_loss(logits, answers, temperature=1.0):
    scaled = np.asarray(logits, np.float64) / temperature
    return np.mean(scipy.special.logsumexp(scaled, axis=1) - scaled[np.arange(len(answers)), answers])


@pytest.mark.parametrize(("size", "share"), [(2.0, 0.75), (0.5, 0.9), (20.0, 0.8)])
def test_two_classes_in_closed_form(size, share):
    """Where logits are always (a, 0) and the first is right with frequency p: a / T = log p / (1 - p)."""
    logits = np.tile([size, 0.0], (100, 1))
    answers = (np.arange(100) >= 100 * share).astype(int)
    expected = size / np.log(share / (1 - share))
    np.testing.assert_allclose(best_temperature(logits, answers), expected, rtol=1e-3)


@pytest.mark.parametrize("truth", [0.25, 1.0, 6.0])
def test_a_known_temperature_is_recovered(truth):
    logits = 4 * random.normal(size=(20_000, 5))
    powers = np.exp(logits / truth)
    answers = (powers / powers.sum(1, keepdims=True)).cumsum(1) < random.random((20_000, 1))
    np.testing.assert_allclose(best_temperature(logits, answers.sum(1)), truth, rtol=0.05)


def test_it_is_the_best_of_a_fine_grid():
    logits, answers = 3 * random.normal(size=(200, 4)), random.integers(0, 4, 200)
    logits[np.arange(200), answers] += 2
    grid = np.exp(np.linspace(-3, 3, 601))
    best = grid[np.argmin([query_loss(logits, answers, one) for one in grid])]
    np.testing.assert_allclose(best_temperature(logits, answers), best, rtol=0.011)


def test_it_stays_within_bounds():
    """Where all are right, no temperature is low enough; where all are wrong, none is high enough."""
    logits = np.tile([1.0, 0.0], (10, 1))
    np.testing.assert_allclose(best_temperature(logits, np.zeros(10, int)), 1 / 20, rtol=0.01)
    np.testing.assert_allclose(best_temperature(logits, np.ones(10, int)), 20, rtol=0.01)


def test_temperatures_between_shots():
    """Linear in the logarithm of both: T is a power of the shots."""
    model = make_model(header={"temperatures": [[1, 2.0], [4, 8.0], [16, 4.0]]})
    assert [round(model.temperature(shot), 9) for shot in (1, 2, 4, 8, 16)] == [2, 4, 8, round(32**0.5, 9), 4]
    assert round(model.temperature(0.5), 9) == 2
    assert round(model.temperature(100), 9) == 4
    np.testing.assert_allclose(model.temperature(2.5), 2 * 2.5)


def test_no_temperatures():
    assert make_model(header={}).temperature(3.0) == make_model(header={"temperatures": []}).temperature(3.0) == 1.0


@pytest.fixture(scope="module")
def episodes():
    return Episodes.over(make_metaset(images=12).subset("val"), way=3, shot=2, query=None)


@pytest.mark.parametrize("name", by_default(["nearest-centroid"], ["leo", "nearest-centroid"]))
def test_masked_shots_are_tasks_of_so_many_shots(episodes, name, count_compilations):
    """As if the task had been drawn with the first of its examples only; and one program serves any number."""
    learner, key = shake(make_learner(name, latent_steps=1, finetune_steps=1)), jax.random.key(3)
    most = dataclasses.replace(episodes, shot=3, query=4)
    draw = jax.jit(lambda index: most.sample(jax.random.fold_in(key, index)))
    QUERY_LOGITS(learner, most, key, jnp.arange(2), jnp.int32(3))
    for shot in (1, 2):
        with count_compilations() as compilations:
            logits, targets = QUERY_LOGITS(learner, most, key, jnp.arange(2), jnp.int32(shot))
        assert not compilations
        assert logits.shape == targets.shape == (2, 12, 3)
        for index in range(2):
            task = draw(index)
            kept = np.concatenate([np.arange(shot) + 3 * number for number in range(3)])
            support = labelled(task.support.inputs[kept], np.repeat(np.arange(3), shot), 3)
            expected = logits_of(adapt(learner, support).head, task.query.inputs)
            close(logits[index], expected, 1e-4)
            np.testing.assert_array_equal(targets[index], task.query.targets)


def test_learned_temperatures_lower_the_query_loss(episodes):
    """Also on tasks that they were not learned on; and a learner four times as sharp needs four times as much."""
    sure, calm = NearestCentroid(40.0), NearestCentroid(10.0)
    found = learn_temperatures(sure, episodes, tasks=40)
    assert [shot for shot, _ in found] == [1, 2, 5]  # 10 and half of the examples are more than there are
    other = dataclasses.replace(episodes, shot=5, query=6)
    for shot, temperature in found:
        logits, targets = QUERY_LOGITS(sure, other, jax.random.key(9), jnp.arange(40), jnp.int32(shot))
        logits, answers = np.asarray(logits).reshape(-1, 3), np.asarray(targets).argmax(-1).reshape(-1)
        assert query_loss(logits, answers, temperature) < query_loss(logits, answers) - 0.005
    quarter = np.array(learn_temperatures(calm, episodes, tasks=40))[:, 1]
    np.testing.assert_allclose(np.array(found)[:, 1], 4 * quarter, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("images", "shots"), [(2, [1]), (3, [1, 2]), (30, [1, 2, 5, 10])])
def test_shots_are_as_many_as_classes_have_examples_for(images, shots):
    episodes = Episodes.over(make_metaset(images=images).subset("val"), 3, 1, None)
    assert [shot for shot, _ in learn_temperatures(make_learner("nearest-centroid"), episodes, tasks=2)] == shots


def test_a_model_file_learns_its_temperatures(tmp_path, episodes):
    model, path = make_model("prototypical", header={"seed": 7, "network": "mine"}), tmp_path / "model.safetensors"
    save_model(path, model.learner, model.structure, model.header)
    found = calibrate_model(path, episodes)
    again = load_model(path)
    assert again.header["temperatures"] == [list(pair) for pair in found]
    assert (again.header["seed"], again.header["network"], again.header["kind"]) == (7, "mine", "model")
    assert again.temperature(1) == pytest.approx(found[0][1])
    for one, other in zip(jax.tree.leaves(again.learner), jax.tree.leaves(model.learner), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("train_on", "expected"), [("train", ["model-3.safetensors"]), ("train+val", [])])
def test_only_classes_that_were_not_learned_from_say_how_sure_to_be(tmp_path, monkeypatch, train_on, expected):
    """And only seeds that have a model at all."""
    done = []
    monkeypatch.setattr(runs, "calibrate_model", lambda path, episodes: done.append((path, episodes)))
    structure = make_model("nearest-centroid").structure
    config = TrainConfig(data="mine", train_on=train_on, way=3, shot=2, query=4, seed=3, seeds=2, structure=structure)
    run = runs.TrainingRun(config, tmp_path, make_metaset())
    validation_scores = np.array([0.5, -np.inf], np.float32)
    run.calibrate(eqx.tree_at(lambda state: state.best_score, jax.eval_shape(run.begin, None), validation_scores))
    assert [path.name for path, _ in done] == expected
    assert all(episodes.counts.tolist() == [12] * 5 and episodes.rows.dim == DIM for _, episodes in done)
