"""What is done to every row, once, before a learner sees it."""

from collections.abc import Iterator
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from metaleo.data.metaset import MetaSet
from metaleo.tasks.task import normalise

LEAST_VARIANCE = 1e-4
"""Smallest variance within classes, as a share of the largest: directions with less are not stretched further."""


class Preparation(eqx.Module):
    """x ↦ u / |u|, where u = M (v - m) / |v - m| and v = x / |x|: centred, of length one, and partly whitened.

    m is the mean of the training rows, and M = S^-p, where S is their covariance within classes: p = 0 whitens nothing,
    p = ½ entirely. Rows of length one have a common direction, which says nothing about their class, and directions in
    which rows of one class differ, which say little.
    """

    centre: Float[Array, " dim"]
    whitening: Float[Array, "dim dim"]

    def __call__(self, rows: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        return normalise(normalise(normalise(rows) - jnp.broadcast_to(self.centre, rows.shape)) @ self.whitening)


class Moments(NamedTuple):
    """What `Preparation` needs to know about the training rows."""

    centre: Float[np.ndarray, " dim"]
    variances: Float[np.ndarray, " dim"]
    directions: Float[np.ndarray, "dim dim"]

    @classmethod
    def of(cls, metaset: MetaSet) -> "Moments":
        """Moments of all rows of these classes; read class by class, to bound memory."""
        total = int(metaset.counts.sum())
        centre = sum((length_one(rows).sum(0) for rows in by_class(metaset)), start=np.zeros(metaset.dim)) / total
        scatter = np.zeros((metaset.dim, metaset.dim))
        for rows in by_class(metaset):
            centred = length_one(length_one(rows) - centre)
            apart = centred - centred.mean(0)
            scatter += apart.T @ apart
        variances, directions = np.linalg.eigh(scatter / total)
        return cls(centre, np.maximum(variances, LEAST_VARIANCE * variances.max()), directions)

    def preparation(self, power: float) -> Preparation:
        matrix = (self.directions * self.variances**-power) @ self.directions.T
        return Preparation(jnp.asarray(self.centre, jnp.float32), jnp.asarray(matrix, jnp.float32))


def length_one(rows: Float[np.ndarray, "row dim"]) -> Float[np.ndarray, "row dim"]:
    rows = np.asarray(rows, np.float64)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def by_class(metaset: MetaSet) -> Iterator[Float[np.ndarray, "row dim"]]:
    """The rows of each class."""
    for start, count in zip(metaset.starts, metaset.counts, strict=True):
        yield metaset.read(metaset.rows[start : start + count])


def class_means(preparation: Preparation, metaset: MetaSet) -> Float[Array, "class dim"]:
    """The mean of each class's prepared rows."""
    return jnp.stack([preparation(jnp.asarray(rows, jnp.float32)).mean(0) for rows in by_class(metaset)])
