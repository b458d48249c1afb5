"""What a learner hands back: a classifier, or another function, for the task at hand."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from metaleo.data.rows import normalise
from metaleo.model.embedding import Embedding


class Head(eqx.Module):
    """What a task's solution is called on: ONE input. A classifier returns logits."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*input"]) -> Float[Array, "*output"]: ...


class LinearHead(Head):
    """An N-way softmax classifier: one row of weights per class, no bias."""

    weights: Float[Array, "way dim"]

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        return self.weights @ x


class AffineHead(Head):
    """The same with a bias per class."""

    weights: Float[Array, "way dim"]
    bias: Float[Array, " way"]

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        return self.weights @ x + self.bias


class CentredHead(Head):
    """An affine head on u = (x - m) / |x - m|."""

    centre: Float[Array, " dim"]
    affine: AffineHead

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        return self.affine(normalise(x - self.centre))


class AttentionHead(Head):
    """log Σ_i y_i exp(s cos(E x, E x_i)) over the support set, up to a constant: log of where attention goes."""

    embedding: Embedding
    examples: Float[Array, "example dim"]  # embedded, of length one
    members: Float[Array, "example way"]  # y_i, zero for padding
    sharpness: Float[Array, ""]

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        scores = self.sharpness * (self.examples @ normalise(self.embedding(x)))
        return jax.nn.logsumexp(scores[:, None], axis=0, b=self.members)


class RelationHead(Head):
    """s g([c_n, E x]) for each class n, g an MLP with ReLU between its layers."""

    embedding: Embedding
    from_class: Float[Array, "way hidden"]  # the first layer's share of each class
    first: Float[Array, "dim hidden"]  # the first layer's half for an input
    middle: Float[Array, "hidden hidden"]
    last: Float[Array, " hidden"]
    sharpness: Float[Array, ""]

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        hidden = jax.nn.relu(self.from_class + (self.embedding(x) @ self.first)[None, :])
        return self.sharpness * (jax.nn.relu(hidden @ self.middle) @ self.last)


def nearest(centroids: Float[Array, "way dim"], sharpness: float | Float[Array, ""]) -> AffineHead:
    """-s|x - c|² for each centroid c, less the -s|x|² that they share: s(2c·x - |c|²)."""
    return AffineHead(2 * sharpness * centroids, -sharpness * jnp.sum(centroids**2, axis=1))
