"""What is done to every row, once, before a learner sees it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from metaleo.data.metaset import MetaSet
from metaleo.tasks.task import normalise

LEAST_VARIANCE = 1e-4
"""Smallest variance within classes, as a share of the largest: directions with less are not stretched further."""

LEAST_BETWEEN = 0.05
"""Smallest variance between classes, as a share of the mean over all directions: no direction is lost."""


class Preparation(eqx.Module):
    """x ↦ u / |u|, where u = M (v - m) / |v - m| and v = x / |x|: centred, of length one, and partly whitened.

    m is the mean of the training rows, and M = R D^q S^-p, where S is their covariance within classes: p = 0 whitens
    nothing, p = ½ entirely. Rows of length one have a common direction, which says nothing about their class, and
    directions in which rows of one class differ, which say little. D shortens directions in which classes differ little
    (`emphasise`). R is a rotation, which changes no distance.
    """

    centre: Float[Array, " dim"]
    whitening: Float[Array, "dim dim"]

    def __call__(self, rows: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        return normalise(normalise(normalise(rows) - jnp.broadcast_to(self.centre, rows.shape)) @ self.whitening)


def along(preparation: Preparation, directions: Float[np.ndarray, "dim dim"]) -> Preparation:
    """The same rows, as coordinates along these directions, the columns."""
    whitening = np.asarray(preparation.whitening, np.float64) @ directions
    return Preparation(preparation.centre, jnp.asarray(whitening, jnp.float32))


def emphasise(preparation: Preparation, metaset: MetaSet, powers: Sequence[float]) -> list[Preparation]:
    """The same rows, longer along the directions in which the means of these classes differ, for each power q.

    By (b/(b + σ²))^q, where b is the variance between classes along a direction, and σ² that within them.
    """
    _, directions = np.linalg.eigh(np.cov(ClassMoments.of(preparation, metaset).means, rowvar=False))
    moments = ClassMoments.of(along(preparation, directions), metaset)
    between = np.maximum(moments.between(), 0)
    between += LEAST_BETWEEN * between.mean()
    shares = between / (between + moments.variances)
    return [along(preparation, directions * shares**power) for power in powers]


def whiten(metaset: MetaSet, powers: Sequence[float]) -> list[Preparation]:
    """The preparation by the rows of these classes, for each power p; they are read class by class, to bound memory."""
    total = int(metaset.counts.sum())
    centre = sum((length_one(rows).sum(0) for rows in by_class(metaset)), start=np.zeros(metaset.dim)) / total
    scatter = np.zeros((metaset.dim, metaset.dim))
    for rows in by_class(metaset):
        centred = length_one(length_one(rows) - centre)
        apart = centred - centred.mean(0)
        scatter += apart.T @ apart
    variances, directions = np.linalg.eigh(scatter / total)
    variances = np.maximum(variances, LEAST_VARIANCE * variances.max())
    centre = jnp.asarray(centre, jnp.float32)
    found = ((directions * variances**-power) @ directions.T for power in powers)
    return [Preparation(centre, jnp.asarray(matrix, jnp.float32)) for matrix in found]


class ClassMoments(NamedTuple):
    """Of prepared rows: the mean of each class, and the variance around it along each coordinate, over all classes."""

    means: Float[np.ndarray, "class dim"]
    variances: Float[np.ndarray, " dim"]
    counts: Int[np.ndarray, " class"]

    @classmethod
    def of(cls, preparation: Preparation, metaset: MetaSet) -> "ClassMoments":
        means, scatter = [], np.zeros(metaset.dim)
        for rows in by_class(metaset):
            prepared = np.asarray(preparation(jnp.asarray(rows, jnp.float32)), np.float64)
            means.append(prepared.mean(0))
            scatter += ((prepared - means[-1]) ** 2).sum(0)
        freedom = max(int(metaset.counts.sum()) - len(means), 1)
        return cls(np.stack(means), scatter / freedom, metaset.counts)

    def between(self) -> Float[np.ndarray, " dim"]:
        """The variance of class means along each coordinate, less what is due to means of few rows."""
        return self.means.var(0, ddof=1) - self.variances * (1 / self.counts).mean()


def length_one(rows: Float[np.ndarray, "row dim"]) -> Float[np.ndarray, "row dim"]:
    rows = np.asarray(rows, np.float64)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def by_class(metaset: MetaSet) -> Iterator[Float[np.ndarray, "row dim"]]:
    """The rows of each class."""
    for start, count in zip(metaset.starts, metaset.counts, strict=True):
        yield metaset.read(metaset.rows[start : start + count])
