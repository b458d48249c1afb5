"""The query loss of linear classifiers as a kernel.

It reads the rows of the table once; XLA writes them with their dropout, and reads that for the loss and its gradient.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from metaleo_kernels.launching import Arrays, launcher


def kernel(way: int, queries: int, dim: int) -> str:
    """Its name."""
    return f"judge_queries_{way}_{queries}_{dim}"


@jax.custom_vjp
def score_queries(*arguments: Array) -> Arrays:
    """Loss and accuracy of each task."""
    return forward(*arguments)[0]


def forward(
    weights: Float[Array, "task way dim"],
    words: UInt32[Array, "task 2"],
    keep_prob: Float[Array, " task"],
    targets: Float[Array, "task query way"],
    mask: Bool[Array, "task query"],
    rows: Int[Array, "task query"],
    table: Float[Array, "row dim"],
) -> tuple[Arrays, Float[Array, "task way dim"]]:
    """The words of keys decide, with the share that is kept, on dropout."""
    (tasks, way, dim), queries = weights.shape, rows.shape[1]
    present = mask.astype(weights.dtype)
    share = present / jnp.sum(present, axis=1, keepdims=True)
    judge = launcher(kernel(way, queries, dim), ((tasks,), (tasks,), weights.shape), from_table=True)
    losses, right, gradient = judge(weights, words, keep_prob, targets, share, rows, table)
    return (losses, right), gradient


def backward(gradient: Float[Array, "task way dim"], of_results: Arrays) -> tuple[Array | None, ...]:
    return of_results[0][:, None, None] * gradient, *[None] * 6


score_queries.defvjp(forward, backward)
