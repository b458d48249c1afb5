"""Loss functions: the loss of a task (Eq. 5), and the terms that are added to it (Eq. 6, Eq. 7)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from metaleo.tasks.task import Batch


def cross_entropy(
    logits: Float[Array, "*example way"], targets: Float[Array, "*example way"]
) -> Float[Array, "*example"]:
    """-w_y·x + log Σ_j exp(w_j·x) for each example (Eq. 5)."""
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)


def mean_where(values: Float[Array, " example"], mask: Bool[Array, " example"]) -> Float[Array, ""]:
    return jnp.sum(values, where=mask) / jnp.sum(mask.astype(values.dtype))


def support_loss(logits: Float[Array, "example way"], support: Batch) -> Float[Array, ""]:
    """The inner loss: the sum over the support set divided by its shots, K = examples / ways (Eq. 5)."""
    return support.way * mean_where(cross_entropy(logits, support.targets), support.mask)


def query_loss(
    predictions: Float[Array, "example ..."], query: Batch, loss: Callable[..., Float[Array, ""]] = cross_entropy
) -> Float[Array, ""]:
    """The outer loss: the mean over the query set (the first term of Eq. 6)."""
    return mean_where(jax.vmap(loss)(predictions, query.targets), query.mask)


def mixture_loss(losses: Float[Array, " sample"], query: Batch) -> Float[Array, ""]:
    """-(1/Q) log (1/M) Σ_m exp(-Q L_m): the joint loss of M sampled solutions with mean losses L_m.

    If the losses are negative log-likelihoods, this is the negative log-likelihood of the mixture of samples, with all
    Q query examples taken jointly. It is lowest if the samples are as spread out as the plausible solutions. With one
    sample it is the query loss of Eq. 6.
    """
    examples = jnp.sum(query.mask.astype(losses.dtype))
    return (jnp.log(jnp.asarray(len(losses), losses.dtype)) - jax.nn.logsumexp(-examples * losses)) / examples


def accuracy(logits: Float[Array, "example way"], batch: Batch) -> Float[Array, ""]:
    correct = jnp.argmax(logits, -1) == jnp.argmax(batch.targets, -1)
    return mean_where(correct.astype(logits.dtype), batch.mask)


def encoder_penalty(codes: Float[Array, "way latent"], adapted_codes: Float[Array, "way latent"]) -> Float[Array, ""]:
    """mean (stopgrad(z′) - z)²: pulls the encoder towards the adapted code, never the other way round (Eq. 6)."""
    return jnp.mean((jax.lax.stop_gradient(adapted_codes) - codes) ** 2)


def l2(*weights: Float[Array, "..."]) -> Float[Array, ""]:
    """½ Σ w² (the first term of Eq. 7)."""
    return sum((jnp.sum(weight**2) for weight in weights), start=jnp.zeros((), weights[0].dtype)) / 2


def orthogonality(*layers: Float[Array, "_ _"]) -> Float[Array, ""]:
    """mean (C - I)², where C holds the cosines between rows of a decoder layer, one row per latent dimension (Eq. 7).

    For several layers, this is their mean.
    """

    def of_layer(weight: Float[Array, "latent out"]) -> Float[Array, ""]:
        squares = jnp.sum(weight**2, axis=1, keepdims=True)
        rows = weight * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))  # a zero row has no direction: its gradient is zero
        return jnp.mean((rows @ rows.T - jnp.eye(len(weight), dtype=weight.dtype)) ** 2)

    return sum(map(of_layer, layers), start=jnp.zeros((), layers[0].dtype)) / len(layers)
