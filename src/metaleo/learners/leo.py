"""Latent Embedding Optimization: Algorithm 1 of the paper for one task, with the fine-tuning of Section 4.2.3."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo._jax.random import apply_dropout
from metaleo.inner_loop import descend
from metaleo.learners.anchor import Anchor
from metaleo.learners.base import Adaptation, HyperParams, Learner, Metrics, descend_weights, query_loss_and_metrics
from metaleo.learners.leo_noise import Codes, Losses, Noise, Start, Step, Trace, Weights, draw_noise, dropped
from metaleo.losses import encoder_penalty, l2, mixture_loss, orthogonality
from metaleo.nn.encoder_decoder import Decoder, Encoder, Gaussian, RelationNet, code_scale, weights_scale
from metaleo.nn.heads import Network
from metaleo.tasks.task import Batch, Task


class LEO(Learner):
    """Encode the support set to codes, take gradient steps on the codes, decode them, fine-tune the decoded weights.

    Args (of `LEO.init`):
        key: Random key for the initial weights.
        network: What to generate, per class or once per task; in the paper, `linear_network(dim)`.
        latent, widths: Size of a code; units of each hidden layer of encoder and decoder, which are linear without any.
        latent_steps, finetune_steps: Gradient steps on codes, then on weights; `…_step_size`: their initial sizes.
        from_start, random_prior: Decode offsets from `network.start`; draw codes from N(0, 1), without an encoder.
        anchor: What decoded weights are added to; the decoder then starts at zero, so that it is the anchor at first.
        stochastic, official: Sample codes and weights in training; scales and KL exactly as in the authors' code.
        samples, max_grad_norm: Solutions sampled per training task, scored jointly; maximum norm of an inner gradient.

    Examples:
        >>> import jax
        >>> from metaleo import LEO, labelled, linear_network
        >>> leo = LEO.init(jax.random.key(0), linear_network(2), latent=4)  # untrained; `meta_train` trains it
        >>> leo.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
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
    official: bool = eqx.field(static=True, default=False)
    samples: int = eqx.field(static=True, default=1)
    max_grad_norm: float | None = eqx.field(static=True, default=None)
    anchor: Anchor | None = None

    @classmethod
    def init(
        cls, key: PRNGKeyArray, network: Network, *, latent: int = 64, widths: tuple[int, ...] = (),
        latent_steps: int = 5, finetune_steps: int = 5, from_start: bool = False, random_prior: bool = False,
        latent_step_size: Step = 1.0, finetune_step_size: Step = 0.001, **switches: Any,
    ) -> "LEO":  # fmt: skip
        encoder_key, relation_key, decoder_key = jax.random.split(key, 3)
        encoder = None if random_prior else Encoder.init(encoder_key, network.evidence, latent, widths)
        relation = None if random_prior else RelationNet.init(relation_key, latent)
        start = network.start if from_start else None
        decoder = Decoder.init(decoder_key, latent, network.size, widths, start, zero="anchor" in switches)
        step_sizes = jnp.full((latent,), latent_step_size), jnp.full((network.size,), finetune_step_size)
        return cls(encoder, relation, decoder, *step_sizes, network, latent_steps, finetune_steps, **switches)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        return self.adapt_with(support, None if key is None else draw_noise(self, support, hyper, key))

    def adapt_with(self, support: Batch, noise: Noise | None) -> Adaptation:
        """Algorithm 1, lines 7-13, then fine-tuning, with the random draws in `noise`."""
        self.network.check(support)
        noise = noise or Noise()
        codes = self.encode(support, noise)
        code, seen = codes.sample(noise.code), dropped(support, noise)
        start = 0.0 if self.anchor is None else self.anchor.centroids(seen, noise.anchor)  # the paper: 0
        adapted, latent_losses = self.descend_codes(code, support, noise, start)
        decoded = self.decode(adapted, None if noise.weights is None else noise.weights[-1], start)
        decoded = decoded if self.anchor is None else self.anchor.fit(decoded, seen)
        weights, finetune_losses = self.descend_weights(decoded, support, noise)
        head = self.network.head(weights)
        final_loss = self.network.support_loss(jax.vmap(head)(support.inputs), support)[None]
        losses = jnp.concatenate([latent_losses, finetune_losses, final_loss])
        return Adaptation(head, Trace(codes, code, adapted, decoded, losses))

    def encode(self, support: Batch, noise: Noise) -> Gaussian:
        """q(z_n | D_n) for every class n (Eq. 3), or q(z | D) if one code stands for the task."""
        if self.encoder is None or self.relation is None:
            return Gaussian.standard((self.network.codes(support), len(self.latent_step_size)), support.inputs.dtype)
        hidden = self.encoder(self.network.evidence_of(dropped(support, noise).inputs, support.targets))
        mean, raw_scale = jnp.split(self.relation(hidden, support, self.network.per_class), 2, axis=1)
        return Gaussian(mean, code_scale(self.official)(raw_scale))

    def decode(self, code: Codes, noise: Weights | None, start: Start = 0.0) -> Weights:
        """θ ~ p(θ | z) for every code (Eq. 4); without noise, the mean."""
        mean, raw_scale = self.decoder(code)
        return start + Gaussian(mean, weights_scale(self.official, *mean.shape)(raw_scale)).sample(noise)

    def descend_codes(self, code: Codes, support: Batch, noise: Noise, start: Start = 0.0) -> tuple[Codes, Losses]:
        """z ← z - α ∘ ∇L(decode(z)), with fresh noise on the weights and fresh dropout at every step."""

        def loss(code: Codes, now: tuple[Array | None, Weights | None]) -> Float[Array, ""]:
            mask, weights_noise = now
            head = self.network.head(self.decode(code, weights_noise, start))
            inputs = apply_dropout(support.inputs, mask, noise.keep_prob)
            return self.network.support_loss(jax.vmap(head)(inputs), support)

        steps = self.latent_step_size[None, :], self.latent_steps
        each_step = noise.latent_masks, None if noise.weights is None else noise.weights[:-1]
        return descend(loss, code, *steps, each_step, max_grad_norm=self.max_grad_norm)

    def descend_weights(self, weights: Weights, support: Batch, noise: Noise) -> tuple[Weights, Losses]:
        """θ ← θ - α ∘ ∇L(θ), with fresh dropout at every step."""
        how = self.finetune_step_size[None, :], self.finetune_steps, support, noise.finetune_masks, noise.keep_prob
        return descend_weights(self.network, weights, *how, max_grad_norm=self.max_grad_norm)

    def meta_loss(self, task: Task, hyper: HyperParams, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Metrics]:
        """Eq. 6. With several samples, `mixture_loss` joins their query losses; all other terms are averaged."""

        def with_key(key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Metrics]:
            noise = None if key is None else draw_noise(self, task.support, hyper, key)
            adaptation = self.adapt_with(task.support, noise)
            loss, info = query_loss_and_metrics(adaptation.head, task.query, hyper, key, self.network)
            penalty, more = self.penalties(adaptation.trace, hyper, noise)
            return loss + penalty, info | more

        if key is None or self.samples == 1:
            return with_key(key)
        losses, infos = jax.vmap(with_key)(jax.random.split(key, self.samples))
        joined = mixture_loss(infos["query_loss"], task.query)
        return joined + jnp.mean(losses - infos["query_loss"]), jax.tree.map(jnp.mean, infos) | {"query_loss": joined}

    def penalties(self, trace: Trace, hyper: HyperParams, noise: Noise | None) -> tuple[Float[Array, ""], Metrics]:
        """β KL(q(z | D) ‖ p(z)) + γ |stopgrad(z′) - z|² (Eq. 6): shapes the encoder; omitted in evaluation."""
        info, codes = {}, trace.code_distribution
        if noise is not None:
            info["encoder_penalty"] = encoder_penalty(trace.code, trace.adapted_code)
        if noise is not None and noise.code is not None:
            info["kl"] = codes.sampled_kl_to_standard(noise.code) if self.official else codes.kl_to_standard()
        return sum((getattr(hyper, name) * info[name] for name in info), start=jnp.zeros((), codes.mean.dtype)), info

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        """λ₁ |φ|² + λ₂ |C_d - I| (Eq. 7)."""
        weights = jax.tree.leaves((self.encoder, self.relation, self.decoder))
        return hyper.l2 * l2(*weights) + hyper.orthogonality * orthogonality(*self.decoder.hidden, self.decoder.weight)
