"""What a learner is given: a support set to adapt to, and a query set to be judged on."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree


class Batch(eqx.Module):
    """Examples with their targets. Rows where `mask` is false are padding: they change nothing.

    For classification `targets` holds one-hot rows, so the number of ways is part of the shape; for regression, what
    is to be predicted.
    """

    inputs: Float[Array, "example *input"]
    targets: Float[Array, "example *target"]
    mask: Bool[Array, " example"]

    @property
    def way(self) -> int:
        return self.targets.shape[1]

    def weights(self) -> Float[Array, " example"]:
        """What to multiply with, to average over the examples that are no padding."""
        present = self.mask.astype(self.inputs.dtype)
        return present / present.sum()

    def class_weights(self) -> Float[Array, "way example"]:
        """What to multiply with, to average over each class's examples: 1 / (their number), and 0 elsewhere."""
        members = self.targets * self.mask[:, None].astype(self.targets.dtype)
        return (members / members.sum(0, keepdims=True)).T


class Task(eqx.Module):
    """One problem: D^tr of the paper is `support`, D^val is `query`."""

    support: Batch
    query: Batch


class Tasks(eqx.Module):
    """A distribution p(T) over problems: `sample(key)` is one of them, always the same for the same key.

    Where drawing a task takes many tiny steps, `sample_indices` does those for many tasks beforehand, and `gather` the
    rest.
    """

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray) -> Task: ...

    def sample_indices(self, key: PRNGKeyArray) -> PyTree:
        return key

    def gather(self, indices: PyTree) -> Task:
        return self.sample(indices)

    @property
    def numbers(self) -> int:
        """About how many numbers a task holds: how many tasks are taken at once depends on it."""
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.sample, jax.random.key(0))))


def key_apart(key: PRNGKeyArray) -> PRNGKeyArray:
    """A key for what is done to the task of this key: none that drawing the task may use.

    A small number would not do: `fold_in(key, 1)` is the same key as `split(key)[1]`.
    """
    return jax.random.fold_in(key, 2**31 - 1)


def labelled(
    inputs: Float[Array, "example dim"],
    labels: Int[Array, " example"] | Int[np.ndarray, " example"],
    way: int,
    mask: Bool[Array, " example"] | None = None,
) -> Batch:
    """A batch from integer labels in 0 … way - 1, any number of examples per class."""
    targets = jax.nn.one_hot(labels, way, dtype=inputs.dtype)
    return Batch(inputs, targets, jnp.ones(len(inputs), bool) if mask is None else mask)


def normalise(vectors: Float[Array | np.ndarray, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """x / |x|, as the authors' code does before anything else; a zero vector stays zero."""
    vectors = jnp.asarray(vectors)
    squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))
