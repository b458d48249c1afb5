"""What LEO draws before it adapts to a task, and what it leaves behind on its way."""

from typing import TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from metaleo.learners.learner import CODE, SUPPORT, WEIGHTS, Hyper
from metaleo.model.gaussian import Gaussian
from metaleo.randomness import masks, normals
from metaleo.tasks.task import Batch

if TYPE_CHECKING:
    from metaleo.learners.leo import LEO

Codes = Float[Array, "code latent"]
Weights = Float[Array, "code size"]
Losses = Float[Array, " step"]


class Noise(eqx.Module):
    """All the randomness of one adaptation, drawn at once; everything after it is deterministic.

    What is None is not random: codes and weights are then the means, and nothing is dropped.
    """

    code: Codes | None = None
    weights: Float[Array, "decodings code size"] | None = None  # a fresh draw per latent step, and one after the last
    encoder_mask: Bool[Array, "example dim"] | None = None
    latent_masks: Bool[Array, "latent_steps example dim"] | None = None
    finetune_masks: Bool[Array, "finetune_steps example dim"] | None = None
    keep: float | Float[Array, ""] = 1.0


class Trace(eqx.Module):
    """The path of one adaptation, from the support set to the final weights."""

    code_distribution: Gaussian
    code: Codes
    adapted_code: Codes
    decoded_weights: Weights
    support_losses: Losses | None = None  # before each latent step, each fine-tuning step, and at the end


def draw(leo: "LEO", support: Batch, hyper: Hyper | None, key: PRNGKeyArray) -> Noise:
    """One draw of codes, weights and dropout; without hyper-parameters nothing is dropped."""
    latent, codes, dtype = len(leo.latent_step_size), leo.network.codes(support), support.inputs.dtype
    noise = Noise()
    if leo.stochastic:
        code = normals(key, (codes, latent), CODE).astype(dtype)
        noise = Noise(code, normals(key, (leo.latent_steps + 1, codes, leo.network.size), WEIGHTS).astype(dtype))
    if hyper is None or not leo.network.dropout:
        return noise
    shape = (1 + leo.latent_steps + leo.finetune_steps, *support.inputs.shape)
    kept = masks(key, hyper.keep, shape, SUPPORT)
    encoder_mask, latent_masks, finetune_masks = jnp.split(kept, [1, 1 + leo.latent_steps])
    return Noise(noise.code, noise.weights, encoder_mask[0], latent_masks, finetune_masks, hyper.keep)
