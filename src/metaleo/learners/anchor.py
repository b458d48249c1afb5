"""Anchors: classifiers in closed form to which LEO adds what it decodes."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from metaleo.learners.linear import present, solve
from metaleo.nn.heads import AffineHead, Embedding, Head
from metaleo.tasks.preparation import Preparation
from metaleo.tasks.task import Batch, normalise

ANCHORS = {"centroid": 0, "ridge": 1, "logistic": 10}
"""Steps of `Anchor.fit` by the name of an anchor."""
NO_EXAMPLES = -1e9
"""Logit of a class that has no examples: its probability is zero."""


class Anchor(eqx.Module):
    """The classifier that an anchored LEO is before it is trained; what LEO decodes is added to it.

    `centroids` is a nearest-centroid classifier with a prior: the fewer examples a class has, the more its mean gives
    way to the mean of the training classes that are like it. `fit` takes any weights as the prior mean of a logistic
    regression on the support set; it changes little with one example per class, and much with twenty.

    All scalars are learned, as logarithms. The means are measured on the training classes and stay as they are.
    """

    preparation: Preparation
    embedding: Embedding
    """E: everything happens in E x, a learned linear map that starts as the identity."""
    means: Float[Array, "class dim"]
    """The mean of each training class; μ_j is E times it."""
    log_prior_shots: Float[Array, ""]
    """κ: the prior mean counts as much as this many examples."""
    log_focus: Float[Array, ""]
    """τ: how much only the most similar training classes count in the prior mean."""
    log_sharpness: Float[Array, ""]
    """s: factor on squared distances."""
    log_regulariser: Float[Array, ""]
    """λ: how strongly `fit` holds weights to their prior mean."""
    steps: int = eqx.field(static=True)

    @classmethod
    def init(
        cls, preparation: Preparation, means: Float[Array, "class dim"], kind: str = "logistic",
        *, prior_shots: float = 1.0, focus: float = 10.0, sharpness: float = 5.0, regulariser: float = 0.3,
    ) -> "Anchor":  # fmt: skip
        scalars = prior_shots, focus, sharpness, regulariser
        embedding = Embedding.init(means.shape[1])
        return cls(preparation, embedding, means, *map(logarithm, scalars), steps=ANCHORS[kind])

    @classmethod
    def blank(cls, kind: str, dim: int, classes: int) -> "Anchor":
        """Of data that nothing is known of: rows are only scaled to length one, and all class means are zero."""
        return cls.init(Preparation(jnp.zeros(dim), jnp.eye(dim)), jnp.zeros((max(classes, 1), dim)), kind)

    def embed(self, support: Batch) -> Batch:
        """The support set in E x."""
        return Batch(self.embedding(support.inputs), support.targets, support.mask)

    def unembed(self, head: Head) -> Head:
        """A head on E x as one on x."""
        assert isinstance(head, AffineHead)
        return AffineHead(self.embedding.transpose(head.weights), head.bias)

    def prior_means(self, centroids: Float[Array, "way dim"], training: bool) -> Float[Array, "way dim"]:
        """m_n = Σ_j a_nj μ_j, where a_n = softmax_j(τ cos(x̄_n, μ_j)).

        In training the most similar μ_j is left out, which is nearly always the class itself: otherwise the prior mean
        of a training class would be its true mean, and that of a new class nothing like it.
        """
        means = self.embedding(jax.lax.stop_gradient(self.means))
        cosines = normalise(centroids) @ normalise(means).T
        if training:
            itself = jax.nn.one_hot(jnp.argmax(cosines, axis=1), len(means), dtype=cosines.dtype)
            cosines = jnp.where(itself > 0, -jnp.ones_like(cosines), cosines)
        return jax.nn.softmax(jnp.exp(self.log_focus) * cosines, axis=1) @ means

    def centroids(self, support: Batch, training: bool = False) -> Float[Array, "way size"]:
        """w_n = 2s c_n and b_n = -s|c_n|², where c_n = (κ m_n + K_n x̄_n) / (κ + K_n): logits -s|x - c_n|² + s|x|²."""
        counts, means = support.class_counts()[:, None], support.class_weights() @ support.inputs
        shots = jnp.exp(self.log_prior_shots)
        centres = (shots * self.prior_means(means, training) + counts * means) / (shots + counts)
        sharpness = jnp.exp(self.log_sharpness)
        bias = jnp.where(counts > 0, -sharpness * jnp.sum(centres**2, axis=1, keepdims=True), NO_EXAMPLES)
        return jnp.concatenate([2 * sharpness * centres, bias], axis=1)

    def fit(self, prior: Float[Array, "way size"], support: Batch) -> Float[Array, "way size"]:
        """min_θ Σ_i cross-entropy(θ x_i, y_i) + λ/2 |θ - prior|², by a few steps.

        θ = prior + AᵀX / λ, where A = Y - softmax(X θᵀ) at the minimum. Each step is Newton's with ½ as the bound of
        the softmax's second derivative, which never overshoots and needs one inverse in all (Böhning and Lindsay 1988).
        The first alone is a ridge regression on what the prior leaves over.
        """
        if self.steps == 0:
            return prior
        ones = jnp.ones((len(support.inputs), 1), support.inputs.dtype)
        inputs = present(jnp.concatenate([support.inputs, ones], axis=1), support)
        targets, before = present(support.targets, support), inputs @ prior.T
        products = inputs @ inputs.T / jnp.exp(self.log_regulariser)
        identity = jnp.eye(len(inputs), dtype=inputs.dtype)
        inverse = solve(identity + products / 2, identity)

        def step(dual: Float[Array, "example way"], _: None) -> tuple[Float[Array, "example way"], None]:
            left_over = targets - present(jax.nn.softmax(before + products @ dual), support)
            return dual + inverse @ (left_over - dual), None

        dual, _ = jax.lax.scan(step, jnp.zeros_like(targets), length=self.steps)
        return prior + dual.T @ inputs / jnp.exp(self.log_regulariser)


def logarithm(value: float) -> Float[Array, ""]:
    return jnp.full((), math.log(value))
