"""Latent Embedding Optimization (Algorithm 1, with the fine-tuning of Section 4.2.3)."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from metaleo.closed_form import code_descent, weight_descent
from metaleo.inner_loop import descend, descend_linear
from metaleo.kernels.adaptation import adaptation
from metaleo.kernels.noise import many_normals
from metaleo.learners.learner import (
    CODE,
    SUPPORT,
    WEIGHTS,
    Adaptation,
    Hyper,
    Info,
    Learner,
    descend_weights,
    drop,
    judge,
)
from metaleo.model.decoder import Decoder
from metaleo.model.encoder import Encoder
from metaleo.model.gaussian import (
    Gaussian,
    Slopes,
    kl_to_standard,
    official_scale,
    sampled_kl_to_standard,
    smooth_scale,
)
from metaleo.model.network import Network
from metaleo.model.relation import RelationNet
from metaleo.objective import encoder_penalty, l2, mixture_loss, orthogonality
from metaleo.randomness import masks, normals
from metaleo.tasks.task import Batch, Task


class Noise(eqx.Module):
    """All the randomness of one adaptation, drawn at once; everything below it is deterministic.

    What is None is not random: codes and weights are then the means, and nothing is dropped.
    """

    code: Float[Array, "code latent"] | None = None
    weights: Float[Array, "decodings code size"] | None = None  # a fresh draw per latent step, and one after the last
    encoder_mask: Bool[Array, "example dim"] | None = None
    latent_masks: Bool[Array, "latent_steps example dim"] | None = None
    finetune_masks: Bool[Array, "finetune_steps example dim"] | None = None
    keep: float | Float[Array, ""] = 1.0


class Trace(eqx.Module):
    """The path of one adaptation, from the support set to the final weights."""

    code_distribution: Gaussian
    code: Float[Array, "code latent"]
    adapted_code: Float[Array, "code latent"]
    decoded_weights: Float[Array, "code size"]
    support_losses: Float[Array, " steps"]  # before each latent step, each fine-tuning step, and at the end


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
        stochastic: bool = True,
        official: bool = False,
        samples: int = 1,
        limit: float | None = None,
    ) -> "LEO":
        """`widths` are those of hidden layers in encoder and decoder. With `from_start`, what is decoded is added to
        learned parameters that start as those the network came with."""
        encoder_key, relation_key, decoder_key = jax.random.split(key, 3)
        start = jnp.asarray(network.start, float) if from_start else None
        return cls(
            None if random_prior else Encoder.init(encoder_key, network.evidence, latent, widths),
            None if random_prior else RelationNet.init(relation_key, latent),
            Decoder.init(decoder_key, latent, network.size, widths, start),
            jnp.full((latent,), latent_step_size),
            jnp.full((network.size,), finetune_step_size),
            network,
            latent_steps,
            finetune_steps,
            stochastic,
            official,
            samples,
            limit,
        )

    def adapt(self, support: Batch, hyper: Hyper | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        return self.adapt_with(support, None if key is None else self.draw_noise(support, hyper, key))

    def adapt_with(self, support: Batch, noise: Noise | None) -> Adaptation:
        """Algorithm 1, lines 7-13, then fine-tuning, with the randomness given."""
        self.network.check(support)
        noise = Noise() if noise is None else noise
        codes = self.encode(support, noise)
        code = codes.sample(noise.code)
        adapted, decoded, weights, latent_losses, finetune_losses = self.descend(code, support, noise)
        head = self.network.head(weights)
        final_loss = self.network.support_loss(jax.vmap(head)(support.inputs), support)
        losses = jnp.concatenate([latent_losses, finetune_losses, final_loss[None]])
        return Adaptation(head, Trace(codes, code, adapted, decoded, losses))

    def descend(self, code: Float[Array, "code latent"], support: Batch, noise: Noise) -> tuple[Array, ...]:
        """Adapted codes, decoded and fine-tuned weights, and the losses before each latent and fine-tuning step."""
        if self.in_one(noise):
            adapt = adaptation(Slopes(self.official, self.initial_scale(len(code))), self.latent_steps)
            learned = self.decoder.to_mean, self.decoder.to_raw_scale, self.latent_step_size, self.finetune_step_size
            inputs = (
                self.inputs_of_steps(support, masks, noise.keep) for masks in (noise.latent_masks, noise.finetune_masks)
            )
            weights_noise = jax.lax.stop_gradient(noise.weights)
            return adapt(code, *learned, *inputs, weights_noise, support.targets, support.mask)
        adapted, latent_losses = self.descend_codes(code, support, noise)
        decoded = self.decode(adapted, None if noise.weights is None else noise.weights[-1])
        weights, finetune_losses = self.descend_weights(decoded, support, noise)
        return adapted, decoded, weights, latent_losses, finetune_losses

    def in_one(self, noise: Noise) -> bool:
        """Whether it is the paper's case, with all its noise, which is done in one (and may have kernels)."""
        linear = self.network.linear and self.decoder.linear
        steps = noise.weights is not None and noise.latent_masks is not None and self.latent_steps * self.finetune_steps
        return bool(linear and steps)

    def encode(self, support: Batch, noise: Noise) -> Gaussian:
        """q(z_n | D_n) for every class n (Eq. 3), or q(z | D) where one code stands for the task."""
        if self.encoder is None or self.relation is None:
            shape, dtype = (self.network.codes(support), len(self.latent_step_size)), support.inputs.dtype
            return Gaussian(jnp.zeros(shape, dtype), jnp.ones(shape, dtype))
        evidence = flat(drop(support.inputs, noise.encoder_mask, noise.keep))
        if not self.network.per_class:
            evidence = jnp.concatenate([evidence, flat(support.targets)], axis=1)
        statistics = self.relation(self.encoder(evidence), support, self.network.per_class)
        mean, raw_scale = jnp.split(statistics, 2, axis=1)  # (code, latent) each
        scale = official_scale(raw_scale, 0.0) if self.official else smooth_scale(raw_scale, LATENT_SCALE)
        return Gaussian(mean, scale)

    def decode(
        self, code: Float[Array, "code latent"], noise: Float[Array, "code size"] | None
    ) -> Float[Array, "code size"]:
        """θ ~ p(θ | z) for every code (Eq. 4)."""
        mean, raw_scale = self.decoder(code)
        return mean if noise is None else mean + self.weights_scale(raw_scale) * noise

    def weights_scale(self, raw_scale: Float[Array, "code size"]) -> Float[Array, "code size"]:
        to_scale = official_scale if self.official else smooth_scale
        return to_scale(raw_scale, self.initial_scale(len(raw_scale)))

    def initial_scale(self, codes: int) -> float:
        """σ of weights where the decoder says 0."""
        return math.sqrt(2 / (codes + self.network.size))

    def descend_codes(
        self, code: Float[Array, "code latent"], support: Batch, noise: Noise
    ) -> tuple[Float[Array, "code latent"], Float[Array, " step"]]:
        """z ← z - α ∘ ∇L(decode(z)), with fresh noise on the weights and fresh dropout at every step."""
        if self.network.linear and self.decoder.linear:
            return self.descend_codes_linear(code, support, noise)

        def loss(code, now):
            mask, weights_noise = now
            head = self.network.head(self.decode(code, weights_noise))
            return self.network.support_loss(jax.vmap(head)(drop(support.inputs, mask, noise.keep)), support)

        each_step = noise.latent_masks, None if noise.weights is None else noise.weights[:-1]
        return descend(loss, code, self.latent_step_size[None, :], self.latent_steps, each_step, limit=self.limit)

    def descend_codes_linear(
        self, code: Float[Array, "code latent"], support: Batch, noise: Noise
    ) -> tuple[Float[Array, "code latent"], Float[Array, " step"]]:
        """The same where decoder and network are linear: x·(zD) = (xDᵀ)·z.

        Latent steps see their inputs through Dᵀ, in as many numbers as a code has, and weights are decoded once, at
        the end. Only the noise on the weights needs their full size.
        """
        inputs = self.inputs_of_steps(support, noise.latent_masks, noise.keep)
        if noise.weights is None or self.latent_steps == 0:
            projected = inputs @ self.decoder.to_mean.T
            return descend_linear(code, self.latent_step_size, self.latent_steps, projected, support)
        descent = code_descent(Slopes(self.official, self.initial_scale(len(code))), self.latent_steps)
        decoder = self.decoder.to_mean, self.decoder.to_raw_scale
        weights_noise = jax.lax.stop_gradient(noise.weights[:-1])
        adapted, losses = descent(
            code, *decoder, self.latent_step_size, inputs, weights_noise, support.targets, support.mask
        )
        return adapted, losses

    def descend_weights(
        self, weights: Float[Array, "code size"], support: Batch, noise: Noise
    ) -> tuple[Float[Array, "code size"], Float[Array, " step"]]:
        """θ ← θ - α ∘ ∇L(θ), with fresh dropout at every step."""
        if self.network.linear:
            inputs = self.inputs_of_steps(support, noise.finetune_masks, noise.keep)
            if noise.finetune_masks is None or self.finetune_steps == 0:
                return descend_linear(weights, self.finetune_step_size, self.finetune_steps, inputs, support)
            descent = weight_descent()
            tuned, losses = descent(weights, self.finetune_step_size, inputs, support.targets, support.mask)
            return tuned, losses
        steps = self.finetune_step_size[None, :], self.finetune_steps
        masks, keep = noise.finetune_masks, noise.keep
        return descend_weights(self.network, weights, *steps, support, masks, keep, limit=self.limit)

    def inputs_of_steps(
        self, support: Batch, masks: Bool[Array, "step example dim"] | None, keep: float | Float[Array, ""]
    ) -> Float[Array, "draw example dim"]:
        """The inputs that each step sees; where nothing is dropped, one draw serves all of them."""
        if masks is None:
            return support.inputs[None]
        return jax.vmap(drop, (None, 0, None))(support.inputs, masks, keep)

    def draw_noise(self, support: Batch, hyper: Hyper | None, key: PRNGKeyArray) -> Noise:
        """One draw of codes, weights and dropout; without hyper-parameters nothing is dropped."""
        latent, codes, dtype = len(self.latent_step_size), self.network.codes(support), support.inputs.dtype
        noise = Noise()
        if self.stochastic:
            decodings = self.latent_steps + 1, codes, self.network.size
            noise = Noise(
                normals(key, (codes, latent), CODE).astype(dtype), many_normals(key, decodings, WEIGHTS).astype(dtype)
            )
        if hyper is None or not self.network.dropout:
            return noise
        shape = (1 + self.latent_steps + self.finetune_steps, *support.inputs.shape)
        kept = masks(key, hyper.keep, shape, SUPPORT)
        encoder_mask, latent_masks, finetune_masks = jnp.split(kept, [1, 1 + self.latent_steps])
        return Noise(noise.code, noise.weights, encoder_mask[0], latent_masks, finetune_masks, hyper.keep)

    def meta_loss(self, task: Task, hyper: Hyper, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Info]:
        """Eq. 6 for one task; the regularisers of Eq. 7 are the same for every task of a meta-batch.

        Of several samples the query losses are joined by `mixture_loss`, and all else is averaged.
        """
        if key is None:
            return self.meta_loss_with(task, hyper, None, None)

        def with_key(key: PRNGKeyArray) -> tuple[Float[Array, ""], Info]:
            return self.meta_loss_with(task, hyper, self.draw_noise(task.support, hyper, key), key)

        if self.samples == 1:
            return with_key(key)
        losses, infos = jax.vmap(with_key)(jax.random.split(key, self.samples))
        together = mixture_loss(infos["query_loss"], task.query)
        rest = jnp.mean(losses - infos["query_loss"])
        return together + rest, jax.tree.map(jnp.mean, infos) | {"query_loss": together}

    def meta_loss_with(
        self, task: Task, hyper: Hyper, noise: Noise | None, query_key: PRNGKeyArray | None
    ) -> tuple[Float[Array, ""], Info]:
        adaptation = self.adapt_with(task.support, noise)
        trace: Trace = adaptation.trace
        loss, info = judge(adaptation.head, task.query, hyper, query_key, self.network)
        loss += hyper.l2 * l2(*jax.tree.leaves((self.encoder, self.relation, self.decoder)))
        loss += hyper.orthogonality * orthogonality(*self.decoder.hidden, self.decoder.weight)
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


def flat(values: Float[Array, "example *shape"]) -> Float[Array, "example numbers"]:
    return values.reshape(len(values), -1)


LATENT_SCALE = 0.1
"""σ of a code where the relation net says 0. The authors' code starts at 0, where the KL term is infinite."""
