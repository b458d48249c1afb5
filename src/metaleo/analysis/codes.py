"""Codes before and after adaptation: do they come to stand apart by class (Section 4.5, Figure 4)?"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from metaleo.analysis.paths import (
    Labelled,
    Report,
    code_path,
    draw_labelled,
    ignore_progress,
    inner_learner,
    map_over_tasks,
    unwrap_joint,
)
from metaleo.checkpoints import Candidate
from metaleo.data.class_names import readable_name
from metaleo.errors import BadInput
from metaleo.evaluation.evaluate import TaskSuite, mean_and_interval
from metaleo.learners import LEO, Learner
from metaleo.tasks import PROBLEMS

NEIGHBOURS = 10
FEWEST_TASKS = 20
FAMILIES = ("line", "sine")
PERPLEXITY = 30.0


@dataclasses.dataclass(frozen=True)
class Codes:
    """The codes of many tasks, at each point of their way, and what each stands for."""

    paths: Float[np.ndarray, "code point latent"]
    labels: Int[np.ndarray, " code"]
    rows: Int[np.ndarray, "code shot"]
    """Of the examples that each code was made of."""
    names: tuple[str, ...]
    """Of the labels."""

    @property
    def before(self) -> Float[np.ndarray, "code latent"]:
        return self.paths[:, 0]

    @property
    def after(self) -> Float[np.ndarray, "code latent"]:
        return self.paths[:, -1]


def check_codes(candidate: Candidate, num_tasks: int) -> None:
    """Refuse what has no codes, or none that move."""
    if num_tasks < FEWEST_TASKS:
        raise BadInput(f"tasks={num_tasks} must be at least {FEWEST_TASKS}: codes are compared with each other")
    learner = inner_learner(candidate.learner)
    if not isinstance(learner, LEO):
        raise BadInput(
            f"{candidate.path} is a model of {candidate.config.structure.learner}, which has no codes; LEO has"
        )
    if not learner.latent_steps:
        raise BadInput(f"{candidate.path} takes no steps on its codes: there is no before and after")
    if candidate.config.data not in PROBLEMS and not learner.network.per_class:
        raise BadInput(f"{candidate.path} has one code for all classes of a task: it stands for none of them")
    if len(learner.latent_step_size) < 2:
        raise BadInput(f"codes of {candidate.path} are single numbers: there is nothing to project")


def collect_codes(
    candidate: Candidate, suite: TaskSuite, split: str, seed: int, num_tasks: int, progress: Report = ignore_progress
) -> Codes:
    """Codes of these tasks, with means and without dropout."""
    check_codes(candidate, num_tasks)
    tasks = suite.tasks(candidate, split)

    def analyse_one(learner: Learner, drawn: Labelled, _: PRNGKeyArray) -> Any:
        inner, support = unwrap_joint(learner, drawn.support)
        return jnp.moveaxis(code_path(inner, support), 0, 1), drawn.labels, drawn.rows

    paths, labels, rows = map_over_tasks(
        analyse_one, candidate.learner, tasks, seed, num_tasks, progress, draw=draw_labelled
    )
    paths, labels = paths.reshape(-1, *paths.shape[2:]).astype(np.float64), labels.ravel()
    if suite.metaset is None:
        return Codes(paths, labels, np.zeros((len(labels), 0), int), FAMILIES)
    part = suite.metaset.subset(split)
    class_of = np.full(len(part.features), -1)
    class_of[part.rows] = np.repeat(np.arange(len(part.counts)), part.counts)
    return Codes(paths, class_of[labels], rows.reshape(len(labels), -1), label_names(suite, split))


def label_names(suite: TaskSuite, split: str) -> tuple[str, ...]:
    """What codes may stand for, in words."""
    return FAMILIES if suite.metaset is None else tuple(map(readable_name, suite.metaset.subset(split).class_names))


def silhouettes(
    codes: Float[np.ndarray, "code latent"], labels: Int[np.ndarray, " code"]
) -> Float[np.ndarray, " code"]:
    """(b - a) / max(a, b) of each code, by its mean distance a to its own class and b to the nearest other one."""
    from sklearn.metrics import silhouette_samples

    return np.asarray(silhouette_samples(np.asarray(codes, np.float64), labels))


def purity(
    codes: Float[np.ndarray, "code latent"],
    labels: Int[np.ndarray, " code"],
    rows: Int[np.ndarray, "code shot"],
    neighbours: int = NEIGHBOURS,
    even: bool = True,
) -> float:
    """Share of each code's nearest neighbours that are of its label; NaN where no code has any neighbour.

    Codes that were made of an example in common are no neighbours: they are alike because of the example. Where only
    codes of one label can have that (`even`), the same share of the others is left out blindly, so that a code meets
    its own label as often as chance would have it.
    """
    codes = np.asarray(codes, np.float64)
    squares = (codes**2).sum(1)
    related, random = shares_example(rows), np.random.default_rng(0)
    shares = []
    for first in range(0, len(codes), 1000):  # a bounded part of all distances at a time
        part = slice(first, first + 1000)
        distances = squares[part, None] + squares[None, :] - 2 * codes[part] @ codes.T
        apart, same = related[part].toarray(), labels[part, None] == labels[None, :]
        itself = np.arange(len(apart)), np.arange(first, first + len(apart))
        apart[itself] = same[itself] = False
        if even:
            share = (apart & same).sum(1) / np.maximum(same.sum(1), 1)
            apart |= ~same & (random.random(same.shape) < share[:, None])
        apart[itself] = True
        distances[apart] = np.inf
        nearest = np.argpartition(distances, neighbours, axis=1)[:, :neighbours]
        met = np.isfinite(np.take_along_axis(distances, nearest, axis=1))
        alike = np.take_along_axis(same, nearest, axis=1) & met
        shares.append(alike.sum(1)[met.any(1)] / met.sum(1)[met.any(1)])
    return mean_and_interval(np.concatenate(shares))[0]


def shares_example(rows: Int[np.ndarray, "code shot"]) -> Any:
    """Which codes have an example in common, as a sparse matrix."""
    from scipy.sparse import csr_array

    count, shot = rows.shape
    width = int(rows.max()) + 1 if rows.size else 1
    owners = csr_array((np.ones(rows.size), (np.repeat(np.arange(count), shot), rows.ravel())), (count, width))
    return (owners @ owners.T).astype(bool)


def describe_codes(codes: Codes) -> dict[str, Any]:
    """Numbers in the latent space itself, before and after; distances in its own units."""
    result: dict[str, Any] = {"codes": len(codes.labels), "classes": len(np.unique(codes.labels))}
    for name, points in (("before", codes.before), ("after", codes.after)):
        result[name] = {"silhouette": math.nan, "purity": math.nan, "spread": spread(points)}
        if result[name]["spread"] > 0:  # without an encoder all codes start at one point
            result[name]["silhouette"] = float(silhouettes(points, codes.labels).mean())
            result[name]["purity"] = purity(points, codes.labels, codes.rows)
    moved = np.linalg.norm(codes.after - codes.before, axis=1)
    result["moved"] = {
        "mean": float(moved.mean()),
        "5 %": float(np.quantile(moved, 0.05)),
        "median": float(np.median(moved)),
        "95 %": float(np.quantile(moved, 0.95)),
    }
    result["apart"] = apart(codes)
    result["chance_purity"] = chance(codes.labels)
    return result


def spread(points: Float[np.ndarray, "code latent"]) -> float:
    """Root mean squared distance to the mean."""
    return float(np.sqrt(((points - points.mean(0)) ** 2).sum(1).mean()))


def apart(codes: Codes) -> float:
    """Share of neighbours on the same side, before or after, among all codes of both: a half if nothing has changed."""
    points = np.concatenate([codes.before, codes.after])
    sides = np.repeat([0, 1], len(codes.labels))
    rows = codes.rows if codes.rows.size else np.arange(len(codes.labels))[:, None]  # its own other end is no neighbour
    return purity(points, sides, np.tile(rows, (2, 1)), even=False)


def chance(labels: Int[np.ndarray, " code"]) -> float:
    """Purity of neighbours drawn blindly."""
    counts = np.bincount(labels).astype(np.float64)
    return float((counts * (counts - 1)).sum() / (counts.sum() * (counts.sum() - 1)))


def typical_class(codes: Codes) -> int:
    """The label of middling separation after adaptation: no showpiece."""
    values = silhouettes(codes.after, codes.labels)
    labels = np.unique(codes.labels)
    means = [values[codes.labels == label].mean() for label in labels]
    return int(labels[np.argsort(means)[len(labels) // 2]])


def project(codes: Codes, seed: int) -> Float[np.ndarray, "side code 2"]:
    """One t-SNE of codes and adapted codes together."""
    from sklearn.manifold import TSNE

    points = np.concatenate([codes.before, codes.after]).astype(np.float32)
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    placed = TSNE(init="pca", perplexity=perplexity, random_state=seed % 2**32, n_jobs=-1).fit_transform(points)
    return placed.reshape(2, -1, 2)


def principal_paths(codes: Codes) -> tuple[Float[np.ndarray, "code point 2"], Float[np.ndarray, " 2"]]:
    """Every path on the two directions in which its points differ most, and their shares of all variance."""
    points = codes.paths.reshape(-1, codes.paths.shape[-1]).astype(np.float64)
    centred = points - points.mean(0)
    _, lengths, directions = np.linalg.svd(centred, full_matrices=False)
    placed = (centred @ directions[:2].T).reshape(*codes.paths.shape[:2], 2)
    return placed, (lengths**2 / (lengths**2).sum())[:2]
