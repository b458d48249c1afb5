"""LEO straight from the paper's equations, as slow and as obvious as can be: what the fast path is held against."""

import math

import jax
import jax.numpy as jnp


def meta_loss(leo, task, hyper, noise, query_mask):
    """Algorithm 1, lines 6-14, for one task: every pair related, all weights decoded at every step, autodiff."""
    support, query = task.support, task.query
    mean, raw_scale = jnp.split(relate(leo, dropped(support.inputs, noise.encoder_mask, noise.keep), support), 2, 1)
    scale = sigma(leo, raw_scale, 0.0 if leo.official else 0.1)
    start = code = mean if noise.code is None else mean + scale * noise.code
    for t in range(leo.latent_steps):
        inputs = dropped(support.inputs, entry(noise.latent_masks, t), noise.keep)
        code = code - leo.latent_step_size[None] * jax.grad(
            lambda z, t=t, inputs=inputs: inner_loss(decode(leo, z, entry(noise.weights, t)), inputs, support)
        )(code)
    weights = decode(leo, code, entry(noise.weights, -1))
    for t in range(leo.finetune_steps):
        inputs = dropped(support.inputs, entry(noise.finetune_masks, t), noise.keep)
        weights = weights - leo.finetune_step_size[None] * jax.grad(inner_loss)(weights, inputs, support)
    logits = dropped(query.inputs, query_mask, hyper.keep) @ weights.T
    right = (jnp.argmax(logits, 1) == jnp.argmax(query.targets, 1)).astype(logits.dtype)
    penalty = jnp.mean((jax.lax.stop_gradient(code) - start) ** 2)
    info = {
        "query_loss": mean_of(entropies(logits, query.targets), query.mask),
        "query_accuracy": mean_of(right, query.mask),
        "encoder_penalty": penalty,
    }
    loss = info["query_loss"] + hyper.encoder_penalty * penalty
    if noise.code is not None:
        estimate = (start**2 - noise.code**2) / 2 - jnp.log(scale)
        info["kl"] = jnp.mean(estimate if leo.official else (scale**2 + mean**2 - 1) / 2 - jnp.log(scale))
        loss += hyper.kl * info["kl"]
    decoder = jnp.concatenate([leo.decoder.to_mean, leo.decoder.to_raw_scale], axis=1)
    relation = leo.relation.first, leo.relation.middle, leo.relation.last
    loss += hyper.l2 * sum(jnp.sum(weight**2) for weight in (leo.encoder.weight, *relation, decoder)) / 2
    cosines = decoder @ decoder.T / jnp.outer(*[jnp.sqrt(jnp.sum(decoder**2, axis=1))] * 2)
    return loss + hyper.orthogonality * jnp.mean((cosines - jnp.eye(len(cosines))) ** 2), info


def relate(leo, inputs, support):
    """The mean of g([h_a, h_b]) over all pairs whose first is in the class, for each class (Eq. 3)."""
    codes, number = inputs @ leo.encoder.weight, len(inputs)
    pairs = jnp.concatenate([jnp.repeat(codes, number, axis=0), jnp.tile(codes, (number, 1))], axis=1)
    hidden = jax.nn.relu(jax.nn.relu(pairs @ leo.relation.first) @ leo.relation.middle)
    related = hidden @ leo.relation.last
    present = support.mask[:, None, None] & support.mask[None, :, None]
    counts = jnp.where(present, support.targets[:, None, :], 0).reshape(len(pairs), -1)
    return counts.T @ related / jnp.sum(counts, axis=0)[:, None]


def decode(leo, code, noise):
    """Eq. 4; without noise, the mean."""
    mean, raw_scale = code @ leo.decoder.to_mean, code @ leo.decoder.to_raw_scale
    return mean if noise is None else mean + sigma(leo, raw_scale, math.sqrt(2 / sum(mean.shape))) * noise


def sigma(leo, raw, initial):
    """docs/deviations.md has both."""
    return jnp.maximum(jnp.exp(raw) - (1 - initial), 1e-10) if leo.official else initial * jnp.log2(1 + jnp.exp(raw))


def inner_loss(weights, inputs, support):
    """Eq. 5: the sum over the support set, divided by its shots."""
    return support.targets.shape[1] * mean_of(entropies(inputs @ weights.T, support.targets), support.mask)


def entropies(logits, targets):
    return jnp.log(jnp.sum(jnp.exp(logits), axis=1)) - jnp.sum(targets * logits, axis=1)


def mean_of(values, mask):
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.sum(mask.astype(values.dtype))


def dropped(inputs, mask, keep):
    return inputs if mask is None else jnp.where(mask, inputs / keep, 0)


def entry(draws, t):
    return None if draws is None else draws[t]
