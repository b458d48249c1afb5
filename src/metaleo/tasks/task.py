"""Tasks: a support set to adapt to, and a query set to predict."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree


class Batch(eqx.Module):
    """Examples with their targets.

    Attributes:
        inputs: One row per example.
        targets: One-hot rows for classification, so that the number of ways is part of the shape; for regression, the
            values to predict.
        mask: False for padding rows, which have no effect on any result.

    Examples:
        >>> import jax.numpy as jnp
        >>> from metaleo import Batch
        >>> Batch(jnp.ones((3, 4)), jnp.eye(3), jnp.ones(3, bool)).way
        3
    """

    inputs: Float[Array, "example *input"]
    targets: Float[Array, "example *target"]
    mask: Bool[Array, " example"]

    @property
    def way(self) -> int:
        return self.targets.shape[1]

    def weights(self) -> Float[Array, " example"]:
        """Weights of the mean over all examples except padding."""
        present = self.mask.astype(self.inputs.dtype)
        return present / present.sum()

    def class_counts(self) -> Float[Array, " way"]:
        """Number of examples of each class; 0 for a class that only fills up the ways of a smaller task."""
        return (self.targets * self.mask[:, None].astype(self.targets.dtype)).sum(0)

    def class_weights(self) -> Float[Array, "way example"]:
        """Weights of the mean over each class's examples: 1 / (their number), and 0 elsewhere."""
        members = self.targets * self.mask[:, None].astype(self.targets.dtype)
        return (members / jnp.maximum(members.sum(0, keepdims=True), 1)).T


class Task(eqx.Module):
    """One learning problem.

    Attributes:
        support: The few examples to learn from (D^tr of the paper).
        query: The examples to predict (D^val of the paper).

    Examples:
        >>> import jax
        >>> from metaleo import Episodes, load_data
        >>> task = Episodes.over(load_data("sample"), way=5, shot=1, query=15).sample(jax.random.key(0))
        >>> task.support.inputs.shape, task.query.inputs.shape
        ((5, 640), (75, 640))
    """

    support: Batch
    query: Batch


class Tasks(eqx.Module):
    """A distribution p(T) over tasks: `sample(key)` draws one, always the same for the same key.

    `Episodes` and `SinesAndLines` are such distributions. To add another, define a subclass with a pure `sample(key)`.
    If sampling takes many tiny steps, `sample_indices` does them for many tasks in advance; `gather` does the rest.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from metaleo import Batch, Task, Tasks
        >>> class Slopes(Tasks):
        ...     def sample(self, key):
        ...         x = jnp.linspace(0, 1, 6)[:, None]
        ...         both = Batch(x, x * jax.random.normal(key), jnp.ones(6, bool))
        ...         return Task(*(jax.tree.map(lambda leaf: leaf[part], both) for part in (slice(2), slice(2, 6))))
        >>> Slopes().sample(jax.random.key(0)).query.targets.shape
        (4, 1)
    """

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray) -> Task: ...

    def sample_indices(self, key: PRNGKeyArray) -> PyTree:
        return key

    def gather(self, indices: PyTree) -> Task:
        return self.sample(indices)

    @property
    def numbers(self) -> int:
        """Approximate count of numbers in a task; it determines how many tasks are processed at once."""
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.sample, jax.random.key(0))))


def key_apart(key: PRNGKeyArray) -> PRNGKeyArray:
    """A key for processing the task of this key, distinct from all keys that sampling the task may use.

    A small number would not work: `fold_in(key, 1)` is the same key as `split(key)[1]`.
    """
    return jax.random.fold_in(key, 2**31 - 1)


def labelled(
    inputs: Float[Array, "example dim"],
    labels: Int[Array, " example"] | Int[np.ndarray, " example"],
    way: int,
    mask: Bool[Array, " example"] | None = None,
) -> Batch:
    """A batch from integer labels, with any number of examples per class.

    Args:
        inputs: One vector per example.
        labels: Integers in 0 … way - 1.
        way: Number of classes.
        mask: False for padding rows; by default there are none.

    Returns:
        The examples with one-hot targets.

    Examples:
        >>> import jax.numpy as jnp
        >>> from metaleo import labelled
        >>> labelled(jnp.ones((3, 8)), jnp.array([0, 0, 1]), way=2).targets.tolist()
        [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    targets = jax.nn.one_hot(labels, way, dtype=inputs.dtype)
    return Batch(inputs, targets, jnp.ones(len(inputs), bool) if mask is None else mask)


def normalise(vectors: Float[Array | np.ndarray, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """x / |x|, as the authors' code does before anything else.

    Args:
        vectors: Any number of vectors, along the last axis.

    Returns:
        Vectors of length one; a zero vector stays zero.

    Examples:
        >>> import numpy as np
        >>> from metaleo import normalise
        >>> normalise(np.array([3.0, 4.0])).round(1).tolist() == np.float32([0.6, 0.8]).tolist()
        True
    """
    vectors = jnp.asarray(vectors)
    squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(vectors), axis=-1, keepdims=True))
    extreme = ((squares < 1e-12) | (squares > 1e24)) & (largest >= jnp.finfo(vectors.dtype).tiny)
    vectors /= jnp.where(extreme, largest, 1)  # so that no square vanishes or overflows; others stay as they are
    squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))
