"""Latent codes before and after adaptation: does adaptation separate them by class (Section 4.5, Figure 4)?"""

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
    """Latent codes of many tasks at each point of adaptation, with the label of each code."""

    paths: Float[np.ndarray, "code point latent"]
    labels: Int[np.ndarray, " code"]
    rows: Int[np.ndarray, "code shot"]
    """Rows of the support examples behind each code."""
    names: tuple[str, ...]
    """Names of the labels."""

    @property
    def before(self) -> Float[np.ndarray, "code latent"]:
        return self.paths[:, 0]

    @property
    def after(self) -> Float[np.ndarray, "code latent"]:
        return self.paths[:, -1]


def check_codes(candidate: Candidate, num_tasks: int) -> None:
    """Raise `BadInput` for too few tasks, or for a model without codes to compare before and after adaptation."""
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
    """Collect the codes of these tasks, using means instead of samples and no dropout."""
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
    """Readable names of the labels: families of functions, or classes of the split."""
    return FAMILIES if suite.metaset is None else tuple(map(readable_name, suite.metaset.subset(split).class_names))


def silhouettes(
    codes: Float[np.ndarray, "code latent"], labels: Int[np.ndarray, " code"]
) -> Float[np.ndarray, " code"]:
    """Silhouette (b - a) / max(a, b) of each code: a is its mean distance to its own class, b to the nearest other."""
    from sklearn.metrics import silhouette_samples

    return np.asarray(silhouette_samples(np.asarray(codes, np.float64), labels))


def purity(
    codes: Float[np.ndarray, "code latent"],
    labels: Int[np.ndarray, " code"],
    rows: Int[np.ndarray, "code shot"],
    neighbours: int = NEIGHBOURS,
    even: bool = True,
) -> float:
    """Mean share of each code's nearest neighbours that have its label; NaN if no code has a neighbour.

    Codes that share an example do not count as neighbours: the shared example alone makes them similar. If only codes
    of the same label can share examples (`even`), the same share of codes of other labels is left out at random, so
    that the chance level is unaffected.
    """
    codes = np.asarray(codes, np.float64)
    squares = (codes**2).sum(1)
    related, random = shares_example(rows), np.random.default_rng(0)
    shares = []
    for first in range(0, len(codes), 1000):  # blocks of distances, to bound memory
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
    """Sparse boolean matrix of the pairs of codes that share an example."""
    from scipy.sparse import csr_array

    count, shot = rows.shape
    width = int(rows.max()) + 1 if rows.size else 1
    owners = csr_array((np.ones(rows.size), (np.repeat(np.arange(count), shot), rows.ravel())), (count, width))
    return (owners @ owners.T).astype(bool)


def describe_codes(codes: Codes) -> dict[str, Any]:
    """Statistics of codes before and after adaptation, in the latent space itself and in its units."""
    result: dict[str, Any] = {"codes": len(codes.labels), "classes": len(np.unique(codes.labels))}
    for name, points in (("before", codes.before), ("after", codes.after)):
        result[name] = {"silhouette": math.nan, "purity": math.nan, "spread": spread(points)}
        if result[name]["spread"] > 0:  # without an encoder, all codes start at the same point
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
    """Root mean squared distance of the points to their mean."""
    return float(np.sqrt(((points - points.mean(0)) ** 2).sum(1).mean()))


def apart(codes: Codes) -> float:
    """Share of a code's neighbours on its own side (before or after), among codes of both sides: 1/2 if none moved."""
    points = np.concatenate([codes.before, codes.after])
    sides = np.repeat([0, 1], len(codes.labels))
    rows = codes.rows if codes.rows.size else np.arange(len(codes.labels))[:, None]  # leaves out a code's other end
    return purity(points, sides, np.tile(rows, (2, 1)), even=False)


def chance(labels: Int[np.ndarray, " code"]) -> float:
    """Expected purity of neighbours drawn at random."""
    counts = np.bincount(labels).astype(np.float64)
    return float((counts * (counts - 1)).sum() / (counts.sum() * (counts.sum() - 1)))


def typical_class(codes: Codes) -> int:
    """The label with the median silhouette after adaptation, as a representative example."""
    values = silhouettes(codes.after, codes.labels)
    labels = np.unique(codes.labels)
    means = [values[codes.labels == label].mean() for label in labels]
    return int(labels[np.argsort(means)[len(labels) // 2]])


def project(codes: Codes, seed: int) -> Float[np.ndarray, "side code 2"]:
    """Project codes before and after adaptation to two dimensions, with one joint t-SNE."""
    from sklearn.manifold import TSNE

    points = np.concatenate([codes.before, codes.after]).astype(np.float32)
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    placed = TSNE(init="pca", perplexity=perplexity, random_state=seed % 2**32, n_jobs=-1).fit_transform(points)
    return placed.reshape(2, -1, 2)


def principal_paths(codes: Codes) -> tuple[Float[np.ndarray, "code point 2"], Float[np.ndarray, " 2"]]:
    """Project all paths onto the first two principal components; also returns their shares of the variance."""
    points = codes.paths.reshape(-1, codes.paths.shape[-1]).astype(np.float64)
    centred = points - points.mean(0)
    _, lengths, directions = np.linalg.svd(centred, full_matrices=False)
    placed = (centred @ directions[:2].T).reshape(*codes.paths.shape[:2], 2)
    return placed, (lengths**2 / (lengths**2).sum())[:2]
