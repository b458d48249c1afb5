"""Learners that compare inputs with the support set instead of taking gradient steps."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.nn.initializers import glorot_uniform
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.learners.base import Adaptation, HyperParams, Learner, Metrics, dropout_inputs, query_loss_and_metrics
from metaleo.losses import l2
from metaleo.nn.heads import (
    AffineHead,
    AttentionHead,
    CentredHead,
    Embedding,
    LinearHead,
    RelationHead,
    nearest_centroid_head,
)
from metaleo.tasks.task import Batch, Task, normalise


class NearestCentroid(Learner):
    """Cosine to each class's mean, times a fixed sharpness. Nothing is learned: a baseline for all other learners.

    Attributes:
        sharpness: Factor on the cosines.

    Examples:
        >>> import jax
        >>> from metaleo import NearestCentroid, labelled
        >>> learner = NearestCentroid()
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    sharpness: float = eqx.field(static=True, default=10.0)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        del hyper, key
        centroids = support.class_weights() @ support.inputs
        norms = jnp.linalg.norm(centroids, axis=1, keepdims=True)
        return Adaptation(LinearHead(self.sharpness * centroids / jnp.maximum(norms, 1e-12)))

    def meta_loss(self, task: Task, hyper: HyperParams, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Metrics]:
        return query_loss_and_metrics(self.adapt(task.support).head, task.query, hyper, None)


class CL2N(Learner):
    """Nearest centroid on features centred on the training mean, then normalised (SimpleShot, Wang et al. 2019).

    Args (of `CL2N.init`):
        key: Not used; accepted for consistency with other learners.
        dim: Numbers per example.
        sharpness: Factor on the squared distances.

    Examples:
        >>> import jax
        >>> from metaleo import CL2N, labelled
        >>> learner = CL2N.init(jax.random.key(0), dim=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    centre: Float[Array, " dim"]
    sharpness: float = eqx.field(static=True)

    @classmethod
    def init(cls, key: PRNGKeyArray, dim: int, *, sharpness: float = 5.0) -> "CL2N":
        del key
        return cls(jnp.zeros(dim), sharpness)  # -5|u - c|² grows like the 10 cos of `NearestCentroid`

    def with_feature_mean(self, mean: Float[Array, " dim"]) -> "CL2N":
        return dataclasses.replace(self, centre=mean)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        del hyper, key
        centroids = support.class_weights() @ normalise(support.inputs - self.centre[None, :])
        return Adaptation(CentredHead(self.centre, nearest_centroid_head(centroids, self.sharpness)))

    def meta_loss(self, task: Task, hyper: HyperParams, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Metrics]:
        return query_loss_and_metrics(self.adapt(task.support).head, task.query, hyper, None)


class PrototypicalNet(Learner):
    """-s|E x - c_n|², where c_n is the mean of a class's embedded examples (Snell et al. 2017).

    The term -s|E x|², which all classes share, is omitted, so logits are affine in x.

    Args (of `PrototypicalNet.init`):
        key: Not used; accepted for consistency with other learners.
        dim: Numbers per example.
        sharpness: Initial value of the learned s.

    Examples:
        >>> import jax
        >>> from metaleo import PrototypicalNet, labelled
        >>> learner = PrototypicalNet.init(jax.random.key(0), dim=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    embedding: Embedding
    log_sharpness: Float[Array, ""]

    @classmethod
    def init(cls, key: PRNGKeyArray, dim: int, *, sharpness: float = 10.0) -> "PrototypicalNet":
        del key
        return cls(Embedding.init(dim), jnp.full((), math.log(sharpness)))

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        prototypes = support.class_weights() @ self.embedding(dropout_inputs(support, hyper, key))
        head = nearest_centroid_head(prototypes, jnp.exp(self.log_sharpness))
        return Adaptation(AffineHead(self.embedding.transpose(head.weights), head.bias))

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return hyper.l2 * l2(self.embedding.departure)


class FEAT(Learner):
    """A prototypical net whose prototypes look at each other, by one head of attention (Ye et al. 2020).

    c′_n = c_n + W_o Σ_m a_nm W_v l_m, where a_n = softmax_m(√d (W_q l_n)·(W_k l_m)) and l_n is c_n after layer
    normalisation to length one; logits are -s|E x - c′_n|². W_o starts at zero, so c′ starts as c: untrained, it is a
    prototypical net. For that, the normalisation is on the way into the attention; theirs is behind the sum.

    Args (of `FEAT.init`):
        key: Random key for the initial weights.
        dim: Numbers per example.
        sharpness: Initial value of the learned s.

    Examples:
        >>> import jax
        >>> from metaleo import FEAT, labelled
        >>> learner = FEAT.init(jax.random.key(0), dim=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    embedding: Embedding
    to_query: Float[Array, "dim dim"]
    to_key: Float[Array, "dim dim"]
    to_value: Float[Array, "dim dim"]
    to_output: Float[Array, "dim dim"]
    log_sharpness: Float[Array, ""]

    @classmethod
    def init(cls, key: PRNGKeyArray, dim: int, *, sharpness: float = 10.0) -> "FEAT":
        to_query, to_key, to_value = (glorot_uniform()(one, (dim, dim)) for one in jax.random.split(key, 3))
        log_sharpness = jnp.full((), math.log(sharpness))
        return cls(Embedding.init(dim), to_query, to_key, to_value, jnp.zeros((dim, dim)), log_sharpness)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        prototypes = support.class_weights() @ self.embedding(dropout_inputs(support, hyper, key))
        head = nearest_centroid_head(prototypes + self.attend(prototypes), jnp.exp(self.log_sharpness))
        return Adaptation(AffineHead(self.embedding.transpose(head.weights), head.bias))

    def attend(self, prototypes: Float[Array, "way dim"]) -> Float[Array, "way dim"]:
        """What each prototype learns from all."""
        root = math.sqrt(prototypes.shape[1])
        rows = jax.nn.standardize(prototypes, axis=1) / root
        scores = root * (rows @ self.to_query) @ (rows @ self.to_key).T
        return jax.nn.softmax(scores, axis=1) @ (rows @ self.to_value) @ self.to_output

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        learned = self.embedding.departure, self.to_query, self.to_key, self.to_value, self.to_output
        return hyper.l2 * l2(*learned)


class MatchingNet(Learner):
    """Attention to the support examples by cosine; each example votes for its class (Vinyals et al. 2016).

    This omits their full context embeddings: an example's embedding does not depend on the others.

    Args (of `MatchingNet.init`):
        key: Not used; accepted for consistency with other learners.
        dim: Numbers per example.
        sharpness: Initial value of the learned factor on cosines.

    Examples:
        >>> import jax
        >>> from metaleo import MatchingNet, labelled
        >>> learner = MatchingNet.init(jax.random.key(0), dim=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    embedding: Embedding
    log_sharpness: Float[Array, ""]

    @classmethod
    def init(cls, key: PRNGKeyArray, dim: int, *, sharpness: float = 10.0) -> "MatchingNet":
        del key
        return cls(Embedding.init(dim), jnp.full((), math.log(sharpness)))

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        examples = normalise(self.embedding(dropout_inputs(support, hyper, key)))
        members = support.targets * support.mask[:, None].astype(support.targets.dtype)
        return Adaptation(AttentionHead(self.embedding, examples, members, jnp.exp(self.log_sharpness)))

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return hyper.l2 * l2(self.embedding.departure)


class RelationNetLearner(Learner):
    """A learned comparison of an input with the mean of a class's embedded examples (Sung et al. 2018).

    The loss is the cross-entropy of a softmax over classes, instead of their squared errors of sigmoids, so that
    likelihoods are comparable with those of other learners.

    Args (of `RelationNetLearner.init`):
        key: Random key for the initial weights.
        dim: Numbers per example.
        hidden: Units of each hidden layer.
        sharpness: Initial value of the learned factor on scores.

    Examples:
        >>> import jax
        >>> from metaleo import RelationNetLearner, labelled
        >>> learner = RelationNetLearner.init(jax.random.key(0), dim=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    embedding: Embedding
    for_class: Float[Array, "dim hidden"]
    for_input: Float[Array, "dim hidden"]
    middle: Float[Array, "hidden hidden"]
    last: Float[Array, " hidden"]
    log_sharpness: Float[Array, ""]

    @classmethod
    def init(cls, key: PRNGKeyArray, dim: int, *, hidden: int = 128, sharpness: float = 10.0) -> "RelationNetLearner":
        first_key, middle_key, last_key = jax.random.split(key, 3)
        first = glorot_uniform()(first_key, (2 * dim, hidden))
        return cls(
            Embedding.init(dim),
            first[:dim],
            first[dim:],
            glorot_uniform()(middle_key, (hidden, hidden)),
            glorot_uniform()(last_key, (hidden, 1))[:, 0],
            jnp.full((), math.log(sharpness)),
        )

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        classes = support.class_weights() @ self.embedding(dropout_inputs(support, hyper, key))
        head = RelationHead(
            self.embedding,
            classes @ self.for_class,
            self.for_input,
            self.middle,
            self.last,
            jnp.exp(self.log_sharpness),
        )
        return Adaptation(head)

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return hyper.l2 * l2(self.embedding.departure, self.for_class, self.for_input, self.middle, self.last)
