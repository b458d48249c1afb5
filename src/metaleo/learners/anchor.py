"""Anchors: classifiers in closed form to which LEO adds what it decodes."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from metaleo.learners.linear import present, solve
from metaleo.tasks.preparation import Preparation
from metaleo.tasks.task import Batch

ANCHORS = {"centroid": 0, "ridge": 1, "logistic": 40}
"""Steps of `Anchor.fit` by the name of an anchor."""
NO_EXAMPLES = -1e9
"""Logit of a class that has no examples: its probability is zero."""


class Anchor(eqx.Module):
    """The classifier that an anchored LEO is before it is trained; what LEO decodes is added to it.

    Rows of a class are taken to scatter around its mean with the variance σ_j² along direction j, and the means of
    classes around m with the variance β_j. `centroids` gives the mean that a class then has by its examples; the fewer
    there are, the more it gives way to m, above all along directions in which classes differ little. `fit` takes any
    weights as the prior mean of a logistic regression on the support set: it changes little with one example per class,
    and much with twenty.

    m, σ_j² and κ_j are measured (`training.anchoring`) and stay as they are; s and λ are learned, as logarithms.
    """

    preparation: Preparation
    """Makes rows of directions j; its last part is a rotation."""
    mean: Float[Array, " dim"]
    """m, the mean of the means of the training classes."""
    variances: Float[Array, " dim"]
    """σ_j²."""
    prior_shots: Float[Array, " dim"]
    """κ_j = σ_j²/β_j: along direction j, m counts as much as so many examples."""
    log_sharpness: Float[Array, ""]
    """s: factor on squared distances."""
    log_regulariser: Float[Array, ""]
    """λ: how strongly `fit` holds weights to their prior mean."""
    steps: int = eqx.field(static=True)

    @classmethod
    def init(
        cls, preparation: Preparation, mean: Float[Array, " dim"], variances: Float[Array, " dim"],
        prior_shots: Float[Array, " dim"], kind: str = "logistic", *, sharpness: float = 3.0, regulariser: float = 0.1,
    ) -> "Anchor":  # fmt: skip
        scalars = (jnp.full((), math.log(value), float) for value in (sharpness, regulariser))
        return cls(preparation, mean, variances, prior_shots, *scalars, steps=ANCHORS[kind])

    @classmethod
    def blank(cls, kind: str, dim: int) -> "Anchor":
        """Of data that nothing is known of: plain centroids of rows of length one."""
        nothing = jnp.zeros(dim)
        return cls.init(Preparation(nothing, jnp.eye(dim)), nothing, nothing, nothing, kind)

    @property
    def measured(self) -> tuple[Float[Array, " dim"], Float[Array, " dim"]]:
        return self.variances, self.prior_shots

    def centroids(self, support: Batch, noise: Float[Array, "way dim"] | None = None) -> Float[Array, "way size"]:
        """w_n = 2s c_n and b_n = -s|c_n|²: logits -s|x - c_n|², up to a constant that all classes share.

        c_n = (κ m + K_n x̄_n) / (κ + K_n), the mean of N(c_n, σ²/(κ + K_n)), from which it is drawn if there is `noise`.
        """
        mean = jax.lax.stop_gradient(self.mean)
        variances, prior_shots = (jnp.maximum(jax.lax.stop_gradient(one), 0) for one in self.measured)
        counts = support.class_counts()[:, None]
        weight = jnp.maximum(prior_shots[None, :] + counts, 1e-6)
        centres = (prior_shots * mean)[None, :] + counts * (support.class_weights() @ support.inputs)
        centres /= weight
        if noise is not None:
            centres += jnp.sqrt(variances[None, :] / weight) * noise
        sharpness = jnp.exp(self.log_sharpness)
        bias = jnp.where(counts > 0, -sharpness * jnp.sum(centres**2, axis=1, keepdims=True), NO_EXAMPLES)
        return jnp.concatenate([2 * sharpness * centres, bias], axis=1)

    def fit(self, prior: Float[Array, "way size"], support: Batch) -> Float[Array, "way size"]:
        """min_θ Σ_i cross-entropy(θ x_i + log K, y_i) + λ/2 |θ - prior|², by a few steps.

        The number of examples of each class, K, stands for how frequent it is here, which says nothing about queries.
        θ = prior + AᵀX / λ, where A = Y - softmax(X θᵀ + log K) at the minimum. Each step is Newton's with ½ as the
        bound of the softmax's second derivative, which never overshoots and needs one inverse in all (Böhning and
        Lindsay 1988), from a point a little further along the last change (Nesterov 1983): 40 steps then do what takes
        hundreds without. The first alone is a ridge regression on what the prior leaves over.
        """
        if self.steps == 0:
            return prior
        ones = jnp.ones((len(support.inputs), 1), support.inputs.dtype)
        inputs = present(jnp.concatenate([support.inputs, ones], axis=1), support)
        frequent = jnp.log(jnp.maximum(support.class_counts(), 1))
        targets, before = present(support.targets, support), inputs @ prior.T + frequent[None, :]
        products = inputs @ inputs.T / jnp.exp(self.log_regulariser)
        identity = jnp.eye(len(inputs), dtype=inputs.dtype)
        inverse = solve(identity + products / 2, identity)

        def step(now: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], None]:
            dual, last = now
            ahead = dual + number / (number + 3) * (dual - last)
            left_over = targets - present(jax.nn.softmax(before + products @ ahead), support)
            return (ahead + inverse @ (left_over - ahead), dual), None

        start = jnp.zeros_like(targets)
        (dual, _), _ = jax.lax.scan(step, (start, start), jnp.arange(self.steps, dtype=inputs.dtype))
        return prior + dual.T @ inputs / jnp.exp(self.log_regulariser)
