"""Evaluation of sampled functions: error of their mean, likelihood, CRPS, coverage of intervals, ambiguous tasks.

A learner samples S solutions of a task. The predictive distribution is these S functions plus observation noise.
Definitions are in docs/results-functions.md.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from metaleo._io.files import write_csv
from metaleo._io.progress import SILENT, Progress
from metaleo.checkpoints import TrainedModel
from metaleo.evaluation.evaluate import FUNCTION_QUERY, in_blocks, map_tasks, mean_and_interval, task_key
from metaleo.learners.base import Learner
from metaleo.tasks.sines_and_lines import (
    DOMAIN,
    NOISE,
    Curve,
    SinesAndLines,
    bases,
    candidates,
    find_ambiguous,
    fit,
    looks_like_a_sine,
    posterior,
)
from metaleo.tasks.task import Batch, Task, key_apart

LEVEL = 0.9
"""Level of the predictive intervals."""
SCALES = np.geomspace(0.25, 8, 31)
"""Factors on the spread of samples between which calibration interpolates."""
CALIBRATION_TASKS = 1000
AT_ONCE = 20
"""Tasks in memory at a time: each holds some hundred samples of all parameters."""
AMBIGUOUS_TASKS = 200
BOTH = 0.1
"""Minimum share of samples in each family for an ambiguous task to count as having both."""
PAIRS = 4
"""Number of other samples with which each sample is compared for the CRPS."""


class Predictor(eqx.Module):
    """Predicts a task by a set of functions, evaluated at the points x."""

    @abc.abstractmethod
    def predict(
        self, curve: Curve, support: Batch, key: PRNGKeyArray, x: Float[Array, " point"]
    ) -> Float[Array, "sample point"]:
        """Predicted functions at x; only a reference such as `Oracle` may use the true `curve`."""


class Sampled(Predictor):
    """Solutions of a learner, sampled as in training, each adapted separately to the support set."""

    learner: Learner
    samples: int = eqx.field(static=True)

    def predict(
        self, curve: Curve, support: Batch, key: PRNGKeyArray, x: Float[Array, " point"]
    ) -> Float[Array, "sample point"]:
        def one(key: PRNGKeyArray) -> Float[Array, " point"]:
            return jax.vmap(self.learner.adapt(support, None, key).head)(x[:, None])[:, 0]

        return jax.vmap(one)(jax.random.split(key, self.samples))


class Oracle(Predictor):
    """Knows whether the task is a sine or a line, and fits that family by least squares."""

    def predict(
        self, curve: Curve, support: Batch, key: PRNGKeyArray, x: Float[Array, " point"]
    ) -> Float[Array, "sample point"]:
        coefficients, _ = fit(support.inputs[:, 0], support.targets[:, 0])
        sine, line = jnp.einsum("fpc,fc->fp", bases(x), coefficients)
        return jnp.where(curve.is_sine, sine, line)[None, :]


class Bayes(Predictor):
    """Functions drawn from the exact posterior: the best that any learner can do."""

    samples: int = eqx.field(static=True)

    def predict(
        self, curve: Curve, support: Batch, key: PRNGKeyArray, x: Float[Array, " point"]
    ) -> Float[Array, "sample point"]:
        return candidates(support).draw(key, self.samples, x)


class FunctionScore(eqx.Module):
    """Result of one task, or of several along the leading axis."""

    is_sine: Bool[Array | np.ndarray, "*task"]
    mse: Float[Array | np.ndarray, "*task"]
    nll: Float[Array | np.ndarray, "*task"]
    crps: Float[Array | np.ndarray, "*task"]
    coverage: Float[Array | np.ndarray, "*task"]
    """Share of noisy targets inside the interval, with the spread unscaled."""
    calibrated: Float[Array | np.ndarray, "*task"]
    """The same with the spread scaled by the calibrated factor."""
    spread: Float[Array | np.ndarray, "*task"]
    """Standard deviation of the samples, averaged over points."""
    rank_correlation: Float[Array | np.ndarray, "*task"]
    """Spearman correlation of a point's spread with its distance from the nearest support point; 0 without spread."""


@dataclasses.dataclass(frozen=True)
class FunctionReport:
    """Results over tasks; intervals are ± 1.96 standard errors over tasks (95 %)."""

    mse: float
    mse_interval: float
    sine_mse: float
    sine_mse_interval: float
    line_mse: float
    line_mse_interval: float
    median_mse: float
    nll: float
    nll_interval: float
    crps: float
    crps_interval: float
    coverage: float
    calibrated_coverage: float
    calibrated_coverage_interval: float
    spread: float
    rank_correlation: float
    scale: float
    tasks: int


def spearman(a: Float[Array, " point"], b: Float[Array, " point"]) -> Float[Array, ""]:
    """Spearman's rank correlation."""
    ranks = [jnp.argsort(jnp.argsort(values)).astype(values.dtype) for values in (a, b)]
    first, second = (rank - rank.mean() for rank in ranks)
    return jnp.sum(first * second) / jnp.sqrt(jnp.sum(first**2) * jnp.sum(second**2))


def mean_distance(offset: Float[Array, "..."], deviation: float) -> Float[Array, "..."]:
    """E|Z| for Z ~ N(offset, deviation²)."""
    ratio = offset / deviation
    return 2 * deviation * jax.scipy.stats.norm.pdf(ratio) + offset * (2 * jax.scipy.stats.norm.cdf(ratio) - 1)


def mixture_crps(functions: Float[Array, "sample point"], y: Float[Array, " point"]) -> Float[Array, " point"]:
    """CRPS, E|Y - y| - E|Y - Y′|/2, of the mixture of N(f_s(x), noise²) over samples.

    Y′ comes from another sample, one of the next few, so the expectation is that of infinitely many samples.
    """
    apart = [functions - jnp.roll(functions, shift, axis=0) for shift in range(1, 1 + min(PAIRS, len(functions) - 1))]
    pairs = jnp.stack(apart or [jnp.zeros_like(functions)])
    between = mean_distance(pairs, math.sqrt(2) * NOISE).mean((0, 1))
    return mean_distance(functions - y[None, :], NOISE).mean(0) - between / 2


def covered(
    functions: Float[Array, "sample point"],
    y: Float[Array, " point"],
    scale: Float[Array, ""] | float,
    level: Float[Array, ""] | float = LEVEL,
) -> Bool[Array, " point"]:
    """Whether each target lies inside the central interval of the mixture; `scale` stretches the spread of samples."""
    centre = functions.mean(0, keepdims=True)
    below = jax.scipy.stats.norm.cdf((y[None, :] - centre - scale * (functions - centre)) / NOISE).mean(0)
    return jnp.abs(below - 0.5) <= level / 2


def score_task(
    predictor: Predictor, curve: Curve, task: Task, key: PRNGKeyArray, scale: Float[Array, ""]
) -> FunctionScore:
    x, y = task.query.inputs[:, 0], task.query.targets[:, 0]
    functions = predictor.predict(curve, task.support, key, x)
    density = -(((y[None, :] - functions) / NOISE) ** 2) / 2 - math.log(NOISE * math.sqrt(2 * math.pi))
    distance = jnp.abs(x[:, None] - task.support.inputs[None, :, 0]).min(1)
    spread = functions.std(0)
    return FunctionScore(
        curve.is_sine,
        jnp.mean((functions.mean(0) - curve(x)) ** 2),
        jnp.mean(math.log(len(functions)) - jax.nn.logsumexp(density, axis=0)),
        jnp.mean(mixture_crps(functions, y)),
        jnp.mean(covered(functions, y, 1.0).astype(x.dtype)),
        jnp.mean(covered(functions, y, scale).astype(x.dtype)),
        jnp.mean(spread),
        jnp.where(spread.max() > 1e-6, spearman(spread, distance), 0.0),
    )


def over_tasks(
    function: Callable[[Curve, Task, PRNGKeyArray], PyTree], shot: int, key: PRNGKeyArray, indices: Int[Array, " task"]
) -> PyTree:
    """Apply a function to the test tasks with these indices, and to the curves that they were drawn from."""
    draw = SinesAndLines(shot, FUNCTION_QUERY).draw
    return map_tasks(lambda drawn, own: function(drawn[0], drawn[1], own), draw, key, indices, AT_ONCE)


@functools.partial(jax.jit, static_argnums=2)
def score_block(
    predictor: Predictor, scale: Float[Array, ""], shot: int, key: PRNGKeyArray, indices: Int[Array, " task"]
) -> FunctionScore:
    return over_tasks(lambda curve, task, own: score_task(predictor, curve, task, own, scale), shot, key, indices)


@functools.partial(jax.jit, static_argnums=1)
def coverages(
    predictor: Predictor, shot: int, key: PRNGKeyArray, indices: Int[Array, " task"]
) -> tuple[Float[Array, "task scale"], Float[Array, " task"]]:
    """Coverage of each task for each factor of `SCALES`, and its largest spread."""

    def one(curve: Curve, task: Task, own: PRNGKeyArray) -> tuple[Float[Array, " scale"], Float[Array, ""]]:
        x, y = task.query.inputs[:, 0], task.query.targets[:, 0]
        functions = predictor.predict(curve, task.support, own, x)
        scales = jnp.asarray(SCALES, y.dtype)
        shares = jax.lax.map(lambda scale: covered(functions, y, scale).astype(y.dtype).mean(), scales)
        return shares, functions.std(0).max()

    return over_tasks(one, shot, key, indices)


def calibrate_scale(predictor: Predictor, shot: int, seed: int, num_tasks: int = CALIBRATION_TASKS) -> float:
    """The factor on the spread with which intervals reach their nominal coverage on validation (not test) tasks."""
    key = jax.random.fold_in(jax.random.key(seed), 3)
    curves, spreads = coverages(predictor, shot, key, jnp.arange(num_tasks))
    if np.max(spreads) < 1e-6:  # nothing to scale
        return 1.0
    curve = np.asarray(curves, np.float64).mean(0)
    return float(np.exp(np.interp(LEVEL, np.maximum.accumulate(curve), np.log(SCALES))))


def evaluate_functions(
    predictor: Predictor,
    shot: int,
    seed: int,
    num_tasks: int,
    scale: float = 1.0,
    progress: Callable[[int], None] = lambda done: None,
) -> FunctionScore:
    """Scores of `num_tasks` test tasks, computed in blocks; `progress` is called with the number of tasks done."""
    key = task_key(seed)
    return in_blocks(
        lambda indices: score_block(predictor, jnp.float32(scale), shot, key, indices), num_tasks, progress
    )


def summarise_functions(scores: FunctionScore, scale: float) -> FunctionReport:
    """Means over tasks, on the host in float64; NaN for a family without tasks."""
    sine = np.asarray(scores.is_sine)
    mse = np.asarray(scores.mse, np.float64)
    return FunctionReport(
        *mean_and_interval(mse),
        *mean_and_interval(mse[sine]),
        *mean_and_interval(mse[~sine]),
        float(np.median(mse)),
        *mean_and_interval(scores.nll),
        *mean_and_interval(scores.crps),
        float(np.mean(scores.coverage, dtype=np.float64)),
        *mean_and_interval(scores.calibrated),
        float(np.mean(scores.spread, dtype=np.float64)),
        float(np.mean(scores.rank_correlation, dtype=np.float64)),
        scale=scale,
        tasks=len(mse),
    )


# Ambiguous tasks


@dataclasses.dataclass(frozen=True)
class Ambiguity:
    """Families of the samples on tasks where a sine and a line both explain the points."""

    sine_shares: list[float]
    """Per task, the share of samples nearer to a sine than to a line."""
    posteriors: list[float]
    """Per task, the exact posterior probability of a sine."""

    @property
    def both(self) -> float:
        """Share of tasks with samples in both families; NaN if there are no tasks."""
        if not self.sine_shares:
            return math.nan
        shares = np.array(self.sine_shares)
        return float(np.mean((shares >= BOTH) & (shares <= 1 - BOTH)))


def ambiguous_tasks(shot: int, seed: int, num_tasks: int = AMBIGUOUS_TASKS) -> list[PRNGKeyArray]:
    """Keys of the first ambiguous tasks of a separate stream; with many shots there are hardly any."""
    return find_ambiguous(SinesAndLines(shot, 1), jax.random.fold_in(jax.random.key(seed), 4), num_tasks)


def examine_ambiguous(predictor: Predictor, shot: int, keys: list[PRNGKeyArray]) -> Ambiguity:
    """Families that a predictor samples on these ambiguous tasks."""
    if not keys:
        return Ambiguity([], [])
    found = shares_of_sines(predictor, jnp.stack(keys), shot)
    return Ambiguity(*(np.asarray(values, np.float64).round(4).tolist() for values in found))


@functools.partial(jax.jit, static_argnums=2)
def shares_of_sines(
    predictor: Predictor, keys: Key[Array, " task"], shot: int
) -> tuple[Float[Array, " task"], Float[Array, " task"]]:
    """Per task, the share of sines among the predicted functions and their probability in the exact posterior."""
    tasks = SinesAndLines(shot, 1)
    x = jnp.linspace(*DOMAIN, 101)

    def one(key: PRNGKeyArray) -> tuple[Float[Array, ""], Float[Array, ""]]:
        curve, task = tasks.draw(key)
        functions = predictor.predict(curve, task.support, key_apart(key), x)
        sines = jax.vmap(looks_like_a_sine, (None, 0))(x, functions)
        return sines.astype(x.dtype).mean(), posterior(task.support).sine

    return jax.lax.map(one, keys, batch_size=AT_ONCE)


def evaluate_function_models(
    models: dict[str, TrainedModel],
    shot: int,
    seed: int,
    tasks: int,
    samples: int,
    progress: Progress = SILENT,
) -> tuple[dict[str, dict[str, Any]], dict[str, FunctionScore]]:
    """Results of each model and reference predictor on the same tasks, and the scores behind them."""
    predictors: dict[str, Predictor] = {name: Sampled(model.learner, samples) for name, model in models.items()}
    predictors |= {"oracle": Oracle(), "exact posterior": Bayes(samples)}
    ambiguous = ambiguous_tasks(shot, seed)
    results, all_scores = {}, {}
    for name, predictor in predictors.items():
        sampled = not isinstance(predictor, Oracle)
        with progress.bar(name, tasks, "calibrating …" if sampled else "") as bar:
            scale = calibrate_scale(predictor, shot, seed) if sampled else 1.0
            bar(note="")
            scores = evaluate_functions(predictor, shot, seed, tasks, scale, bar)
            results[name] = vars(summarise_functions(scores, scale))
            all_scores[name] = scores
            if sampled:
                bar(note="ambiguous tasks …")
                found = examine_ambiguous(predictor, shot, ambiguous)
                results[name] |= {"both_families": found.both, "sine_shares": found.sine_shares,
                                  "sine_posteriors": found.posteriors}  # fmt: skip
                bar(note="")
    return results, all_scores


def write_function_scores(path: Path, scores: dict[str, FunctionScore]) -> None:
    """Write one CSV row per model and task."""
    rows = (
        (name, task, "sine" if is_sine else "line", *numbers)
        for name, own in scores.items()
        for task, (is_sine, *numbers) in enumerate(
            zip(own.is_sine, own.mse, own.nll, own.crps, own.coverage, own.calibrated, strict=True)
        )
    )
    write_csv(path, ("model", "task", "family", "mse", "nll", "crps", "coverage", "calibrated_coverage"), rows)
