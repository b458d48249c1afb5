"""What a learner is given: a support set to adapt to, and a query set to be judged on."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Batch(eqx.Module):
    """Examples with their targets. Rows where `mask` is false are padding: they change nothing.

    For classification `targets` holds one-hot rows, so the number of ways is part of the shape.
    """

    inputs: Float[Array, "example dim"]
    targets: Float[Array, "example way"]
    mask: Bool[Array, " example"]

    @property
    def way(self) -> int:
        return self.targets.shape[1]

    def class_weights(self) -> Float[Array, "way example"]:
        """What to multiply with, to average over each class's examples: 1 / (their number), and 0 elsewhere."""
        members = self.targets * self.mask[:, None].astype(self.targets.dtype)
        return (members / members.sum(0, keepdims=True)).T


class Task(eqx.Module):
    """One problem: D^tr of the paper is `support`, D^val is `query`."""

    support: Batch
    query: Batch


def labelled(
    inputs: Float[Array, "example dim"],
    labels: Int[Array, " example"] | Int[np.ndarray, " example"],
    way: int,
    mask: Bool[Array, " example"] | None = None,
) -> Batch:
    """A batch from integer labels in 0 … way - 1, any number of examples per class."""
    targets = jax.nn.one_hot(labels, way, dtype=inputs.dtype)
    return Batch(inputs, targets, jnp.ones(len(inputs), bool) if mask is None else mask)
