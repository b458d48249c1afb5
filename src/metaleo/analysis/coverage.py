"""How far adaptation moves a model: singular values of the decoder, and lengths of steps (Figures 5b, 5c)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from metaleo.analysis.curvature import quantiles
from metaleo.analysis.paths import (
    Descending,
    Report,
    code_path,
    decode,
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

KINDS = {"z": "steps in z", "decoded": "the same steps in θ", "theta": "steps in θ"}


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Singular values of the decoder, and lengths of steps by kind, each over all codes of a task together."""

    singular_values: Float[np.ndarray, "... latent"] | None
    """Singular values of dθ/dz: one set for a linear decoder, otherwise one set per task, at its initial code."""
    steps: dict[str, Float[np.ndarray, "task step"]]
    total: dict[str, Float[np.ndarray, " task"]]
    """Distance from the first point to the last."""


def lengths(path: Float[Array, "point code dim"]) -> tuple[Float[Array, " step"], Float[Array, ""]]:
    """Length of each step, and distance from the first point to the last."""
    return jnp.sqrt(jnp.sum(jnp.diff(path, axis=0) ** 2, axis=(1, 2))), jnp.sqrt(jnp.sum((path[-1] - path[0]) ** 2))


def look_at_steps(learner: Descending, support: Batch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(learner, LEO) and learner.latent_steps:
        codes = code_path(learner, support)
        found["z"], found["decoded"] = lengths(codes), lengths(decode(learner, codes))
    path = weight_path(learner, support)
    if len(path) > 1:
        found["theta"] = lengths(path)
    if isinstance(learner, LEO) and not learner.decoder.linear:
        code = code_path(learner, support)[0, :1]
        found["jacobian"] = jax.jacobian(lambda code: learner.decode(code, None)[0])(code)[:, 0].T  # (latent, size)
    return found


def measure_coverage(
    candidate: Candidate, suite: TaskSuite, split: str, seed: int, num_tasks: int, progress: Report = ignore_progress
) -> Coverage:
    """Measure coverage on these tasks, using means instead of samples and no dropout."""
    inner = descending(candidate)

    def on_host(found: dict[str, Any]) -> dict[str, Any]:
        jacobians = found.pop("jacobian", None)
        return found if jacobians is None else found | {"singular": np.linalg.svd(jacobians, compute_uv=False)}

    found = map_over_tasks(
        lambda learner, task, _: look_at_steps(*unwrap_joint(learner, task.support)),
        candidate.learner, suite.tasks(candidate, split), seed, num_tasks, progress, on_host=on_host,
    )  # fmt: skip
    singular = found.pop("singular", None)
    if isinstance(inner, LEO) and inner.decoder.linear:
        singular = np.linalg.svd(np.asarray(inner.decoder.to_mean, np.float64), compute_uv=False)
    return Coverage(
        singular,
        {kind: steps for kind, (steps, _) in found.items()},
        {kind: total for kind, (_, total) in found.items()},
    )


def describe_coverage(coverage: Coverage) -> dict[str, Any]:
    """Quantiles of singular values, of lengths, and of the ratio of a step's length in θ to its length in z."""
    result: dict[str, Any] = {}
    if coverage.singular_values is not None:
        values = coverage.singular_values
        result["singular values"] = quantiles(values) | {"least": float(values.min()), "greatest": float(values.max())}
    for kind, steps in coverage.steps.items():
        result[f"steps {kind}"] = quantiles(steps)
        result[f"from start to end {kind}"] = quantiles(coverage.total[kind])
    if "z" in coverage.steps:
        ratio = coverage.steps["decoded"] / np.maximum(coverage.steps["z"], 1e-30)
        result["step in theta over step in z"] = quantiles(ratio)
    return result
