"""Curvature of a task's loss in z and in θ: the eigenvalues of its Hessian (Section 4.6, Figure 5a).

The loss is the inner loss on the support set (Eq. 5), at the points where adaptation starts and ends.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float
from threadpoolctl import threadpool_limits

from metaleo.analysis.paths import (
    Descending,
    Report,
    code_path,
    descending,
    ignore_progress,
    map_over_tasks,
    unwrap_joint,
    weight_path,
)
from metaleo.checkpoints import Candidate
from metaleo.evaluation.evaluate import TaskSuite
from metaleo.learners import LEO
from metaleo.tasks.task import Batch

POINTS: tuple[str, ...] = ("before", "after")
LARGEST = 2000
"""Largest number of coordinates for which the full Hessian is formed."""
WHOLE_TASKS = 100
"""Maximum number of tasks with full Hessians in θ: each takes half a second."""
ROUNDING = 1e-6
"""Eigenvalues of full Hessians below this fraction of the task's largest count as rounding error."""


@dataclasses.dataclass(frozen=True)
class Spectra:
    """Absolute eigenvalues by space (z, theta) and point, one row per task; NaN pads tasks with fewer eigenvalues.

    Eigenvalues that are zero by construction are left out, see `softmax_spectrum`.
    """

    values: dict[str, dict[str, Float[np.ndarray, "task eigenvalue"]]]
    sizes: dict[str, int]
    """Number of coordinates, and so of eigenvalues, of each space; zeros by construction are included."""


class Logits(eqx.Module):
    """All that determines the Hessian of a loss whose logits are linear in the point, `inputs @ pointᵀ`."""

    inputs: Float[Array | np.ndarray, "*task example dim"]
    logits: Float[Array | np.ndarray, "*task example way"]
    weights: Float[Array | np.ndarray, "*task example"]


def eigenvalues(matrices: Float[np.ndarray, "*task dim dim"]) -> Float[np.ndarray, "*task dim"]:
    """Eigenvalues of symmetric matrices, smallest first.

    Each matrix uses one thread, and as many matrices run in parallel as there are cores. BLAS threads within one matrix
    wait for each other so often that, if the cores are busy, they take twenty times as long.
    """
    size = matrices.shape[-1]
    with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(np.linalg.eigvalsh, matrices.reshape(-1, size, size)))
    return np.reshape(found, matrices.shape[:-1])


def softmax_spectrum(
    inputs: Float[Array | np.ndarray, "*task example dim"],
    logits: Float[Array | np.ndarray, "*task example way"],
    weights: Float[Array | np.ndarray, "*task example"],
) -> Float[np.ndarray, "*task rank"]:
    """Eigenvalues, largest first, of the Hessian of Σ_i w_i CE(W x_i, y_i) in W, without forming it.

    It is Σ_i w_i S_i ⊗ x_i x_iᵀ with S = diag(p) - ppᵀ = RRᵀ, R = diag(√p)(I - √p√pᵀ), that is FFᵀ for the factor F
    with a column √w_i r_ia ⊗ x_i for each example i and way a. FᵀF, whose entries are inner products, has the same
    non-zero eigenvalues. As a common shift of all logits has no effect, at most (way - 1) min(examples, dim) are not
    zero.
    """
    inputs, logits, weights = (np.asarray(values, np.float64) for values in (inputs, logits, weights))
    examples, way = logits.shape[-2:]
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    roots = np.sqrt(exponentials / exponentials.sum(-1, keepdims=True))
    factors = roots[..., :, None] * (np.eye(way) - roots[..., :, None] * roots[..., None, :])  # R_i
    factors *= np.sqrt(weights)[..., None, None]
    products = inputs @ np.swapaxes(inputs, -1, -2)
    gram = np.einsum("...ij,...ica,...jcb->...iajb", products, factors, factors)
    gram = gram.reshape(*gram.shape[:-4], examples * way, examples * way)
    rank = (way - 1) * min(examples, inputs.shape[-1])
    return np.maximum(eigenvalues(gram)[..., ::-1][..., :rank], 0)


def whole_spectrum(hessians: Float[np.ndarray, "task dim dim"]) -> Float[np.ndarray, "task dim"]:
    """Absolute eigenvalues, largest first; NaN for those that are rounding error relative to the task's largest."""
    values = np.sort(np.abs(eigenvalues(np.asarray(hessians, np.float64))), axis=-1)[:, ::-1]
    return np.where(values > ROUNDING * values[:, :1], values, np.nan)


def hessian(loss: Callable[[Any], Any], at: Float[Array, "code dim"]) -> Float[Array, "numbers numbers"]:
    """Hessian of the loss in all coordinates of the point, flattened."""
    return jax.hessian(lambda flat: loss(flat.reshape(at.shape)))(at.reshape(-1))


def loss_of(learner: Descending, support: Batch) -> Callable[[Float[Array, "code size"]], Float[Array, ""]]:
    """The inner loss of a task as a function of θ."""
    network = learner.network
    return lambda theta: network.support_loss(jax.vmap(network.head(theta))(support.inputs), support)


def linear_in(point: Float[Array, "way dim"], inputs: Float[Array, "example dim"], support: Batch) -> Logits:
    return Logits(inputs, inputs @ point.T, support.way * support.weights())


def look_in_z(learner: LEO, support: Batch) -> list[Logits | Float[Array, "numbers numbers"]]:
    """At the first and the last code: `Logits` if the network and decoder are linear, otherwise the full Hessian."""
    path = code_path(learner, support)
    if learner.network.linear and learner.decoder.linear:
        return [linear_in(code, support.inputs @ learner.decoder.to_mean.T, support) for code in (path[0], path[-1])]
    loss = loss_of(learner, support)
    return [hessian(lambda code: loss(learner.decode(code, None)), code) for code in (path[0], path[-1])]


def look_in_theta(learner: Descending, support: Batch) -> list[Logits | Float[Array, "numbers numbers"]]:
    """The same in θ, at the initial weights (LEO decodes them from the first code) and at the final weights."""
    path = weight_path(learner, support)
    start = learner.decode(code_path(learner, support)[0], None) if isinstance(learner, LEO) else path[0]
    if learner.network.linear:
        return [linear_in(theta, support.inputs, support) for theta in (start, path[-1])]
    return [hessian(loss_of(learner, support), theta) for theta in (start, path[-1])]


def spectrum(held: Any) -> Float[np.ndarray, "task eigenvalue"]:
    if isinstance(held, Logits):
        return softmax_spectrum(held.inputs, held.logits, held.weights)
    return whole_spectrum(held)


def measure_curvature(
    candidate: Candidate, suite: TaskSuite, split: str, seed: int, num_tasks: int, progress: Report = ignore_progress
) -> Spectra:
    """Eigenvalues for these tasks; in θ for fewer tasks, or none, if θ is too large for exact eigenvalues."""
    inner = descending(candidate)
    network = inner.network
    codes = suite.way if network.per_class else 1
    sizes = {"theta": codes * network.size}
    looks: dict[str, tuple[Callable[..., Any], int]] = {}
    if isinstance(inner, LEO):
        sizes["z"] = codes * len(inner.latent_step_size)
        looks["z"] = look_in_z, num_tasks
    if network.linear or sizes["theta"] <= LARGEST:
        looks["theta"] = look_in_theta, num_tasks if network.linear else min(num_tasks, WHOLE_TASKS)
    tasks, values, total = suite.tasks(candidate, split), {}, sum(count for _, count in looks.values())
    done = 0
    for space, (look, count) in looks.items():
        points = map_over_tasks(
            lambda learner, task, _, look=look: look(*unwrap_joint(learner, task.support)),
            candidate.learner, tasks, seed, count,
            lambda now, done=done: progress((done + now) * num_tasks // total),
            on_host=lambda points: [spectrum(held) for held in points],
            at_once=50 if network.linear else 5,
        )  # fmt: skip
        values[space] = dict(zip(POINTS, points, strict=True))
        done += count
    return Spectra(values, sizes)


def quantiles(values: Float[np.ndarray, "..."]) -> dict[str, float]:
    """The quantiles that a box plot shows, of the finite values."""
    flat = np.asarray(values, np.float64).ravel()
    flat = flat[np.isfinite(flat)] if np.isfinite(flat).any() else np.array([np.nan])
    shares = {"5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95}
    return {name: float(np.quantile(flat, share)) for name, share in shares.items()}


def describe_curvature(spectra: Spectra) -> dict[str, Any]:
    """Quantiles of all eigenvalues, of each task's largest and of each task's mean; and ratios of medians, z over θ.

    The mean includes zeros, so it is the expected curvature along a random direction.
    """
    result: dict[str, Any] = {"numbers": {space: spectra.sizes[space] for space in spectra.values}}
    for space, points in spectra.values.items():
        for point, values in points.items():
            result[f"{space} {point}"] = {
                "eigenvalues": quantiles(values),
                "largest": quantiles(values[:, 0]),
                "mean": quantiles(np.nansum(values, 1) / spectra.sizes[space]),
            }
    if len(spectra.values) > 1:
        for point in POINTS:
            z, theta = result[f"z {point}"], result[f"theta {point}"]
            result[f"z over theta {point}"] = {
                name: z[name]["median"] / (theta[name]["median"] or math.nan)
                for name in ("eigenvalues", "largest", "mean")
            }
    return result
