"""Latent Embedding Optimization (Algorithm 1, with the fine-tuning of Section 4.2.3)."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from metaleo.inner_loop import descend, descend_linear
from metaleo.learners.learner import Adaptation, Hyper, Info, Learner, draw_masks, drop, judge
from metaleo.model.decoder import Decoder
from metaleo.model.encoder import Encoder
from metaleo.model.gaussian import (
    Gaussian,
    kl_to_standard,
    official_scale,
    sampled_kl_to_standard,
    smooth_scale,
)
from metaleo.model.heads import LinearHead
from metaleo.model.relation import RelationNet
from metaleo.objective import encoder_penalty, l2, orthogonality, support_loss
from metaleo.tasks.task import Batch, Task


class Noise(eqx.Module):
    """All the randomness of one adaptation, drawn at once; everything below it is deterministic."""

    code: Float[Array, "way latent"] | None  # none where only dropout is random
    weights: Float[Array, "decodings way dim"] | None  # a fresh draw per latent step, and one after the last
    encoder_mask: Bool[Array, "example dim"]
    latent_masks: Bool[Array, "latent_steps example dim"]
    finetune_masks: Bool[Array, "finetune_steps example dim"]
    keep: float | Float[Array, ""]


class Trace(eqx.Module):
    """The path of one adaptation, from the support set to the final weights."""

    code_distribution: Gaussian
    code: Float[Array, "way latent"]
    adapted_code: Float[Array, "way latent"]
    decoded_weights: Float[Array, "way dim"]
    support_losses: Float[Array, " steps"]  # before each latent step, each fine-tuning step, and at the end


class LEO(Learner):
    """Encode the support set to a code per class, descend on the codes, decode, fine-tune the weights.

    The paper's ablations (Table 2) are switches: no latent steps, no fine-tuning steps, `stochastic` off, or codes
    from the prior p(z) = N(0, 1) instead of an encoder.
    """

    encoder: Encoder | None
    relation: RelationNet | None
    decoder: Decoder
    latent_step_size: Float[Array, " latent"]
    finetune_step_size: Float[Array, " dim"]
    latent_steps: int = eqx.field(static=True)
    finetune_steps: int = eqx.field(static=True)
    stochastic: bool = eqx.field(static=True)
    """In training, codes and weights are drawn from their Gaussians; otherwise they are the means."""
    official: bool = eqx.field(static=True)
    """Scales and KL estimate exactly as in the authors' code, instead of the sound ones (docs/deviations.md)."""

    @classmethod
    def init(
        cls,
        key: PRNGKeyArray,
        dim: int,
        *,
        latent: int = 64,
        latent_steps: int = 5,
        finetune_steps: int = 5,
        latent_step_size: float | Float[Array, ""] = 1.0,
        finetune_step_size: float | Float[Array, ""] = 0.001,
        random_prior: bool = False,
        stochastic: bool = True,
        official: bool = False,
    ) -> "LEO":
        encoder_key, relation_key, decoder_key = jax.random.split(key, 3)
        return cls(
            None if random_prior else Encoder.init(encoder_key, dim, latent),
            None if random_prior else RelationNet.init(relation_key, latent),
            Decoder.init(decoder_key, latent, dim),
            jnp.full((latent,), latent_step_size),
            jnp.full((dim,), finetune_step_size),
            latent_steps,
            finetune_steps,
            stochastic,
            official,
        )

    def adapt(self, support: Batch, hyper: Hyper | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        if key is None:
            return self.adapt_with(support, None)
        assert hyper is not None, "sampling needs hyper.keep"
        return self.adapt_with(support, self.draw_noise(support, hyper, key))

    def adapt_with(self, support: Batch, noise: Noise | None) -> Adaptation:
        """Algorithm 1, lines 7-13, then fine-tuning, with the randomness given.

        The decoder being linear, x·(zD) = (xDᵀ)·z: latent steps see their inputs through Dᵀ, in as many numbers as a
        code has, and weights are decoded once, at the end. Only the noise on the weights needs their full size.
        """
        inputs = support.inputs

        def latent_loss(code, now):
            projected, noisy = now
            logits = projected @ code.T
            if noisy is not None:
                dropped, weights_noise = noisy
                logits += dropped @ (self.weights_scale(code) * weights_noise).T
            return support_loss(logits, support)

        codes = self.encode(support, noise)
        code = codes.sample(None if noise is None else noise.code)
        if noise is None:
            finetune_inputs = inputs[None]  # one draw serves all steps
            projected = inputs @ self.decoder.to_mean.T
            seen = jnp.broadcast_to(projected, (self.latent_steps, *projected.shape)), None
        else:
            drop_each = jax.vmap(drop, (None, 0, None))
            finetune_inputs = drop_each(inputs, noise.finetune_masks, noise.keep)
            latent_inputs = drop_each(inputs, noise.latent_masks, noise.keep)
            noisy = None if noise.weights is None else (latent_inputs, noise.weights[:-1])
            seen = latent_inputs @ self.decoder.to_mean.T, noisy
        adapted, latent_losses = descend(latent_loss, code, self.latent_step_size[None, :], self.latent_steps, seen)
        decoded = self.decode(adapted, None if noise is None or noise.weights is None else noise.weights[-1])
        weights, finetune_losses = descend_linear(
            decoded, self.finetune_step_size, self.finetune_steps, finetune_inputs, support
        )
        final_loss = support_loss(jax.vmap(LinearHead(weights))(inputs), support)
        losses = jnp.concatenate([latent_losses, finetune_losses, final_loss[None]])
        return Adaptation(LinearHead(weights), Trace(codes, code, adapted, decoded, losses))

    def encode(self, support: Batch, noise: Noise | None) -> Gaussian:
        """q(z_n | D_n) for every class n (Eq. 3)."""
        if self.encoder is None or self.relation is None:
            shape, dtype = (support.way, len(self.latent_step_size)), support.inputs.dtype
            return Gaussian(jnp.zeros(shape, dtype), jnp.ones(shape, dtype))
        inputs = support.inputs if noise is None else drop(support.inputs, noise.encoder_mask, noise.keep)
        statistics = self.relation(self.encoder(inputs), support)
        mean, raw_scale = jnp.split(statistics, 2, axis=1)  # (way, latent) each
        scale = official_scale(raw_scale, 0.0) if self.official else smooth_scale(raw_scale, LATENT_SCALE)
        return Gaussian(mean, scale)

    def decode(
        self, code: Float[Array, "way latent"], noise: Float[Array, "way dim"] | None
    ) -> Float[Array, "way dim"]:
        """w_n ~ p(w | z_n) for every class n (Eq. 4)."""
        mean = code @ self.decoder.to_mean
        return mean if noise is None else Gaussian(mean, self.weights_scale(code)).sample(noise)

    def weights_scale(self, code: Float[Array, "way latent"]) -> Float[Array, "way dim"]:
        raw_scale = code @ self.decoder.to_raw_scale
        to_scale = official_scale if self.official else smooth_scale
        return to_scale(raw_scale, math.sqrt(2 / sum(raw_scale.shape)))

    def draw_noise(self, support: Batch, hyper: Hyper, key: PRNGKeyArray) -> Noise:
        code_key, weights_key, mask_key = jax.random.split(key, 3)
        latent, (_, dim), way = len(self.latent_step_size), support.inputs.shape, support.way
        dtype = support.inputs.dtype
        masks = draw_masks(mask_key, hyper.keep, (1 + self.latent_steps + self.finetune_steps, *support.inputs.shape))
        return Noise(
            jax.random.normal(code_key, (way, latent), dtype) if self.stochastic else None,
            jax.random.normal(weights_key, (self.latent_steps + 1, way, dim), dtype) if self.stochastic else None,
            masks[0],
            masks[1 : 1 + self.latent_steps],
            masks[1 + self.latent_steps :],
            hyper.keep,
        )

    def meta_loss(self, task: Task, hyper: Hyper, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Info]:
        """Eq. 6 for one task; the regularisers of Eq. 7 are the same for every task of a meta-batch."""
        if key is None:
            return self.meta_loss_with(task, hyper, None, None)
        adapt_key, query_key = jax.random.split(key)
        return self.meta_loss_with(task, hyper, self.draw_noise(task.support, hyper, adapt_key), query_key)

    def meta_loss_with(
        self, task: Task, hyper: Hyper, noise: Noise | None, query_key: PRNGKeyArray | None
    ) -> tuple[Float[Array, ""], Info]:
        adaptation = self.adapt_with(task.support, noise)
        trace: Trace = adaptation.trace
        loss, info = judge(adaptation.head, task.query, hyper, query_key)
        loss += hyper.l2 * l2(*jax.tree.leaves((self.encoder, self.relation, self.decoder)))
        loss += hyper.orthogonality * orthogonality(self.decoder.weight)
        if noise is not None:  # what shapes the encoder; in evaluation there are only codes
            penalty = encoder_penalty(trace.code, trace.adapted_code)
            loss += hyper.encoder_penalty * penalty
            info |= {"encoder_penalty": penalty}
        if noise is not None and noise.code is not None:
            codes = trace.code_distribution
            kl = sampled_kl_to_standard(codes, noise.code) if self.official else kl_to_standard(codes)
            loss += hyper.kl * kl
            info |= {"kl": kl}
        return loss, info


LATENT_SCALE = 0.1
"""σ of a code where the relation net says 0. The authors' code starts at 0, where the KL term is infinite."""
