"""Does a model know when it is wrong? Uncertainty of its predictions compared with their errors.

A stochastic LEO predicts in two ways: with the classifier from its means, as in evaluation, and with many classifiers
sampled from its Gaussians, each adapted separately, whose probabilities are averaged. Other learners have one
classifier.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from scipy import stats

from metaleo.analysis.paths import Report, ignore_progress, inner_learner, map_over_tasks
from metaleo.checkpoints import Candidate
from metaleo.evaluation.evaluate import BINS, TaskSuite, mean_and_interval
from metaleo.evaluation.regression import Sampled, covered
from metaleo.learners import LEO, Learner
from metaleo.tasks import Task
from metaleo.tasks.sines_and_lines import Curve

GROUPS = 10
"""Groups of tasks: a statistic that is not a mean over tasks gets its interval from its values in these groups."""
LEFT_OUT = 0.1
SHARES = np.arange(0, 0.91, 0.05)
"""Shares of answers left out, for the curve of accuracy."""
LEVELS = np.arange(0.05, 1, 0.05)
"""Levels of the predictive intervals of functions."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """For every query of every task: whether the prediction is correct, and how certain it is."""

    correct: Bool[np.ndarray, "task query"]
    confidence: Float[np.ndarray, "task query"]
    """Probability of the predicted class."""
    entropy: Float[np.ndarray, "task query"]
    """Entropy of the predicted probabilities, in nats."""
    disagreement: Float[np.ndarray, "task query"] | None
    """Share of the sampled classifiers that predict another class."""
    present: Bool[np.ndarray, "task query"]
    """False for padding."""


def entropy(probabilities: Float[Array, "*query way"]) -> Float[Array, "*query"]:
    return -jnp.sum(jax.scipy.special.xlogy(probabilities, probabilities), axis=-1)


def answer(probabilities: Float[Array, "query way"], task: Task) -> dict[str, Any]:
    correct = probabilities.argmax(-1) == task.query.targets.argmax(-1)
    return {"correct": correct, "confidence": probabilities.max(-1), "entropy": entropy(probabilities)}


def answers_of_samples(probabilities: Float[Array, "sample query way"], task: Task) -> dict[str, Any]:
    mean = probabilities.mean(0)
    differ = probabilities.argmax(-1) != mean.argmax(-1)[None, :]
    return answer(mean, task) | {"disagreement": differ.astype(mean.dtype).mean(0)}


def collect_answers(
    candidate: Candidate,
    suite: TaskSuite,
    split: str,
    seed: int,
    num_tasks: int,
    progress: Report = ignore_progress,
    *,
    samples: int,
    query: int | None = None,
) -> dict[str, Answers]:
    """Answers of the classifier from the means and, for a stochastic learner, of sampled classifiers."""
    inner = inner_learner(candidate.learner)
    stochastic = isinstance(inner, LEO) and inner.stochastic

    def analyse_one(learner: Learner, task: Task, key: PRNGKeyArray) -> dict[str, Any]:
        def classify(key: PRNGKeyArray | None) -> Float[Array, "query way"]:
            return jax.nn.softmax(jax.vmap(learner.adapt(task.support, None, key).head)(task.query.inputs))

        found = {"means": answer(classify(None), task) | {"present": task.query.mask}}
        if stochastic:
            sampled = jax.vmap(classify)(jax.random.split(key, samples))
            found["samples"] = answers_of_samples(sampled, task) | {"present": task.query.mask}
        return found

    found = map_over_tasks(
        analyse_one, candidate.learner, suite.tasks(candidate, split, query), seed, num_tasks, progress, at_once=10
    )
    return {way: Answers(**({"disagreement": None} | values)) for way, values in found.items()}


def error_ranking(doubt: Float[np.ndarray, " query"], correct: Bool[np.ndarray, " query"]) -> float:
    """AUROC: how often a wrong answer is more uncertain than a right one; NaN if all are right or all are wrong."""
    from sklearn.metrics import roc_auc_score

    return float("nan") if correct.all() or not correct.any() else float(roc_auc_score(~correct, doubt))


def kept_accuracy(doubt: Float[np.ndarray, " query"], correct: Bool[np.ndarray, " query"], left_out: float) -> float:
    """Accuracy of the remaining answers when this share, the most uncertain, is left out.

    Answers that are equally uncertain at the threshold count with their mean accuracy: their order is arbitrary.
    """
    kept = max(1, len(doubt) - round(left_out * len(doubt)))
    edge = np.partition(doubt, kept - 1)[kept - 1]
    below, level = doubt < edge, doubt == edge
    return float((correct[below].sum() + (kept - below.sum()) * correct[level].mean()) / kept)


def reliability(answers: Answers) -> list[dict[str, float]]:
    """Number of answers, mean confidence and accuracy of each bin of confidence."""
    confidence, correct = answers.confidence[answers.present], answers.correct[answers.present]
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return [
        {"count": int(member.sum()), "confidence": float(confidence[member].mean(dtype=np.float64)),
         "accuracy": float(correct[member].mean())}
        for member in (bins == index for index in range(BINS)) if member.any()
    ]  # fmt: skip


def over_groups(function: Any, doubt: Float[np.ndarray, "task query"], answers: Answers) -> tuple[float, float]:
    """A statistic over all answers, and its 95 % interval from its values in groups of tasks."""

    def of(part: slice) -> float:
        present = answers.present[part]
        return function(doubt[part][present], answers.correct[part][present])

    count = len(answers.correct)
    edges = np.linspace(0, count, GROUPS + 1).astype(int)
    each = [of(slice(*ends)) for ends in itertools.pairwise(edges) if ends[1] > ends[0]]
    each = np.array([value for value in each if np.isfinite(value)])
    wider = float(stats.t.ppf(0.975, len(each) - 1)) / 1.96 if len(each) > 1 else float("nan")  # Student's t
    return of(slice(None)), wider * mean_and_interval(each)[1]


def describe_answers(answers: Answers) -> dict[str, Any]:
    """Accuracy, calibration, and how well uncertainty detects errors."""
    present = answers.present
    per_task = np.where(present, answers.correct, False).sum(1) / present.sum(1)
    accuracy, interval = mean_and_interval(per_task)
    table = reliability(answers)
    total = sum(row["count"] for row in table)
    result: dict[str, Any] = {
        "accuracy": accuracy,
        "accuracy_interval": interval,
        "answers": total,
        "mean_confidence": float(answers.confidence[present].mean(dtype=np.float64)),
        "calibration_error": sum(row["count"] * abs(row["accuracy"] - row["confidence"]) for row in table) / total,
        "reliability": table,
    }
    doubts = {"entropy": answers.entropy}
    if answers.disagreement is not None:
        doubts["disagreement"] = answers.disagreement
    for name, doubt in doubts.items():
        ranking = over_groups(error_ranking, doubt, answers)
        kept = over_groups(lambda doubt, correct: kept_accuracy(doubt, correct, LEFT_OUT), doubt, answers)
        result[name] = {
            "mean": mean_and_interval(doubt[present])[0],
            "mean_where_right": mean_and_interval(doubt[present & answers.correct])[0],
            "mean_where_wrong": mean_and_interval(doubt[present & ~answers.correct])[0],
            "error_ranking": ranking[0],
            "error_ranking_interval": ranking[1],
            "accuracy_without_least_certain_tenth": kept[0],
            "accuracy_without_least_certain_tenth_interval": kept[1],
        }
    return result


def accuracy_as_kept(answers: Answers, doubt: Float[np.ndarray, "task query"]) -> Float[np.ndarray, " share"]:
    """Accuracy of the remaining answers, for each share of `SHARES` that is left out."""
    flat, correct = doubt[answers.present], answers.correct[answers.present]
    return np.array([kept_accuracy(flat, correct, share) for share in SHARES])


# Functions


@dataclasses.dataclass(frozen=True)
class Functions:
    """For every point of every task of sines and lines: the error of the samples' mean, and their spread."""

    error: Float[np.ndarray, "task point"]
    """Squared error against the true function without noise."""
    spread: Float[np.ndarray, "task point"]
    """Standard deviation of the sampled functions."""
    coverage: Float[np.ndarray, "task level"]
    """Share of the task's noisy targets inside the interval of each level."""


def collect_functions(
    candidate: Candidate,
    suite: TaskSuite,
    split: str,
    seed: int,
    num_tasks: int,
    progress: Report = ignore_progress,
    *,
    samples: int,
) -> Functions:
    """Sample functions for each task, and compare them with the true function and the noisy targets."""

    def analyse_one(learner: Learner, drawn: tuple[Curve, Task], key: PRNGKeyArray) -> dict[str, Any]:
        curve, task = drawn
        x, y = task.query.inputs[:, 0], task.query.targets[:, 0]
        functions = Sampled(learner, samples).predict(curve, task.support, key, x)
        within = jax.vmap(lambda level: covered(functions, y, 1.0, level))(jnp.asarray(LEVELS, y.dtype))
        return {
            "error": (functions.mean(0) - curve(x)) ** 2,
            "spread": functions.std(0),
            "coverage": within.astype(y.dtype).mean(1),
        }

    tasks = suite.tasks(candidate, split)
    found = map_over_tasks(analyse_one, candidate.learner, tasks, seed, num_tasks, progress,
                 draw=lambda tasks, key: tasks.draw(key), at_once=10)  # fmt: skip
    return Functions(**found)


def describe_functions(functions: Functions) -> dict[str, Any]:
    """Error with and without the points of largest spread, and coverage by level."""
    from scipy.stats import spearmanr

    error, spread = functions.error.ravel().astype(np.float64), functions.spread.ravel()
    kept = np.argsort(spread, kind="stable")[: len(spread) - round(LEFT_OUT * len(spread))]
    sampled = spread.max() > 1e-6
    mse, interval = mean_and_interval(functions.error.mean(1))
    return {
        "mse": mse,
        "mse_interval": interval,
        "points": len(error),
        "mean_spread": float(spread.mean(dtype=np.float64)),
        "spread_and_error_rank_correlation": float(np.asarray(spearmanr(spread, error))[0]) if sampled else None,
        "mse_without_least_certain_tenth": float(error[kept].mean()) if sampled else None,
        "coverage": [
            {"level": round(float(level), 2), "coverage": float(share)}
            for level, share in zip(LEVELS, functions.coverage.mean(0, dtype=np.float64), strict=True)
        ],
    }
