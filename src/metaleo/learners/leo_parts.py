"""What LEO is made of, what it draws before it adapts to a task, and what it leaves behind on its way."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from metaleo._jax.random import dropout_masks, normals
from metaleo.learners.base import CODE, SUPPORT, WEIGHTS, HyperParams, Learner
from metaleo.nn.encoder_decoder import Decoder, Encoder, Gaussian, RelationNet
from metaleo.nn.heads import Network
from metaleo.tasks.task import Batch

Codes = Float[Array, "code latent"]
Weights = Float[Array, "code size"]
Losses = Float[Array, " step"]
Parts = TypeVar("Parts", bound="LEOParts")


class LEOParts(Learner):
    """φ of LEO (encoder, relation net, decoder, step sizes), and the structure around it."""

    encoder: Encoder | None
    relation: RelationNet | None
    decoder: Decoder
    latent_step_size: Float[Array, " latent"]
    finetune_step_size: Float[Array, " size"]
    network: Network = eqx.field(static=True)
    latent_steps: int = eqx.field(static=True)
    finetune_steps: int = eqx.field(static=True)
    stochastic: bool = eqx.field(static=True, default=True)
    """In training, codes and weights are drawn from their Gaussians; otherwise they are the means."""
    official: bool = eqx.field(static=True, default=False)
    """Scales and KL estimate exactly as in the authors' code, instead of the sound ones (docs/deviations.md)."""
    samples: int = eqx.field(static=True, default=1)
    """Solutions of a training task that are sampled and judged together (docs/regression.md)."""
    max_grad_norm: float | None = eqx.field(static=True, default=None)
    """On the length of each inner gradient, for networks and decoders that are not linear."""

    @classmethod
    def init(
        cls: type[Parts],
        key: PRNGKeyArray,
        network: Network,
        *,
        latent: int = 64,
        widths: tuple[int, ...] = (),
        latent_steps: int = 5,
        finetune_steps: int = 5,
        latent_step_size: float | Float[Array, ""] = 1.0,
        finetune_step_size: float | Float[Array, ""] = 0.001,
        from_start: bool = False,
        random_prior: bool = False,
        **switches: Any,
    ) -> Parts:
        """A fresh LEO.

        Args:
            key: Of the initial weights.
            network: What is generated: `linear_network(dim)` is the paper's classifier.
            latent: Numbers of a code.
            widths: Of hidden layers in encoder and decoder; none of them, as in the paper, leaves both linear.
            latent_steps: Gradient steps on the codes.
            finetune_steps: Gradient steps on the weights.
            latent_step_size: Where the learned step sizes for codes start.
            finetune_step_size: Where the learned step sizes for weights start.
            from_start: Decode departures from `network.start`, which is then learned too.
            random_prior: Take codes from the prior, without an encoder.
            switches: The fields `stochastic`, `official`, `samples` and `max_grad_norm`.

        Returns:
            A learner to be meta-trained.
        """
        encoder_key, relation_key, decoder_key = jax.random.split(key, 3)
        encoder = None if random_prior else Encoder.init(encoder_key, network.evidence, latent, widths)
        relation = None if random_prior else RelationNet.init(relation_key, latent)
        decoder = Decoder.init(decoder_key, latent, network.size, widths, network.start if from_start else None)
        step_sizes = jnp.full((latent,), latent_step_size), jnp.full((network.size,), finetune_step_size)
        return cls(encoder, relation, decoder, *step_sizes, network, latent_steps, finetune_steps, **switches)


class Noise(eqx.Module):
    """All the randomness of one adaptation, drawn at once; everything after it is deterministic.

    What is None is not random: codes and weights are then the means, and nothing is dropped.
    """

    code: Codes | None = None
    weights: Float[Array, "decodings code size"] | None = None  # a fresh draw per latent step, and one after the last
    encoder_mask: Bool[Array, "example dim"] | None = None
    latent_masks: Bool[Array, "latent_steps example dim"] | None = None
    finetune_masks: Bool[Array, "finetune_steps example dim"] | None = None
    keep_prob: float | Float[Array, ""] = 1.0


class Trace(eqx.Module):
    """The path of one adaptation, from the support set to the final weights."""

    code_distribution: Gaussian
    code: Codes
    adapted_code: Codes
    decoded_weights: Weights
    support_losses: Losses | None = None  # before each latent step, each fine-tuning step, and at the end


def draw_noise(leo: LEOParts, support: Batch, hyper: HyperParams | None, key: PRNGKeyArray) -> Noise:
    """One draw of codes, weights and dropout; without hyper-parameters nothing is dropped."""
    latent, codes, dtype = len(leo.latent_step_size), leo.network.codes(support), support.inputs.dtype
    noise = Noise()
    if leo.stochastic:
        code = normals(key, (codes, latent), CODE).astype(dtype)
        noise = Noise(code, normals(key, (leo.latent_steps + 1, codes, leo.network.size), WEIGHTS).astype(dtype))
    if hyper is None or not leo.network.dropout:
        return noise
    shape = (1 + leo.latent_steps + leo.finetune_steps, *support.inputs.shape)
    kept = dropout_masks(key, hyper.keep_prob, shape, SUPPORT)
    encoder_mask, latent_masks, finetune_masks = jnp.split(kept, [1, 1 + leo.latent_steps])
    return Noise(noise.code, noise.weights, encoder_mask[0], latent_masks, finetune_masks, hyper.keep_prob)
