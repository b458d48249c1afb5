"""Evaluation: the same numbers however it is cut, and the same as by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import adapt, make_candidate, make_learner, make_metaset, make_structure
from metaleo.errors import BadInput
from metaleo.evaluation import evaluate as evaluation
from metaleo.evaluation.evaluate import (
    CalibrationCounts,
    Score,
    count_calibration,
    score_learner,
    score_tasks,
    summarise,
)
from metaleo.learners import NearestCentroid
from metaleo.tasks import Episodes
from metaleo.tasks.task import labelled


@pytest.fixture(scope="module")
def episodes():
    return Episodes.over(make_metaset().subset("test"), 3, 2, None)


@pytest.mark.slow
def test_blocks_do_not_matter(episodes, monkeypatch):
    learner = make_learner()
    whole = score_learner(learner, episodes, seed=0, num_tasks=10)
    monkeypatch.setattr(evaluation, "BLOCK", {"cpu": 4})
    heard = []
    parts = score_learner(learner, episodes, seed=0, num_tasks=10, progress=heard.append)
    np.testing.assert_allclose(whole.accuracy, parts.accuracy)
    np.testing.assert_allclose(whole.nll, parts.nll, rtol=1e-5)
    assert heard == [4, 8, 10]
    assert whole.accuracy.shape == (10,)


def test_a_task_is_the_same_whatever_is_beside_it(episodes):
    learner, key = make_learner(), jax.random.key(0)
    several = jax.jit(score_tasks)(learner, episodes, key, jnp.arange(6))
    one = jax.jit(score_tasks)(learner, episodes, key, jnp.array([4]))
    np.testing.assert_allclose(several.nll[4], one.nll[0], rtol=1e-5)


def test_second_call_compiles_nothing(episodes, count_compilations):
    score_learner(make_learner(seed=0), episodes, seed=0, num_tasks=7)
    with count_compilations() as compilations:
        score_learner(make_learner(seed=1), episodes, seed=1, num_tasks=7)
    assert len(compilations) == 0


def test_seeds_choose_tasks(episodes):
    learner = make_learner()
    results = [score_learner(learner, episodes, seed, 5).nll for seed in (0, 0, 1)]
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).all()


def test_scores_by_hand(episodes):
    learner, key = make_learner(), jax.random.fold_in(jax.random.key(3), 2)
    scores, sample = score_learner(learner, episodes, seed=3, num_tasks=4), jax.jit(lambda key: episodes.sample(key))
    for index in range(4):
        task = sample(jax.random.fold_in(key, index))
        keep = np.asarray(task.query.mask)
        logits = np.asarray(task.query.inputs @ adapt(learner, task.support).head.weights.T, np.float64)[keep]
        truth = np.asarray(task.query.targets).argmax(1)[keep]
        assert len(truth) == 3 * 10  # twelve images a class, two of them shown
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(scores.accuracy[index], np.mean(logits.argmax(1) == truth), rtol=1e-6)
        np.testing.assert_allclose(
            scores.nll[index], -np.log(probabilities[np.arange(len(truth)), truth]).mean(), rtol=1e-4
        )


def test_calibration_error_by_hand():
    """Two predictions at 0.9, one of them right; one at 0.6, right; a masked one that does not count."""
    probabilities = jnp.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.7, 0.3]])
    query = labelled(jnp.zeros((4, 1)), np.array([0, 1, 1, 1]), 2, jnp.array([True, True, True, False]))
    calibration = count_calibration(probabilities, query)
    assert float(calibration.count.sum()) == 3
    scores = Score(jnp.array([2 / 3]), jnp.array([0.5]), jax.tree.map(lambda leaf: leaf[None], calibration))
    expected = (abs(1 - 2 * 0.9) + abs(1 - 0.6)) / 3
    np.testing.assert_allclose(summarise(scores).calibration_error, expected, rtol=1e-5)


def test_the_temperature_divides_the_logits(episodes):
    """A learner at temperature 2 is as sure as one half as sharp; without one there is nothing to report."""
    tempered = score_learner(NearestCentroid(10.0), episodes, seed=0, num_tasks=5, temperature=2.0)
    calm = score_learner(NearestCentroid(5.0), episodes, seed=0, num_tasks=5)
    found, expected = summarise(tempered, 2.0), summarise(calm)
    assert found.temperature == 2.0
    assert found.calibrated_nll == pytest.approx(expected.nll, rel=1e-5)
    assert found.calibrated_nll_interval == pytest.approx(expected.nll_interval, rel=1e-4)
    assert found.calibrated_error == pytest.approx(expected.calibration_error, rel=1e-4)
    assert found.nll == pytest.approx(summarise(score_learner(NearestCentroid(10.0), episodes, 0, 5)).nll, rel=1e-5)
    assert expected.temperature is expected.calibrated_nll is expected.calibrated_error is None


def test_interval_by_hand():
    accuracies = np.array([0.2, 0.4, 0.9, 0.5])
    nothing = CalibrationCounts(*(jnp.ones((4, 15)),) * 3)
    report = summarise(Score(accuracies, accuracies, nothing))
    assert report.accuracy == pytest.approx(0.5)
    assert report.accuracy_interval == pytest.approx(1.96 * accuracies.std(ddof=1) / 2)
    assert report.tasks == 4


@pytest.mark.parametrize("size", [1, 3, 7, 9])
def test_chunks_are_the_whole(size):
    batch = {"a": jnp.arange(7.0), "b": jnp.arange(14.0).reshape(7, 2)}
    found = evaluation.in_chunks(lambda part: {"sum": part["a"] + part["b"].sum(1)}, batch, size)
    np.testing.assert_array_equal(found["sum"], batch["a"] + batch["b"].sum(1))


def test_a_model_is_not_tested_on_classes_that_it_was_trained_on(tmp_path):
    candidate, suite = make_candidate(tmp_path, make_structure())
    assert suite.tasks(candidate, "test").way == 3
    candidate.model.header["classes"] = list(make_metaset().subset("test").class_names)
    with pytest.raises(BadInput, match="was trained on class"):
        suite.tasks(candidate, "test")
