"""The random draws of a LEO adaptation (`Noise`), and its intermediate results (`Trace`)."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from metaleo._jax.random import apply_dropout, dropout_masks, normals
from metaleo.learners.base import ANCHOR, CODE, SUPPORT, WEIGHTS, HyperParams
from metaleo.nn.encoder_decoder import Gaussian
from metaleo.tasks.task import Batch

Codes = Float[Array, "code latent"]
Weights = Float[Array, "code size"]
Losses = Float[Array, " step"]
Start = Float[Array, "code size"] | float
Step = float | Float[Array, ""]


class Noise(eqx.Module):
    """All random draws of one adaptation, made in advance; the adaptation itself is deterministic.

    A field that is None adds no randomness: codes and weights are then the means, and there is no dropout.
    """

    code: Codes | None = None
    weights: Float[Array, "decodings code size"] | None = None  # one draw per latent step, and one after the last
    encoder_mask: Bool[Array, "example dim"] | None = None
    latent_masks: Bool[Array, "latent_steps example dim"] | None = None
    finetune_masks: Bool[Array, "finetune_steps example dim"] | None = None
    keep_prob: float | Float[Array, ""] = 1.0
    anchor: Float[Array, "code dim"] | None = None  # on the centres of an anchor, in samples of a solution only


class Trace(eqx.Module):
    """Intermediate results of one adaptation."""

    code_distribution: Gaussian
    code: Codes
    adapted_code: Codes
    decoded_weights: Weights
    support_losses: Losses | None = None  # before each latent step, each fine-tuning step, and at the end


def draw_noise(leo: Any, support: Batch, hyper: HyperParams | None, key: PRNGKeyArray) -> Noise:
    """Draw the noise on codes and weights and the dropout masks for a `LEO`; without `hyper` there is no dropout."""
    latent, codes, dtype = len(leo.latent_step_size), leo.network.codes(support), support.inputs.dtype
    noise = Noise()
    if leo.stochastic:
        code = normals(key, (codes, latent), CODE).astype(dtype)
        weights = normals(key, (leo.latent_steps + 1, codes, leo.network.size), WEIGHTS).astype(dtype)
        noise = Noise(code, weights)
        if leo.anchor is not None and hyper is None:  # in training, it would hide what codes and weights can mend
            noise = Noise(code, weights, anchor=normals(key, (codes, support.inputs.shape[1]), ANCHOR).astype(dtype))
    if hyper is None or not leo.network.dropout:
        return noise
    shape = (1 + leo.latent_steps + leo.finetune_steps, *support.inputs.shape)
    kept = dropout_masks(key, hyper.keep_prob, shape, SUPPORT)
    encoder_mask, latent_masks, finetune_masks = jnp.split(kept, [1, 1 + leo.latent_steps])
    return Noise(noise.code, noise.weights, encoder_mask[0], latent_masks, finetune_masks, hyper.keep_prob)


def dropped(support: Batch, noise: Noise) -> Batch:
    """The support set with the dropout of the encoder's input."""
    inputs = apply_dropout(support.inputs, noise.encoder_mask, noise.keep_prob)
    return Batch(inputs, support.targets, support.mask)
