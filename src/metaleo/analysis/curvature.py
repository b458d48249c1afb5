"""Curvature of a task's loss in z and in θ: the eigenvalues of its Hessian (Section 4.5, Figure 5a).

The loss is the inner one, of the support set (Eq. 5), where adaptation starts and where it ends.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.analysis.paths import (
    Descending,
    Progress,
    code_path,
    descending,
    opened,
    silent,
    walk,
    weight_path,
)
from metaleo.learners import LEO, Learner
from metaleo.subjects import Bench, Subject
from metaleo.tasks.task import Batch, Task

POINTS: tuple[str, ...] = ("before", "after")
LARGEST = 2000
"""Numbers in a point whose whole Hessian is formed."""
ROUNDING = 1e-6
"""Eigenvalues of whole Hessians below this share of the task's largest are rounding error."""


@dataclasses.dataclass(frozen=True)
class Spectra:
    """Absolute eigenvalues by space (z, theta) and point, task by task; NaN where a task has fewer than others.

    Only those that are not zero by construction, see `softmax_spectrum`.
    """

    values: dict[str, dict[str, Float[np.ndarray, "task eigenvalue"]]]
    sizes: dict[str, int]
    """How many numbers a point has: as many eigenvalues, those that are zero by construction included."""


class Logits(eqx.Module):
    """A loss whose logits are linear in the point, `inputs @ pointᵀ`: all that its Hessian depends on."""

    inputs: Float[Array | np.ndarray, "*task example dim"]
    logits: Float[Array | np.ndarray, "*task example way"]
    weights: Float[Array | np.ndarray, "*task example"]


def softmax_spectrum(
    inputs: Float[Array | np.ndarray, "*task example dim"],
    logits: Float[Array | np.ndarray, "*task example way"],
    weights: Float[Array | np.ndarray, "*task example"],
) -> Float[np.ndarray, "*task rank"]:
    """Eigenvalues, largest first, of the Hessian of Σ_i w_i CE(W x_i, y_i) in W, without forming it.

    It is Σ_i w_i S_i ⊗ x_i x_iᵀ with S = diag(p) - ppᵀ = RRᵀ, R = diag(√p)(I - √p√pᵀ), that is FFᵀ for the factor F
    with a column √w_i r_ia ⊗ x_i for each example i and way a; and FᵀF, whose entries are inner products, has the
    same eigenvalues save zeros. As R has rank way - 1, at most examples x (way - 1) of them are not zero.
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
    rank = min(examples * (way - 1), way * inputs.shape[-1])
    return np.maximum(np.linalg.eigvalsh(gram)[..., ::-1][..., :rank], 0)


def whole_spectrum(hessians: Float[np.ndarray, "task dim dim"]) -> Float[np.ndarray, "task dim"]:
    """Absolute eigenvalues, largest first; NaN for those that are rounding error beside the task's largest."""
    values = np.sort(np.abs(np.linalg.eigvalsh(np.asarray(hessians, np.float64))), axis=-1)[:, ::-1]
    return np.where(values > ROUNDING * values[:, :1], values, np.nan)


def hessian(loss: Callable[[Any], Any], at: Float[Array, "code dim"]) -> Float[Array, "numbers numbers"]:
    """Of all numbers of the point at once."""
    return jax.hessian(lambda flat: loss(flat.reshape(at.shape)))(at.reshape(-1))


def describe_losses(learner: Descending, support: Batch) -> dict[str, list[Logits | Float[Array, "numbers numbers"]]]:
    """What the Hessians at both points follow from: for linear classifiers a few numbers, else the Hessians."""
    network = learner.network

    def loss(weights: Float[Array, "code size"]) -> Float[Array, ""]:
        return network.support_loss(jax.vmap(network.head(weights))(support.inputs), support)

    def linear_in(point: Float[Array, "way dim"], inputs: Float[Array, "example dim"]) -> Logits:
        return Logits(inputs, inputs @ point.T, support.way * support.weights())

    found = {}
    path = weight_path(learner, support)
    start, end = path[0], path[-1]
    if isinstance(learner, LEO):
        codes = code_path(learner, support)
        ends = codes[0], codes[-1]
        start = learner.decode(codes[0], None)
        decode = functools.partial(learner.decode, noise=None)
        if network.linear and learner.decoder.linear:
            found["z"] = [linear_in(code, support.inputs @ learner.decoder.to_mean.T) for code in ends]
        else:
            found["z"] = [hessian(lambda code: loss(decode(code)), code) for code in ends]
    if network.linear:
        found["theta"] = [linear_in(theta, support.inputs) for theta in (start, end)]
    elif start.size <= LARGEST:
        found["theta"] = [hessian(loss, theta) for theta in (start, end)]
    return found


def spectrum(held: Any) -> Float[np.ndarray, "task eigenvalue"]:
    if isinstance(held, Logits):
        return softmax_spectrum(held.inputs, held.logits, held.weights)
    return whole_spectrum(held)


def measure_curvature(
    subject: Subject, bench: Bench, split: str, seed: int, num_tasks: int, progress: Progress = silent
) -> Spectra:
    """Eigenvalues for these tasks; none in θ where it has too many numbers for an exact answer."""
    inner = descending(subject.learner, f"{subject.path} ({subject.config.structure.learner})")

    def look(learner: Learner, task: Task, _: PRNGKeyArray) -> dict[str, list[Any]]:
        return describe_losses(*opened(learner, task.support))

    def on_host(found: dict[str, list[Any]]) -> dict[str, list[np.ndarray]]:
        return {space: [spectrum(held) for held in points] for space, points in found.items()}

    tasks = bench.tasks(subject, split)
    at_once = 50 if inner.network.linear else 5
    found = walk(look, subject.learner, tasks, seed, num_tasks, progress, on_host=on_host, at_once=at_once)
    values = {space: dict(zip(POINTS, points, strict=True)) for space, points in found.items()}
    codes = bench.way if inner.network.per_class else 1
    sizes = {"theta": codes * inner.network.size}
    if isinstance(inner, LEO):
        sizes["z"] = codes * len(inner.latent_step_size)
    return Spectra(values, sizes)


def quantiles(values: Float[np.ndarray, "..."]) -> dict[str, float]:
    """What a box shows."""
    flat = np.asarray(values, np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    shares = {"5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95}
    return {name: float(np.quantile(flat, share)) for name, share in shares.items()}


def describe_curvature(spectra: Spectra) -> dict[str, Any]:
    """Quantiles over all eigenvalues of all tasks; of the largest of each task; and of their mean, zeros included,
    which is the curvature along a direction drawn blindly. And z beside θ, by the medians of each."""
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
            result[f"z over theta {point}"] = {
                name: result[f"z {point}"][name]["median"] / result[f"theta {point}"][name]["median"]
                for name in ("eigenvalues", "largest", "mean")
            }
    return result
