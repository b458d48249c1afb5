"""The loss of linear classifiers on query sets, by a kernel that finds its gradient while the inputs are at hand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from metaleo.kernels import launching
from metaleo.kernels.launching import MOST_SHARED, Cut, aligned, apart_by, eights, runs_at_once, trusted, usable
from metaleo.model.heads import LinearHead
from metaleo.objective import accuracy, query_loss
from metaleo.tasks.task import Batch
from metaleo.together import Arrays, together

SOURCES = "common.cuh", "weights.cuh", "query.cu"


@dataclasses.dataclass(frozen=True)
class Queries:
    """Shapes of the query sets of tasks."""

    tasks: int
    way: int
    examples: int
    dim: int


def cut(shapes: Queries, dtype: np.dtype) -> Cut | None:
    """A block for each task, if it can hold all its inputs."""
    warps = next((warps for warps in (8, 4) if shapes.dim % (16 * warps) == 0), 0)
    if not usable(dtype) or not warps or shapes.way > 16 or shapes.examples > 32 * warps or shapes.dim > 640:
        return None
    shared_bytes = aligned(
        shapes.examples * (shapes.dim + 4), warps * shapes.way * shapes.examples, 16 * (eights(shapes.examples) + 8),
        shapes.examples, shapes.examples, *[4] * -(-shapes.examples // 16),
    )  # fmt: skip
    return Cut(SOURCES, shapes, 1, 1, 32 * warps, shared_bytes) if shared_bytes <= MOST_SHARED else None


def one(
    weights: Float[Array, "way dim"],
    inputs: Float[Array, "example dim"],
    targets: Float[Array, "example way"],
    mask: Bool[Array, " example"],
) -> Arrays:
    logits, batch = jax.vmap(LinearHead(weights))(inputs), Batch(inputs, targets, mask)
    return query_loss(logits, batch), accuracy(logits, batch)


def many(
    weights: Float[Array, "task way dim"],
    inputs: Float[Array, "task example dim"],
    targets: Float[Array, "task example way"],
    mask: Bool[Array, "task example"],
) -> Any:
    shapes = Queries(*weights.shape[:2], *inputs.shape[1:])
    here, tried = (cut(dataclasses.replace(shapes, tasks=tasks), weights.dtype) for tasks in (shapes.tasks, 2))
    if here is None or tried is None or not trusted(difference, tried):
        return jax.vmap(one)(weights, inputs, targets, mask)
    return judge_tasks(here, weights, inputs, targets, shares(mask))


def shares(mask: Bool[Array, "task example"]) -> Float[Array, "task example"]:
    """What each example counts in the mean of its task."""
    present = mask.astype(jnp.float32)
    return present / jnp.sum(present, axis=1, keepdims=True)


linear_loss = together(one, many, shared=())
"""Loss and accuracy: a function of (weights, inputs, targets, mask)."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def judge_tasks(cut: Cut, *arguments: Array) -> Arrays:
    return forward(cut, *arguments)[0]


def forward(
    cut: Cut,
    weights: Float[Array, "task way dim"],
    inputs: Float[Array, "task example dim"],
    targets: Float[Array, "task example way"],
    share: Float[Array, "task example"],
) -> tuple[Arrays, Any]:
    pairs, own = (cut.shapes.examples, cut.shapes.way), (cut.shapes.way, cut.shapes.dim)
    judge = launching.launcher("judge", cut, None, ((), (), pairs, own))
    loss, hits, of_logits, of_weights = judge(weights, inputs, targets, share)
    return (loss, hits), (weights, of_logits, of_weights)


def backward(_: Cut, kept: Any, of_results: Arrays) -> tuple[Array | None, ...]:
    weights, of_logits, of_weights = kept
    of_loss = of_results[0][:, None, None]
    return of_loss * of_weights, of_loss * (of_logits @ weights), None, None  # the second only where it is needed


judge_tasks.defvjp(forward, backward)


def difference(cut: Cut) -> float:
    """Between the kernel and XLA, on random tasks with padding: the largest of results and gradients, in terms of the
    largest number of each array."""
    shapes, generator = cut.shapes, np.random.default_rng(0)
    weights = jnp.asarray(generator.normal(size=(shapes.tasks, shapes.way, shapes.dim)) / shapes.dim**0.5, jnp.float32)
    inputs = jnp.asarray(generator.normal(size=(shapes.tasks, shapes.examples, shapes.dim)), jnp.float32)
    classes = jnp.arange(shapes.examples) % shapes.way
    targets = jnp.broadcast_to(jnp.eye(shapes.way)[classes], (shapes.tasks, shapes.examples, shapes.way))
    mask = jnp.ones((shapes.tasks, shapes.examples), bool).at[0, -1].set(False)
    of_results = jnp.arange(1.0, shapes.tasks + 1), jnp.zeros(shapes.tasks)
    with runs_at_once(0):
        expected, back = jax.vjp(lambda *own: jax.vmap(one)(*own, targets, mask), weights, inputs)
        expected = *expected, *back(of_results)
    own, kept = forward(cut, weights, inputs, targets, shares(mask))
    return apart_by((*own, *backward(cut, kept, of_results)[:2]), expected)
