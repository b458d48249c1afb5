"""The query loss of linear classifiers as a kernel, on a CPU or for many runs.

It reads the rows of the table once; XLA writes them with their dropout, and reads that for the loss and its gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from metaleo.kernels import launching
from metaleo.kernels.launching import (
    LANES,
    MOST_SHARED,
    Kernel,
    aligned,
    apart_by,
    core_kernel,
    on_cores,
    trusted,
    usable,
)
from metaleo.kernels.noise import GENERATOR
from metaleo.randomness import halves
from metaleo.tasks.task import Batch, Origin
from metaleo.together import Arrays, together

Judge = Callable[[Float[Array, "way dim"], Batch, PRNGKeyArray, Float[Array, ""]], Any]
"""Loss and accuracy of weights on queries, under dropout that a key and the share that is kept decide on."""

TAKEN = 16
"""Queries that are taken at a time."""


@functools.cache
def judging(judge: Judge, stream: int) -> Callable[..., Arrays]:
    """`judge`, whose dropout is of this stream, and where a kernel can do it the same by that: a function of (weights,
    key, keep, queries, their origin)."""

    def one(weights, words, keep, targets, mask, rows, table):
        inputs = table.at[rows].get(mode="promise_in_bounds")
        return judge(weights, Batch(inputs, targets, mask), jax.random.wrap_key_data(words, impl="threefry2x32"), keep)

    def of_tasks(*arguments: Array) -> Any:
        here, tried = (kernel_for(arguments, tasks, stream) for tasks in (len(arguments[0]), TRIED))
        if here is None or tried is None or not trusted(difference, judge, tried, arguments[3].shape[1]):
            return jax.vmap(one, (0, 0, 0, 0, 0, 0, None))(*arguments)
        weights, words, keep, targets, mask, rows, table = arguments
        return judge_tasks(here, weights, words, keep.astype(jnp.float32), targets, mask, rows, table)

    both = together(one, of_tasks, shared=(6,))

    def judged(
        weights: Float[Array, "way dim"],
        key: PRNGKeyArray,
        keep: float | Float[Array, ""],
        query: Batch,
        origin: Origin,
    ) -> Arrays:
        return both(weights, halves(key), jnp.asarray(keep), query.targets, query.mask, origin.rows, origin.table)

    return judged


def kernel_for(arguments: Arrays, tasks: int, stream: int) -> Kernel | None:
    """For arguments of these shapes, but so many tasks, if there is one here."""
    (_, way, dim), (_, queries, _) = arguments[0].shape, arguments[3].shape
    return kernel(tasks, way, dim, queries, stream) if usable(arguments[0].dtype) else None


def kernel(tasks: int, way: int, dim: int, queries: int, stream: int) -> Kernel | None:
    results = (tasks,), (tasks,), (tasks, way, dim)
    if on_cores():
        own = core_kernel("judge_queries", (("stream", stream),), results, from_table=True)
        return None if dim % LANES else own
    warps = 8
    shared_bytes = aligned(
        2 * TAKEN * (dim + 4), warps * TAKEN * way, 16 * (TAKEN + 8), TAKEN, TAKEN, way * queries, queries, queries
    )
    if dim % (16 * warps) or not 0 < dim <= 1024 or way > 16 or shared_bytes > MOST_SHARED:
        return None
    return Kernel(
        "judge_queries",
        ("common.cuh", "weights.cuh", "random.cuh", "queries.cu"),
        (*GENERATOR, ("way", way), ("examples", queries), ("dim", dim), ("stream", stream)),
        clusters=tasks,
        cluster=1,
        threads=32 * warps,
        shared_bytes=shared_bytes,
        results=results,
        resident=2 if shared_bytes <= MOST_SHARED // 2 else 1,
        from_table=True,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def judge_tasks(kernel: Kernel, *arguments: Array) -> Arrays:
    return forward(kernel, *arguments)[0]


def forward(
    kernel: Kernel,
    weights: Float[Array, "task way dim"],
    words: UInt32[Array, "task 2"],
    keep: Float[Array, " task"],
    targets: Float[Array, "task query way"],
    mask: Bool[Array, "task query"],
    rows: Int[Array, "task query"],
    table: Float[Array, "row dim"],
) -> tuple[Arrays, Float[Array, "task way dim"]]:
    present = mask.astype(weights.dtype)
    share = present / jnp.sum(present, axis=1, keepdims=True)
    losses, right, gradient = launching.launcher(kernel)(weights, words, keep, targets, share, rows, table)
    return (losses, right), gradient


def backward(_kernel: Kernel, gradient: Float[Array, "task way dim"], of_results: Arrays) -> tuple[Array | None, ...]:
    return of_results[0][:, None, None] * gradient, *[None] * 6


judge_tasks.defvjp(forward, backward)


# Trust


TRIED = 3
"""Tasks that the kernel is tried on."""


def difference(judge: Judge, kernel: Kernel, queries: int) -> float:
    """Between the kernel and XLA on random tasks with padding: the largest of loss, accuracy and gradient, in terms of
    the largest number of each."""
    generator, (_, way, dim) = np.random.default_rng(0), kernel.results[2]
    weights = jnp.asarray(generator.normal(size=(TRIED, way, dim)), jnp.float32)
    table = jnp.asarray(generator.normal(size=(2 * queries, dim)) / dim**0.5, jnp.float32)
    rows = jnp.asarray(generator.integers(2 * queries, size=(TRIED, queries)), jnp.int32)
    targets = jnp.broadcast_to(jnp.eye(way)[jnp.arange(queries) % way], (TRIED, queries, way))
    mask = jnp.ones((TRIED, queries), bool).at[0, -1].set(False)
    keys, keep = jax.random.split(jax.random.key(0), TRIED), jnp.linspace(0.3, 1, TRIED)

    def by_xla(weights: Float[Array, "task way dim"]) -> Arrays:
        return jax.vmap(judge)(weights, jax.vmap(Batch)(table[rows], targets, mask), keys, keep)

    def by_kernel(weights: Float[Array, "task way dim"]) -> Arrays:
        return judge_tasks(kernel, weights, jax.vmap(halves)(keys), keep, targets, mask, rows, table)

    def with_gradient(judge: Callable[..., Arrays]) -> Arrays:
        results, back = jax.vjp(judge, weights)
        return *results, *back((jnp.arange(1.0, TRIED + 1), jnp.zeros(TRIED)))

    return apart_by(with_gradient(by_kernel), with_gradient(by_xla))
