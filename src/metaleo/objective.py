"""What is minimised: the loss of a task (Eq. 5), and the terms that are added to it (Eq. 6, Eq. 7)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from metaleo.tasks.task import Batch


def cross_entropy(
    logits: Float[Array, "example way"], targets: Float[Array, "example way"]
) -> Float[Array, " example"]:
    """-w_y·x + log Σ_j exp(w_j·x), of each example (Eq. 5)."""
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)


def mean_where(values: Float[Array, " example"], mask: Bool[Array, " example"]) -> Float[Array, ""]:
    return jnp.sum(values, where=mask) / jnp.sum(mask.astype(values.dtype))


def support_loss(logits: Float[Array, "example way"], support: Batch) -> Float[Array, ""]:
    """The inner loss: the sum over the support set divided by its shots, K = examples / ways (Eq. 5)."""
    return support.way * mean_where(cross_entropy(logits, support.targets), support.mask)


def query_loss(logits: Float[Array, "example way"], query: Batch) -> Float[Array, ""]:
    """The outer loss: the mean over the query set (the first term of Eq. 6)."""
    return mean_where(cross_entropy(logits, query.targets), query.mask)


def accuracy(logits: Float[Array, "example way"], batch: Batch) -> Float[Array, ""]:
    correct = jnp.argmax(logits, -1) == jnp.argmax(batch.targets, -1)
    return mean_where(correct.astype(logits.dtype), batch.mask)


def encoder_penalty(codes: Float[Array, "way latent"], adapted_codes: Float[Array, "way latent"]) -> Float[Array, ""]:
    """mean (stopgrad(z′) - z)²: the encoder is drawn to the adapted code, never the other way (Eq. 6)."""
    return jnp.mean((jax.lax.stop_gradient(adapted_codes) - codes) ** 2)


def l2(*weights: Float[Array, "..."]) -> Float[Array, ""]:
    """½ Σ w² (the first term of Eq. 7)."""
    return sum((jnp.sum(weight**2) for weight in weights), start=jnp.zeros((), weights[0].dtype)) / 2


def orthogonality(decoder_weight: Float[Array, "latent out"]) -> Float[Array, ""]:
    """mean (C - I)², C the cosines between the decoder's rows, one per latent dimension (Eq. 7)."""
    norms = jnp.linalg.norm(decoder_weight, axis=1, keepdims=True)
    rows = decoder_weight / jnp.maximum(norms, 1e-12)
    return jnp.mean((rows @ rows.T - jnp.eye(len(rows), dtype=rows.dtype)) ** 2)
