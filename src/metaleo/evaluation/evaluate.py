"""Evaluation over many tasks: accuracy with its interval, negative log-likelihood and calibration error."""

import dataclasses
import functools
import math
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from metaleo._io.files import atomic_write, write_csv
from metaleo._jax.devices import AXIS, can_share, fits_on_device, jit, on_each_device, replicate
from metaleo.checkpoints import Candidate, find_model
from metaleo.data.feature_files import load_data
from metaleo.data.tables import is_table
from metaleo.engines import Engine, choose_engine
from metaleo.errors import BadInput, require_seed
from metaleo.learners.base import HyperParams, Learner
from metaleo.losses import accuracy, query_loss
from metaleo.nn.heads import Head
from metaleo.tasks import PROBLEMS
from metaleo.tasks.episodes import Episodes, Rows, as_they_are, place_rows
from metaleo.tasks.task import Batch, Task, Tasks, key_apart, normalise

FUNCTION_QUERY = 100
"""Query points of a test task of functions."""
BINS = 15
"""Bins of confidence for the calibration error."""
BLOCK = {"cpu": 1000, "gpu": 5000}
"""Tasks per compiled call."""
CHUNK_FLOATS = {"cpu": 2**19, "gpu": 2**26}
"""Feature values held at a time, whatever the number of tasks; on a CPU as many as its caches hold."""


class CalibrationCounts(eqx.Module):
    """Number of predictions, of correct ones, and summed confidence, per bin of confidence."""

    count: Float[Array | np.ndarray, "*task bin"]
    correct: Float[Array | np.ndarray, "*task bin"]
    confidence: Float[Array | np.ndarray, "*task bin"]


class Score(eqx.Module):
    """Result of one task, or of several along the leading axis."""

    accuracy: Float[Array | np.ndarray, "*task"]
    nll: Float[Array | np.ndarray, "*task"]
    calibration: CalibrationCounts
    calibrated_nll: Float[Array | np.ndarray, "*task"] | None = None
    """With the logits divided by the model's temperature, if it has one; so is `calibrated`."""
    calibrated: CalibrationCounts | None = None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results over all tasks; intervals are ± 1.96 standard errors over tasks (95 %).

    Attributes:
        accuracy: Share of query examples whose class is predicted, the mean over tasks.
        accuracy_interval: Its interval.
        nll: Mean negative log-likelihood, in nats, of the learner's own probabilities: before any temperature.
        nll_interval: Its interval.
        calibration_error: Expected calibration error of the same probabilities, over 15 bins of confidence.
        tasks: Number of tasks.
        temperature: What divides the logits in the fields below, as in all predictions; None if there is none.
        calibrated_nll: As `nll`, with the temperature.
        calibrated_nll_interval: Its interval.
        calibrated_error: As `calibration_error`, with the temperature.

    Examples:
        >>> from metaleo import Evaluation
        >>> Evaluation(0.6, 0.004, 1.0, 0.01, 0.02, tasks=10_000).accuracy
        0.6
    """

    accuracy: float
    accuracy_interval: float
    nll: float
    nll_interval: float
    calibration_error: float
    tasks: int
    temperature: float | None = None
    calibrated_nll: float | None = None
    calibrated_nll_interval: float | None = None
    calibrated_error: float | None = None


def count_calibration(probabilities: Float[Array, "example way"], query: Batch) -> CalibrationCounts:
    confidence = probabilities.max(-1)
    correct = probabilities.argmax(-1) == query.targets.argmax(-1)
    bins = jnp.minimum((confidence * BINS).astype(jnp.int32), BINS - 1)
    member = jax.nn.one_hot(bins, BINS, dtype=confidence.dtype) * query.mask[:, None].astype(confidence.dtype)
    return CalibrationCounts(member.sum(0), correct.astype(confidence.dtype) @ member, confidence @ member)


def score(head: Head, query: Batch, temperature: Float[Array, ""] | None = None) -> Score:
    """Score the adapted head of a task on its query set."""
    logits = jax.vmap(head)(query.inputs)

    def probabilistic(logits: Float[Array, "query way"]) -> tuple[Float[Array, ""], CalibrationCounts]:
        return query_loss(logits, query), count_calibration(jax.nn.softmax(logits), query)

    calibrated_nll, calibrated = (None, None) if temperature is None else probabilistic(logits / temperature)
    return Score(accuracy(logits, query), *probabilistic(logits), calibrated_nll, calibrated)


def score_tasks(
    learner: Learner,
    episodes: Episodes,
    key: PRNGKeyArray,
    indices: Int[Array, " task"],
    temperature: Float[Array, ""] | None = None,
    engine: Engine | None = None,
) -> Score:
    """Scores of the tasks with these indices; task i depends only on `fold_in(key, i)`, not on the other tasks.

    Learners adapt with means instead of samples, and without dropout.
    """
    engine = engine or choose_engine(learner)
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)
    rows = jax.vmap(episodes.sample_indices)(keys)  # for all tasks at once: these kernels are tiny

    def score_some(rows: PyTree) -> Score:
        tasks = jax.vmap(episodes.gather)(rows)
        return jax.vmap(score, (0, 0, None))(engine.adapt(learner, tasks.support), tasks.query, temperature)

    return in_chunks(score_some, rows, tasks_at_once(episodes))


def in_chunks(function: Callable[[PyTree], PyTree], batch: PyTree, size: int) -> PyTree:
    """Apply a function to a batch, `size` entries at a time."""
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
    """Apply a function to the tasks with these indices, each with its own key, at most `at_once` at a time."""

    def apply(index: Int[Array, ""]) -> PyTree:
        own = jax.random.fold_in(key, index)
        return function(draw(own), key_apart(own))

    return jax.lax.map(apply, indices, batch_size=min(at_once, len(indices)))


@functools.cache
def scorer(shared: bool, engine: Engine) -> Callable[..., Score]:
    """`score_tasks`, compiled; if `shared`, the devices split the tasks among them."""
    specs = Spec(), Spec(), Spec(), Spec(AXIS), Spec()
    score_own = functools.partial(score_tasks, engine=engine)
    return jit(on_each_device(score_own, specs, Spec(AXIS)) if shared else score_own)


def tasks_at_once(tasks: Tasks) -> int:
    return max(1, min(256, for_backend(CHUNK_FLOATS) // tasks.numbers))


def for_backend(numbers: dict[str, int]) -> int:
    return numbers["cpu" if jax.default_backend() == "cpu" else "gpu"]


def score_learner(
    learner: Learner,
    episodes: Episodes,
    seed: int,
    num_tasks: int,
    progress: Callable[[int], None] = lambda done: None,
    engine: Engine | None = None,
    temperature: float | None = None,
) -> Score:
    """Scores of `num_tasks` tasks, computed in blocks; `progress` is called with the number of tasks done."""
    shared = can_share(min(for_backend(BLOCK), num_tasks))
    divisor = None if temperature is None else jnp.float32(temperature)
    if shared:
        learner, episodes, divisor = replicate((learner, episodes, divisor))
    score_block = scorer(shared, engine or choose_engine(learner))
    return in_blocks(
        lambda indices: score_block(learner, episodes, task_key(seed), indices, divisor), num_tasks, progress
    )


def evaluate(
    learner: Learner, episodes: Episodes, tasks: int = 10_000, seed: int = 0, temperature: float | None = None
) -> Evaluation:
    """Test a learner on tasks: adapt to each support set, predict each query set.

    Args:
        learner: A meta-trained learner, or one that needs no training.
        episodes: The tasks, over classes that the learner was not trained on.
        tasks: Number of tasks.
        seed: Selects the tasks; the same seed gives every learner the same tasks.
        temperature: Divisor of the logits, for instance `load_model(run).temperature(shot)`, for the fields
            `calibrated_…` of the result.

    Returns:
        Accuracy and negative log-likelihood with their 95 % intervals, and the calibration error.

    Examples:
        >>> from metaleo import Episodes, NearestCentroid, evaluate, load_data
        >>> tasks = Episodes.over(load_data("sample").subset("test"), way=5, shot=1, query=None)
        >>> evaluate(NearestCentroid(), tasks, tasks=200).accuracy > 0.5
        True
    """
    return summarise(score_learner(learner, episodes, seed, tasks, temperature=temperature), temperature)


def task_key(seed: int) -> PRNGKeyArray:
    """Key of the test tasks, distinct from the keys that a training run with this seed uses."""
    require_seed(seed)
    return jax.random.fold_in(jax.random.key(seed), 2)


def in_blocks(
    function: Callable[[Int[Array, " task"]], PyTree],
    num_tasks: int,
    progress: Callable[[int], None] = lambda done: None,
    block: int | None = None,
) -> PyTree:
    """Apply a function to task indices in blocks of equal size, and collect the results on the host."""
    block = min(block or for_backend(BLOCK), num_tasks)
    blocks = []
    for first in range(0, num_tasks, block):
        values = function(jnp.arange(first, first + block))
        blocks.append(jax.tree.map(lambda leaf, n=num_tasks - first: np.asarray(leaf)[:n], values))
        progress(min(first + block, num_tasks))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *blocks)


def mean_validation_score(
    learner: Learner, tasks: Tasks, key: PRNGKeyArray, indices: Int[Array, " task"], engine: Engine | None = None
) -> Float[Array, ""]:
    """Validation score, to be maximised: accuracy, or without classes minus the query loss of sampled solutions."""
    if isinstance(tasks, Episodes):
        return score_tasks(learner, tasks, key, indices, engine=engine).accuracy.mean()

    def validation_score(task: Task, key: PRNGKeyArray) -> Float[Array, ""]:
        return -learner.meta_loss(task, HyperParams(keep_prob=1.0), key)[1]["query_loss"]

    return map_tasks(validation_score, tasks.sample, key, indices, tasks_at_once(tasks)).mean()


def mean_and_interval(values: Float[Array | np.ndarray, " task"]) -> tuple[float, float]:
    """The mean over tasks, and 1.96 times its standard error."""
    values64 = np.asarray(values, np.float64)
    if not len(values64):
        return math.nan, math.nan
    deviation = float(values64.std(ddof=1)) if len(values64) > 1 else math.nan
    return float(values64.mean()), 1.96 * deviation / math.sqrt(len(values64))


def summarise(scores: Score, temperature: float | None = None) -> Evaluation:
    """Means over tasks, on the host in float64."""
    found = Evaluation(
        *mean_and_interval(scores.accuracy),
        *mean_and_interval(scores.nll),
        calibration_error=mean_calibration_error(scores.calibration),
        tasks=len(scores.accuracy),
    )
    if scores.calibrated_nll is None or scores.calibrated is None:
        return found
    nll, interval = mean_and_interval(scores.calibrated_nll)
    return dataclasses.replace(
        found,
        temperature=temperature,
        calibrated_nll=nll,
        calibrated_nll_interval=interval,
        calibrated_error=mean_calibration_error(scores.calibrated),
    )


def mean_calibration_error(counts: CalibrationCounts) -> float:
    """Expected calibration error over the predictions of all tasks."""
    count, correct, confidence = (
        np.asarray(part, np.float64).sum(0) for part in (counts.count, counts.correct, counts.confidence)
    )
    return float(np.abs(correct - confidence).sum() / count.sum())


def write_scores(path: Path, scores: dict[str, Score]) -> None:
    """Write one CSV row per model and task."""
    rows = (
        (name, task, *numbers)
        for name, own in scores.items()
        for task, numbers in enumerate(zip(own.accuracy, own.nll, strict=True))
    )
    write_csv(path, ("model", "task", "accuracy", "nll"), rows)


def save_score(path: Path, score: Score, seed: int) -> None:
    """Save all that `summarise` needs, with the seed and the number of tasks."""
    parts = dict(vars(score.calibration))
    if score.calibrated is not None:
        calibrated = {f"calibrated_{name}": part for name, part in vars(score.calibrated).items()}
        parts |= {"calibrated_nll": score.calibrated_nll, **calibrated}
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, accuracy=score.accuracy, nll=score.nll, seed=seed, tasks=len(score.accuracy),
                            **parts)  # fmt: skip


def load_score(path: Path, seed: int, tasks: int) -> Score | None:
    """The saved scores, or None if there are none for this seed and number of tasks."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
            if (int(held["seed"]), int(held["tasks"])) != (seed, tasks):
                return None
            counts = ("count", "correct", "confidence")
            score = Score(held["accuracy"], held["nll"], CalibrationCounts(*(held[name] for name in counts)))
            if "calibrated_nll" not in held:
                return score
            calibrated = CalibrationCounts(*(held[f"calibrated_{name}"] for name in counts))
            return dataclasses.replace(score, calibrated_nll=held["calibrated_nll"], calibrated=calibrated)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def paired_difference(
    ours: Float[Array | np.ndarray, " task"], theirs: Float[Array | np.ndarray, " task"]
) -> tuple[float, float]:
    """Mean of `ours` - `theirs` over the same tasks, and 1.96 times its standard error; task difficulty cancels."""
    differences = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    return float(differences.mean()), float(1.96 * differences.std(ddof=1) / math.sqrt(len(differences)))


BASELINES = ("nearest-centroid", "logistic-regression")
BASELINE_TASKS = 500
"""Tasks on which they are tested at most: logistic regression takes much longer than what is meta-trained."""
MOST_NUMBERS = 20_000
"""Numbers per example, at most, for them: images as they are have more."""


class TaskSuite:
    """The tasks on which models are tested, the same for every model.

    Data (or problem), way and shot default to those that the models were trained with. A table is read as in training:
    with the same column of labels, and the same columns left out.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        data: str | None = None,
        way: int | None = None,
        shot: int | None = None,
    ):
        asked = {"data": data, "way": way, "shot": shot}
        if len({one.model.setting("data") if one.model.setting("data") in PROBLEMS else "" for one in candidates}) > 1:
            raise BadInput("models of different problems cannot be tested on the same tasks")
        first = candidates[0].model
        self.problem = first.setting("data") if first.setting("data") in PROBLEMS else None
        for name, value in asked.items():
            if value is None and len({one.model.setting(name) for one in candidates}) > 1:
                raise BadInput(f"the runs were trained with different {name}; say with which to test (`{name}=`)")
            if value is not None and name != "shot":
                self.refuse_for_problem(name)
        self.data = data or first.setting("data")
        self.way = first.setting("way") if way is None else way
        self.shot = first.setting("shot") if shot is None else shot
        self.metaset = None if self.problem else load_data(self.data, *self.columns(candidates))
        self._rows: dict[Any, Rows] = {}

    def columns(self, candidates: Sequence[Candidate]) -> tuple[str | None, tuple[str, ...]]:
        """The column of labels and the ignored ones of a table, as the models were trained; else nothing."""
        if not is_table(Path(self.data)):
            return None, ()
        configs = [one.model.header.get("config", {}) for one in candidates]
        found = {(own.get("label"), tuple(own.get("ignore", ()))) for own in configs}
        if len(found) > 1:
            raise BadInput("the runs were trained on different columns (`label=`, `ignore=`); test them one by one")
        return found.pop()

    def refuse_for_problem(self, argument: str) -> None:
        if self.problem:
            raise BadInput(f"`{argument}=` means nothing to {self.problem}")

    def refuse_trained(self, candidate: Candidate, split: str) -> None:
        """Raise `BadInput` if the model was trained on classes of this split, also if the file has changed since."""
        assert self.metaset is not None
        trained = set(candidate.model.header.get("classes", ())) & set(self.metaset.subset(split).class_names)
        if trained and self.data == candidate.model.setting("data"):
            raise BadInput(
                f"{candidate.path} was trained on class {min(trained)} of {self.data}"
                + ("" if "train" in split else ": its classes have been split in another way since")
            )

    def baselines(self) -> list[Candidate]:
        """What needs no training, to stand beside the models: nothing if tasks are not of vectors with classes."""
        if self.metaset is None or self.metaset.dim > MOST_NUMBERS:
            return []
        return [Candidate(name, Path(name), Path(name), find_model(name, self.metaset.dim)) for name in BASELINES]

    @property
    def kind(self) -> str:
        """The kind of task, in words."""
        return f"{self.shot}-shot {self.problem}" if self.problem else f"{self.way}-way {self.shot}-shot"

    def tasks(self, candidate: Candidate, split: str = "test", query: int | None = None) -> Tasks:
        """Tasks in the form that this model takes, with `query` examples per class, by default all remaining ones."""
        if self.metaset is None:
            return PROBLEMS[self.data](self.shot, FUNCTION_QUERY if query is None else query)
        structure, path = candidate.model.structure, candidate.path
        if self.metaset.dim != structure.dim:
            raise BadInput(
                f"{self.data} has {self.metaset.dim} numbers per example, but {path} was trained on {structure.dim}"
            )
        if structure.codes == "task" and self.way != structure.way:
            raise BadInput(f"{path} has one code for all {structure.way} classes; way={self.way} is not possible")
        if "test" in split:
            self.refuse_trained(candidate, split)
        prepare = candidate.model.prepare
        key = prepare if prepare is normalise or prepare is as_they_are else candidate.path
        if key not in self._rows:
            on_device = fits_on_device(self.metaset.features.size)
            self._rows = {key: place_rows(self.metaset, on_device, prepare)}  # one copy at a time
        return Episodes.over(self.metaset.subset(split), self.way, self.shot, query, self._rows[key])
