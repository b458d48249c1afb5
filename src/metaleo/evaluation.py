"""How good a learner is: accuracy with its interval, negative log-likelihood and calibration, over many tasks."""

import csv
import dataclasses
import functools
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from metaleo.compiling import compiled
from metaleo.devices import AXIS, can_share, everywhere, on_each
from metaleo.engines import Engine, choose
from metaleo.files import replacing
from metaleo.learners.learner import Hyper, Learner
from metaleo.losses import accuracy, query_loss
from metaleo.model.heads import Head
from metaleo.tasks.episodes import Episodes
from metaleo.tasks.task import Batch, Task, Tasks, key_apart

BINS = 15
"""Bins of confidence for the calibration error."""
BLOCK = {"cpu": 1000, "gpu": 5000}
"""Tasks per compiled call."""
CHUNK_FLOATS = {"cpu": 2**19, "gpu": 2**26}
"""Numbers of features held at a time, however many tasks there are: on a CPU as many as its caches hold."""


class Calibration(eqx.Module):
    """Counts, correct answers and summed confidence of predictions, by bin of confidence."""

    count: Float[Array | np.ndarray, "*task bin"]
    correct: Float[Array | np.ndarray, "*task bin"]
    confidence: Float[Array | np.ndarray, "*task bin"]


class Score(eqx.Module):
    """One task's result."""

    accuracy: Float[Array | np.ndarray, "*task"]
    nll: Float[Array | np.ndarray, "*task"]
    calibration: Calibration


@dataclasses.dataclass(frozen=True)
class Report:
    """Results over all tasks; intervals are ± 1.96 standard errors over tasks (95 %)."""

    accuracy: float
    accuracy_interval: float
    nll: float
    nll_interval: float
    calibration_error: float
    tasks: int


def calibrate(probabilities: Float[Array, "example way"], query: Batch) -> Calibration:
    confidence = probabilities.max(-1)
    correct = probabilities.argmax(-1) == query.targets.argmax(-1)
    bins = jnp.minimum((confidence * BINS).astype(jnp.int32), BINS - 1)
    member = jax.nn.one_hot(bins, BINS, dtype=confidence.dtype) * query.mask[:, None].astype(confidence.dtype)
    return Calibration(member.sum(0), correct.astype(confidence.dtype) @ member, confidence @ member)


def score(head: Head, query: Batch) -> Score:
    """What the head of a task says of its query set."""
    logits = jax.vmap(head)(query.inputs)
    return Score(accuracy(logits, query), query_loss(logits, query), calibrate(jax.nn.softmax(logits), query))


def score_tasks(
    learner: Learner,
    episodes: Episodes,
    key: PRNGKeyArray,
    indices: Int[Array, " task"],
    engine: Engine | None = None,
) -> Score:
    """Scores of the tasks of these numbers; task i is `fold_in(key, i)`, whatever tasks are beside it.

    Learners adapt with means and without dropout.
    """
    engine = engine or choose(learner)
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)
    picks = jax.vmap(episodes.pick)(keys)  # of all tasks first: these steps are tiny

    def score_some(picks: PyTree) -> Score:
        tasks = jax.vmap(episodes.fetch)(picks)
        return jax.vmap(score)(engine.adapt(learner, tasks.support), tasks.query)

    return in_chunks(score_some, picks, tasks_at_once(episodes))


def in_chunks(function: Callable[[PyTree], PyTree], batch: PyTree, size: int) -> PyTree:
    """A function of a batch, so many of its entries at a time."""
    total = len(jax.tree.leaves(batch)[0])
    whole = total // size * size
    chunks = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, size, *leaf.shape[1:]), batch)
    results = []
    if whole:
        results.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), jax.lax.map(function, chunks)))
    if whole < total:
        results.append(function(jax.tree.map(lambda leaf: leaf[whole:], batch)))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *results)


def map_tasks(
    function: Callable[[Any, PRNGKeyArray], PyTree],
    draw: Callable[[PRNGKeyArray], Any],
    key: PRNGKeyArray,
    indices: Int[Array, " task"],
    at_once: int,
) -> PyTree:
    """A function of the tasks of these numbers, each with a key of its own, a bounded number of them at a time."""

    def apply(index: Int[Array, ""]) -> PyTree:
        own = jax.random.fold_in(key, index)
        return function(draw(own), key_apart(own))

    return jax.lax.map(apply, indices, batch_size=min(at_once, len(indices)))


@functools.cache
def scorer(shared: bool, engine: Engine) -> Callable[..., Score]:
    """`score_tasks`, compiled; the tasks may be shared out among the devices."""
    specs = Spec(), Spec(), Spec(), Spec(AXIS)
    score_own = functools.partial(score_tasks, engine=engine)
    return compiled(on_each(score_own, specs, Spec(AXIS)) if shared else score_own)


def tasks_at_once(tasks: Tasks) -> int:
    return max(1, min(256, for_this(CHUNK_FLOATS) // tasks.numbers))


def for_this(numbers: dict[str, int]) -> int:
    return numbers["cpu" if jax.default_backend() == "cpu" else "gpu"]


def evaluate(
    learner: Learner,
    episodes: Episodes,
    seed: int,
    num_tasks: int,
    progress: Callable[[int], None] = lambda done: None,
    engine: Engine | None = None,
) -> Score:
    """Scores of `num_tasks` tasks, a block of them at a time; `progress` hears how many are done."""
    shared = can_share(min(for_this(BLOCK), num_tasks))
    if shared:
        learner, episodes = everywhere((learner, episodes))
    score_block = scorer(shared, engine or choose(learner))
    return in_blocks(lambda indices: score_block(learner, episodes, task_key(seed), indices), num_tasks, progress)


def task_key(seed: int) -> PRNGKeyArray:
    """Of the tasks that models are tested on: apart from the keys that a run of this seed trains with."""
    return jax.random.fold_in(jax.random.key(seed), 2)


def in_blocks(
    function: Callable[[Int[Array, " task"]], PyTree],
    num_tasks: int,
    progress: Callable[[int], None] = lambda done: None,
    block: int | None = None,
) -> PyTree:
    """What a function makes of the numbers of tasks, a block of one size at a time, all on the host in the end."""
    block = min(block or for_this(BLOCK), num_tasks)
    blocks = []
    for first in range(0, num_tasks, block):
        values = function(jnp.arange(first, first + block))
        blocks.append(jax.tree.map(lambda leaf, n=num_tasks - first: np.asarray(leaf)[:n], values))
        progress(min(first + block, num_tasks))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *blocks)


def mean_merit(
    learner: Learner, tasks: Tasks, key: PRNGKeyArray, indices: Int[Array, " task"], engine: Engine | None = None
) -> Float[Array, ""]:
    """What validation is to raise: accuracy, or without classes minus the query loss of sampled solutions."""
    if isinstance(tasks, Episodes):
        return score_tasks(learner, tasks, key, indices, engine).accuracy.mean()

    def merit(task: Task, key: PRNGKeyArray) -> Float[Array, ""]:
        return -learner.meta_loss(task, Hyper(keep=1.0), key)[1]["query_loss"]

    return map_tasks(merit, tasks.sample, key, indices, tasks_at_once(tasks)).mean()


def mean_and_interval(values: Float[Array | np.ndarray, " task"]) -> tuple[float, float]:
    """The mean over tasks, and 1.96 of its standard errors."""
    values64 = np.asarray(values, np.float64)
    if not len(values64):
        return math.nan, math.nan
    deviation = float(values64.std(ddof=1)) if len(values64) > 1 else math.nan
    return float(values64.mean()), 1.96 * deviation / math.sqrt(len(values64))


def summarise(scores: Score) -> Report:
    """Means over tasks, on the host in float64."""
    count, correct, confidence = (
        np.asarray(part, np.float64).sum(0)
        for part in (scores.calibration.count, scores.calibration.correct, scores.calibration.confidence)
    )
    return Report(
        *mean_and_interval(scores.accuracy),
        *mean_and_interval(scores.nll),
        calibration_error=float(np.abs(correct - confidence).sum() / count.sum()),
        tasks=len(scores.accuracy),
    )


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file; numbers that are not whole have six digits."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([f"{cell:.6f}" if isinstance(cell, np.floating) else cell for cell in row] for row in rows)


def write_scores(path: Path, scores: dict[str, Score]) -> None:
    """A row per model and task."""
    rows = (
        (name, task, *numbers)
        for name, own in scores.items()
        for task, numbers in enumerate(zip(own.accuracy, own.nll, strict=True))
    )
    write_rows(path, ("model", "task", "accuracy", "nll"), rows)


def save_score(path: Path, score: Score, seed: int) -> None:
    """All that `summarise` needs, and which tasks they were."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, accuracy=score.accuracy, nll=score.nll, seed=seed, tasks=len(score.accuracy),
                            **vars(score.calibration))  # fmt: skip


def load_score(path: Path, seed: int, tasks: int) -> Score | None:
    """The scores of these tasks, if they are there."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
            if (int(held["seed"]), int(held["tasks"])) != (seed, tasks):
                return None
            calibration = Calibration(held["count"], held["correct"], held["confidence"])
            return Score(held["accuracy"], held["nll"], calibration)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
