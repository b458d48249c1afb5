"""Certainty against errors: every number by hand, and every answer by asking the learner oneself."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from helpers.marks import by_default
from helpers.small import DIM, make_batch, make_candidate, make_metaset
from metaleo.analysis.uncertainty import (
    LEVELS,
    SHARES,
    Answers,
    Functions,
    accuracy_as_kept,
    answer,
    answers_of_samples,
    collect_answers,
    collect_functions,
    describe_answers,
    describe_functions,
    entropy,
    error_ranking,
    kept_accuracy,
    over_groups,
    reliability,
)
from metaleo.evaluation.evaluate import score_learner, summarise, task_key
from metaleo.learners.registry import Structure
from metaleo.tasks import Batch, Episodes, Task
from metaleo.tasks.episodes import as_they_are, place_rows
from metaleo.tasks.sines_and_lines import SinesAndLines
from metaleo.tasks.task import key_apart, normalise

SIZES = {"latent": 4, "latent_steps": 1, "finetune_steps": 1, "latent_step_size": 0.5, "finetune_step_size": 0.3}
FUNCTIONS = {
    "network": "mlp",
    "dim": 1,
    "hidden": 3,
    "layers": 2,
    "codes": "task",
    "noise": 0.3,
    "width": 5,
    "max_grad_norm": 1.0,
}
SAMPLES = 4


def make_answers(correct, confidence=None, doubt=None, present=None, disagreement=None):
    correct = np.asarray(correct, bool)
    blank = np.full(correct.shape, 0.5)
    return Answers(
        correct,
        blank if confidence is None else np.asarray(confidence),
        blank if doubt is None else np.asarray(doubt),
        disagreement,
        np.ones(correct.shape, bool) if present is None else np.asarray(present),
    )


def random_answers(tasks=23, query=8, seed=0):
    """Errors where there is more doubt, some of it the same; and padding, all of it wrong and in no doubt."""
    random = np.random.default_rng(seed)
    doubt = random.integers(1, 9, (tasks, query)) / 8.0
    present = np.arange(query)[None, :] < random.integers(5, query + 1, (tasks, 1))
    correct = (random.random((tasks, query)) > 0.7 * doubt) & present
    confidence = np.where(present, 1 - doubt / 2, 0.999)
    return make_answers(correct, confidence, np.where(present, doubt, 0.0), present, np.where(present, doubt**2, 0.0))


def subject_and_bench(tmp_path, name="leo", **changes):
    structure = Structure(**{"learner": name, "dim": DIM, "way": 3, **SIZES, **changes})
    return make_candidate(tmp_path, structure, uneven(), 3 if structure.noise else 2)


def uneven():
    """Classes of different sizes: some queries are padding."""
    whole = make_metaset()
    counts = np.tile([12, 9, 11], 6)
    rows = np.concatenate([12 * index + np.arange(count) for index, count in enumerate(counts)])
    return dataclasses.replace(whole, rows=rows, counts=counts)


# How well doubt finds errors


def by_pairs(doubt, correct):
    """Of all pairs of a wrong answer and a right one; the same doubt counts half."""
    pairs = list(itertools.product(doubt[~correct], doubt[correct]))
    return sum(1.0 if wrong > right else 0.5 if wrong == right else 0.0 for wrong, right in pairs) / len(pairs)


@pytest.mark.parametrize("seed", range(3))
def test_error_ranking_counts_pairs(seed):
    random = np.random.default_rng(seed)
    doubt, correct = random.integers(6, size=40) / 5, random.random(40) < 0.7
    assert error_ranking(doubt, correct) == pytest.approx(by_pairs(doubt, correct))


def test_error_ranking_at_its_ends():
    doubt = np.array([0.1, 0.2, 0.8, 0.9])
    correct = np.array([True, True, False, False])
    assert error_ranking(doubt, correct) == 1
    assert error_ranking(-doubt, correct) == 0
    assert error_ranking(np.ones(4), correct) == 0.5
    assert np.isnan(error_ranking(doubt, np.ones(4, bool)))
    assert np.isnan(error_ranking(doubt, np.zeros(4, bool)))


def test_kept_accuracy_by_hand():
    """The most in doubt are left out first; one is always kept."""
    doubt = np.array([0.9, 0.1, 0.5, 0.3, 0.7])
    correct = np.array([False, True, False, True, True])
    for left_out, expected in ((0.0, 3 / 5), (0.2, 3 / 4), (0.4, 2 / 3), (0.6, 1), (0.05, 3 / 5), (1.0, 1)):
        assert kept_accuracy(doubt, correct, left_out) == pytest.approx(expected)


def test_ties_at_the_edge_count_by_their_mean():
    """In whatever order they stand."""
    doubt, correct = np.zeros(10), np.arange(10) < 9
    for order in (slice(None), slice(None, None, -1)):
        assert kept_accuracy(doubt, correct[order], 0.1) == pytest.approx(0.9)
    doubt = np.array([0.0, 0.0, 0.5, 0.5, 0.5, 1.0])
    correct = np.array([True, True, True, False, False, False])
    assert kept_accuracy(doubt, correct, 0.4) == pytest.approx((2 + 2 / 3) / 4)


def test_accuracy_as_kept_leaves_padding_out():
    answers = random_answers()
    answers.entropy[:] = np.random.default_rng(0).permutation(answers.entropy.size).reshape(answers.entropy.shape)
    flat, correct = answers.entropy[answers.present], answers.correct[answers.present]
    ours = accuracy_as_kept(answers, answers.entropy)
    assert ours.shape == SHARES.shape
    for value, share in zip(ours, np.arange(19) * 0.05, strict=True):
        most = len(flat) - round(share * len(flat))
        assert value == pytest.approx(correct[np.argsort(flat, kind="stable")[:most]].mean())
    assert ours[0] < 0.98 < 1


def test_over_groups_is_the_number_over_all():
    """And the interval of its values in ten groups of tasks, those without a value left out."""
    answers = random_answers()
    answers.correct[:3] = answers.present[:3]  # no errors in the first group: no ranking
    ours = over_groups(error_ranking, answers.entropy, answers)
    flat, correct = answers.entropy[answers.present], answers.correct[answers.present]
    assert ours[0] == pytest.approx(by_pairs(flat, correct))
    edges = [0, 2, 4, 6, 9, 11, 13, 16, 18, 20, 23]
    each = [
        by_pairs(answers.entropy[a:b][answers.present[a:b]], answers.correct[a:b][answers.present[a:b]])
        for a, b in itertools.pairwise(edges[1:])
    ]
    assert ours[1] == pytest.approx(stats.t.interval(0.95, 8, scale=stats.sem(each))[1])


def test_groups_of_few_tasks():
    answers = make_answers([[True, False], [True, True], [False, False]])
    value, interval = over_groups(lambda _, correct: float(correct.mean()), answers.entropy, answers)
    assert value == pytest.approx(1 / 2)
    assert interval == pytest.approx(stats.t.interval(0.95, 2, scale=stats.sem([0.5, 1, 0]))[1])


# Probabilities


def test_reliability_by_hand():
    """Fifteen bins; full confidence is in the last, and padding in none."""
    confidence = [[0.34, 0.35, 0.39, 1.0], [0.94, 0.55, 0.33, 0.77]]
    correct = [[True, False, False, True], [True, False, True, True]]
    present = [[True, True, True, True], [True, True, False, False]]
    assert reliability(make_answers(correct, confidence, present=present)) == [
        pytest.approx({"count": 3, "confidence": 0.36, "accuracy": 1 / 3}),
        pytest.approx({"count": 1, "confidence": 0.55, "accuracy": 0}),
        pytest.approx({"count": 2, "confidence": 0.97, "accuracy": 1}),
    ]


def test_entropy_by_hand():
    """Nothing where it is certain, log N where all are alike."""
    probabilities = jnp.asarray([[1, 0, 0, 0], [0.25] * 4, [0.5, 0.25, 0.125, 0.125]], jnp.float32)
    np.testing.assert_allclose(entropy(probabilities), [0, np.log(4), 1.75 * np.log(2)], rtol=1e-6)


def task_of(labels):
    query = Batch(jnp.zeros((len(labels), DIM)), jnp.eye(3)[jnp.asarray(labels)], jnp.ones(len(labels), bool))
    return Task(make_batch(), query)


def test_an_answer_is_the_most_probable_class():
    probabilities = jnp.asarray([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], jnp.float32)
    ours = answer(probabilities, task_of([1, 2]))
    assert ours["correct"].tolist() == [True, False]
    np.testing.assert_allclose(ours["confidence"], [0.5, 0.6], rtol=1e-6)
    np.testing.assert_allclose(ours["entropy"], stats.entropy(np.asarray(probabilities), axis=1), rtol=1e-5)


def test_samples_answer_by_their_mean_and_disagree_with_it():
    """The mean of the first is [.5, .3, .2]: one of four says otherwise. All agree on the second."""
    first = [[0.1, 0.85, 0.05], [0.9, 0.05, 0.05], [0.5, 0.2, 0.3], [0.5, 0.1, 0.4]]
    second = [[0.1, 0.1, 0.8], [0.2, 0.2, 0.6], [0.3, 0.3, 0.4], [0.0, 0.4, 0.6]]
    ours = answers_of_samples(jnp.asarray([first, second], jnp.float32).swapaxes(0, 1), task_of([1, 2]))
    np.testing.assert_allclose(ours["disagreement"], [0.25, 0])
    assert ours["correct"].tolist() == [False, True]
    np.testing.assert_allclose(ours["confidence"], [0.5, 0.6], rtol=1e-6)
    np.testing.assert_allclose(ours["entropy"], stats.entropy([[0.5, 0.3, 0.2], [0.15, 0.25, 0.6]], axis=1), rtol=1e-5)


# What is told of answers


def test_description_by_hand():
    answers = random_answers()
    told, present = describe_answers(answers), answers.present
    each = [correct[there].mean() for correct, there in zip(answers.correct, present, strict=True)]
    correct, confidence = answers.correct[present], answers.confidence[present]
    assert told["accuracy"] == pytest.approx(np.mean(each))
    assert told["accuracy_interval"] == pytest.approx(1.96 * stats.sem(each))
    assert told["answers"] == present.sum()
    assert told["mean_confidence"] == pytest.approx(confidence.mean())
    bins = np.floor(confidence * 15).clip(max=14)
    gaps = [abs((correct[bins == one] - confidence[bins == one]).sum()) for one in range(15)]
    assert told["calibration_error"] == pytest.approx(sum(gaps) / present.sum())
    assert told["reliability"] == reliability(answers)
    for name, doubt in (("entropy", answers.entropy[present]), ("disagreement", answers.disagreement[present])):
        own = told[name]
        assert own["mean"] == pytest.approx(doubt.mean())
        assert own["mean_where_right"] == pytest.approx(doubt[correct].mean())
        assert own["mean_where_wrong"] == pytest.approx(doubt[~correct].mean())
        assert own["error_ranking"] == pytest.approx(by_pairs(doubt, correct))
        assert own["accuracy_without_least_certain_tenth"] == pytest.approx(kept_accuracy(doubt, correct, 0.1))
        assert own["error_ranking_interval"] > 0
        assert own["accuracy_without_least_certain_tenth_interval"] > 0


def test_one_classifier_does_not_disagree():
    assert "disagreement" not in describe_answers(dataclasses.replace(random_answers(), disagreement=None))


def test_padding_never_counts():
    """Whatever stands behind the mask."""
    answers, random = random_answers(), np.random.default_rng(9)

    def rubbish(values):
        noise = random.random(values.shape)
        return np.where(answers.present, values, noise < 0.5 if values.dtype == bool else noise)

    other = Answers(
        *(rubbish(part) for part in (answers.correct, answers.confidence, answers.entropy, answers.disagreement)),
        answers.present,
    )
    assert describe_answers(other) == describe_answers(answers)


@pytest.mark.parametrize("right", [True, False])
def test_all_right_or_all_wrong_is_no_error(right):
    """What has no answers to be told of is not a number, quietly."""
    told = describe_answers(make_answers(np.full((4, 5), right)))
    assert told["accuracy"] == right
    assert np.isnan(told["entropy"]["error_ranking"])
    assert np.isnan(told["entropy"]["mean_where_wrong" if right else "mean_where_right"])


# Asking


def test_answers_of_the_means_are_those_of_evaluation(tmp_path):
    """Accuracy of each task, and calibration, on the same tasks; classes run out, so some queries are padding."""
    candidate, suite = subject_and_bench(tmp_path)
    heard = []
    found = collect_answers(candidate, suite, "test", 3, 23, heard.append, samples=SAMPLES)
    assert heard == [20, 23]
    episodes = Episodes.over(uneven().subset("test"), 3, 2, None)
    scores = score_learner(candidate.learner, episodes, 3, 23)
    answers = found["means"]
    assert not answers.present.all()
    np.testing.assert_allclose(
        (answers.correct & answers.present).sum(1) / answers.present.sum(1), scores.accuracy, rtol=1e-5
    )
    told, report = describe_answers(answers), summarise(scores)
    assert told["accuracy"] == pytest.approx(report.accuracy, rel=1e-5)
    assert told["accuracy_interval"] == pytest.approx(report.accuracy_interval, rel=1e-4)
    assert told["answers"] == scores.calibration.count.sum()
    assert told["mean_confidence"] == pytest.approx(scores.calibration.confidence.sum() / told["answers"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"tail": (2, 2, 2, 8)}, marks=pytest.mark.slow)], ids=["plain", "joint"]
)
def test_samples_are_adaptations_with_keys_of_their_own(tmp_path, changes):
    candidate, suite = subject_and_bench(tmp_path, **changes)
    learner, index = candidate.learner, 2
    found = collect_answers(candidate, suite, "test", 3, 4, samples=SAMPLES)["samples"]
    own = jax.random.fold_in(task_key(3), index)
    episodes = Episodes.over(
        uneven().subset("test"), 3, 2, None, place_rows(uneven(), prepare=as_they_are if changes else normalise)
    )
    task = jax.jit(lambda key: episodes.sample(key))(own)

    @jax.jit
    def logits(key):
        return jax.vmap(learner.adapt(task.support, None, key).head)(task.query.inputs)

    each = special.softmax([logits(key) for key in jax.random.split(key_apart(own), SAMPLES)], axis=2)
    mean = each.mean(0)
    assert np.ptp(each, axis=0).max() > 1e-3
    np.testing.assert_array_equal(found.present[index], task.query.mask)
    np.testing.assert_array_equal(found.correct[index], mean.argmax(1) == np.asarray(task.query.targets).argmax(1))
    np.testing.assert_allclose(found.confidence[index], mean.max(1), rtol=1e-4)
    np.testing.assert_allclose(found.entropy[index], stats.entropy(mean, axis=1), rtol=1e-4)
    np.testing.assert_allclose(found.disagreement[index], (each.argmax(2) != mean.argmax(1)).mean(0))
    assert found.disagreement.max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(["meta-sgd"], ["leo-deterministic", "meta-sgd", "nearest-centroid"]))
def test_who_has_nothing_to_draw_has_no_samples(tmp_path, name):
    candidate, suite = subject_and_bench(tmp_path, name)
    found = collect_answers(candidate, suite, "test", 0, 3, samples=SAMPLES, query=3)
    assert list(found) == ["means"]
    assert found["means"].disagreement is None
    assert found["means"].correct.shape == (3, 9)
    assert found["means"].present.all()


# Functions


@pytest.mark.slow
def test_functions_by_hand(tmp_path):
    """Error of the mean against the curve, spread, and coverage by the quantiles of functions and noise."""
    candidate, suite = subject_and_bench(tmp_path, **FUNCTIONS)
    found = collect_functions(candidate, suite, "test", 5, 3, samples=SAMPLES)
    assert found.coverage.shape == (3, len(LEVELS)) == (3, 19)
    tasks, learner = SinesAndLines(3, 100), candidate.learner

    @jax.jit
    def draw(own):
        curve, task = tasks.draw(own)
        return task, curve(task.query.inputs[:, 0])

    @jax.jit
    def sampled(task, key):
        return jax.vmap(learner.adapt(task.support, None, key).head)(task.query.inputs)[:, 0]

    for index in range(3):
        own = jax.random.fold_in(task_key(5), index)
        task, truth = draw(own)
        functions = np.stack([sampled(task, key) for key in jax.random.split(key_apart(own), SAMPLES)])
        y = np.asarray(task.query.targets, np.float64)[:, 0]
        assert functions.std(0).max() > 1e-3
        np.testing.assert_allclose(found.error[index], (functions.mean(0) - truth) ** 2, rtol=1e-2, atol=1e-4)
        np.testing.assert_allclose(found.spread[index], functions.std(0), rtol=1e-3, atol=1e-4)
        below = stats.norm.cdf(y, functions, 0.3).mean(0)  # where each target is in the mixture
        for level, ours in zip(np.arange(1, 20) * 0.05, found.coverage[index], strict=True):
            least, most = (  # a target on an edge may fall to either side
                np.mean((below >= 0.5 - level / 2 - edge) & (below <= 0.5 + level / 2 + edge)) for edge in (-1e-4, 1e-4)
            )
            assert least - 1e-6 <= ours <= most + 1e-6
    assert (np.diff(found.coverage, axis=1) >= 0).all()


def test_description_of_functions_by_hand():
    random = np.random.default_rng(0)
    spread = random.random((6, 10))
    error = spread * random.random((6, 10))
    coverage = np.tile(np.arange(1, 20) / 20, (6, 1)) * np.linspace(0.5, 1, 6)[:, None]
    told = describe_functions(Functions(error, spread, coverage))
    assert told["mse"] == pytest.approx(error.mean())
    assert told["mse_interval"] == pytest.approx(1.96 * stats.sem(error.mean(1)))
    assert told["points"] == 60
    assert told["mean_spread"] == pytest.approx(spread.mean())
    ranks = [stats.rankdata(values) for values in (spread, error)]
    assert told["spread_and_error_rank_correlation"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    kept = spread.ravel() < np.sort(spread.ravel())[-6]
    assert told["mse_without_least_certain_tenth"] == pytest.approx(error.ravel()[kept].mean())
    assert [row["level"] for row in told["coverage"]] == pytest.approx([0.05 * i for i in range(1, 20)])
    assert [row["coverage"] for row in told["coverage"]] == pytest.approx([0.75 * 0.05 * i for i in range(1, 20)])


def test_functions_that_are_all_one_have_no_ranking():
    told = describe_functions(Functions(np.ones((4, 5)), np.full((4, 5), 1e-8), np.ones((4, 19))))
    assert told["spread_and_error_rank_correlation"] is None
    assert told["mse_without_least_certain_tenth"] is None
    assert told["mse"] == 1
