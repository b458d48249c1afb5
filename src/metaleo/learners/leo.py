"""Latent Embedding Optimization: Algorithm 1 of the paper for one task, with the fine-tuning of Section 4.2.3."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.inner_loop import descend
from metaleo.learners.learner import Adaptation, Hyper, Info, Learner, descend_weights, drop, query_loss_and_metrics
from metaleo.learners.leo_path import Codes, Losses, Noise, Trace, Weights, draw
from metaleo.losses import encoder_penalty, l2, mixture_loss, orthogonality
from metaleo.model.decoder import Decoder
from metaleo.model.encoder import Encoder
from metaleo.model.gaussian import Gaussian, code_scale, kl_to_standard, sampled_kl_to_standard, weights_scale
from metaleo.model.network import Network
from metaleo.model.relation import RelationNet
from metaleo.tasks.task import Batch, Task


class LEO(Learner):
    """Encode the support set to codes, descend on the codes, decode, fine-tune the weights.

    A code per class, each for the weights of its class, or one code for all parameters of any network: `network` says.
    The paper's ablations (Table 2) are switches: no latent steps, no fine-tuning steps, `stochastic` off, or codes
    from the prior p(z) = N(0, 1) instead of an encoder.
    """

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
    limit: float | None = eqx.field(static=True, default=None)
    """On the length of each inner gradient, for networks and decoders that are not linear."""

    @classmethod
    def init(
        cls,
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
        **switches: Any,  # the last four fields above
    ) -> "LEO":
        """`widths`: of hidden layers in encoder and decoder. `from_start`: decoded is a departure from it."""
        encoder_key, relation_key, decoder_key = jax.random.split(key, 3)
        encoder = None if random_prior else Encoder.init(encoder_key, network.evidence, latent, widths)
        relation = None if random_prior else RelationNet.init(relation_key, latent)
        decoder = Decoder.init(decoder_key, latent, network.size, widths, network.start if from_start else None)
        step_sizes = jnp.full((latent,), latent_step_size), jnp.full((network.size,), finetune_step_size)
        return cls(encoder, relation, decoder, *step_sizes, network, latent_steps, finetune_steps, **switches)

    def adapt(self, support: Batch, hyper: Hyper | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        return self.adapt_with(support, None if key is None else draw(self, support, hyper, key))

    def adapt_with(self, support: Batch, noise: Noise | None) -> Adaptation:
        """Algorithm 1, lines 7-13, then fine-tuning, with the randomness given."""
        self.network.check(support)
        noise = noise or Noise()
        codes = self.encode(support, noise)
        code = codes.sample(noise.code)
        adapted, latent_losses = self.descend_codes(code, support, noise)
        decoded = self.decode(adapted, None if noise.weights is None else noise.weights[-1])
        weights, finetune_losses = self.descend_weights(decoded, support, noise)
        head = self.network.head(weights)
        final_loss = self.network.support_loss(jax.vmap(head)(support.inputs), support)
        losses = jnp.concatenate([latent_losses, finetune_losses, final_loss[None]])
        return Adaptation(head, Trace(codes, code, adapted, decoded, losses))

    def encode(self, support: Batch, noise: Noise) -> Gaussian:
        """q(z_n | D_n) for every class n (Eq. 3), or q(z | D) where one code stands for the task."""
        if self.encoder is None or self.relation is None:
            return Gaussian.standard((self.network.codes(support), len(self.latent_step_size)), support.inputs.dtype)
        inputs = drop(support.inputs, noise.encoder_mask, noise.keep)
        hidden = self.encoder(self.network.evidence_of(inputs, support.targets))
        mean, raw_scale = jnp.split(self.relation(hidden, support, self.network.per_class), 2, axis=1)
        return Gaussian(mean, code_scale(self.official)(raw_scale))

    def decode(self, code: Codes, noise: Weights | None) -> Weights:
        """θ ~ p(θ | z) for every code (Eq. 4); without noise, the mean."""
        mean, raw_scale = self.decoder(code)
        return Gaussian(mean, weights_scale(self.official, *mean.shape)(raw_scale)).sample(noise)

    def descend_codes(self, code: Codes, support: Batch, noise: Noise) -> tuple[Codes, Losses]:
        """z ← z - α ∘ ∇L(decode(z)), with fresh noise on the weights and fresh dropout at every step."""

        def loss(code: Codes, now: tuple[Array | None, Weights | None]) -> Float[Array, ""]:
            mask, weights_noise = now
            head = self.network.head(self.decode(code, weights_noise))
            return self.network.support_loss(jax.vmap(head)(drop(support.inputs, mask, noise.keep)), support)

        each_step = noise.latent_masks, None if noise.weights is None else noise.weights[:-1]
        return descend(loss, code, self.latent_step_size[None, :], self.latent_steps, each_step, limit=self.limit)

    def descend_weights(self, weights: Weights, support: Batch, noise: Noise) -> tuple[Weights, Losses]:
        """θ ← θ - α ∘ ∇L(θ), with fresh dropout at every step."""
        steps, dropout = (self.finetune_step_size[None, :], self.finetune_steps), (noise.finetune_masks, noise.keep)
        return descend_weights(self.network, weights, *steps, support, *dropout, limit=self.limit)

    def meta_loss(self, task: Task, hyper: Hyper, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Info]:
        """Eq. 6. Of several samples the query losses are joined by `mixture_loss`, and all else is averaged."""

        def with_key(key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Info]:
            noise = None if key is None else draw(self, task.support, hyper, key)
            adaptation = self.adapt_with(task.support, noise)
            loss, info = query_loss_and_metrics(adaptation.head, task.query, hyper, key, self.network)
            penalty, more = self.penalties(adaptation.trace, hyper, noise)
            return loss + penalty, info | more

        if key is None or self.samples == 1:
            return with_key(key)
        losses, infos = jax.vmap(with_key)(jax.random.split(key, self.samples))
        joined = mixture_loss(infos["query_loss"], task.query)
        return joined + jnp.mean(losses - infos["query_loss"]), jax.tree.map(jnp.mean, infos) | {"query_loss": joined}

    def penalties(self, trace: Trace, hyper: Hyper, noise: Noise | None) -> tuple[Float[Array, ""], Info]:
        """β KL(q(z | D) ‖ p(z)) + γ |stopgrad(z′) - z|² (Eq. 6): they shape the encoder, and evaluation has none."""
        info, codes = {}, trace.code_distribution
        if noise is not None:
            info["encoder_penalty"] = encoder_penalty(trace.code, trace.adapted_code)
        if noise is not None and noise.code is not None:
            info["kl"] = sampled_kl_to_standard(codes, noise.code) if self.official else kl_to_standard(codes)
        return sum((getattr(hyper, name) * info[name] for name in info), start=jnp.zeros((), codes.mean.dtype)), info

    def regulariser(self, hyper: Hyper) -> Float[Array, ""]:
        """λ₁ |φ|² + λ₂ |C_d - I| (Eq. 7)."""
        weights = jax.tree.leaves((self.encoder, self.relation, self.decoder))
        return hyper.l2 * l2(*weights) + hyper.orthogonality * orthogonality(*self.decoder.hidden, self.decoder.weight)
