"""LEO with a linear decoder and a linear head, for a batch of tasks, with hand-written derivatives.

All tasks take each step together. The second derivatives need only a few products; products with the decoder cover all
tasks at once, and the products that form its gradient cover all steps at once.

Shapes: task, step (or one draw for all steps), example, class (n), latent (l), dim (d).
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray, PyTree

from metaleo._jax.random import apply_dropout
from metaleo.engines.base import Engine
from metaleo.engines.reference import Reference
from metaleo.learners.base import Adaptation, HyperParams, Learner, Metrics, query_loss_and_metrics
from metaleo.learners.leo import LEO
from metaleo.learners.leo_noise import Noise, Trace, draw_noise
from metaleo.losses import l2, support_loss
from metaleo.nn.encoder_decoder import Gaussian, Scale, code_scale, weights_scale
from metaleo.nn.heads import Head, LinearHead
from metaleo.tasks.task import Batch, Tasks

Arrays = tuple[Array, ...]
FEW_EXAMPLES = 8
"""Up to this many examples, sums over examples are unrolled."""
MOST_EXAMPLES = 256
"""Up to this many examples, all pairs and inner products are held in memory; larger tasks use the learner itself."""


class ClosedForm(Engine):
    name: ClassVar[str] = "closed-form"

    def supports(self, learner: Learner, runs: int) -> bool:
        del runs
        return (
            isinstance(learner, LEO)
            and learner.network.linear
            and learner.decoder.linear
            and learner.samples == 1
            and learner.max_grad_norm is None
        )

    def adapt(self, learner: Learner, supports: Batch) -> Head:
        assert isinstance(learner, LEO)
        if supports.inputs.shape[1] > MOST_EXAMPLES:  # one large task keeps all cores busy by itself
            return jax.lax.map(lambda support: learner.adapt(support).head, supports)
        return self.adapt_with(learner, supports, Noise()).head

    def meta_losses(
        self, learner: Learner, tasks: Tasks, indices: PyTree, hyper: HyperParams, keys: Key[Array, " task"]
    ) -> tuple[Float[Array, " task"], dict[str, Float[Array, " task"]]]:
        assert isinstance(learner, LEO)
        batch = jax.lax.stop_gradient(jax.vmap(tasks.gather)(indices))
        if batch.support.inputs.shape[1] > MOST_EXAMPLES:
            return Reference().meta_losses(learner, tasks, indices, hyper, keys)
        noise = self.draw_noise(learner, batch.support, hyper, keys)
        adaptations = self.adapt_with(learner, batch.support, noise)
        losses, infos = self.query_losses(learner, adaptations.head, tasks, indices, batch.query, hyper, keys)
        penalties, more = jax.vmap(learner.penalties, (0, None, 0))(adaptations.trace, hyper, noise)
        return losses + penalties, infos | more

    def draw_noise(self, leo: LEO, supports: Batch, hyper: HyperParams, keys: Key[Array, " task"]) -> Noise:
        """Draw the noise of each task."""
        return jax.vmap(lambda support, key: draw_noise(leo, support, hyper, key))(supports, keys)

    def query_losses(
        self,
        leo: LEO,
        heads: Head,
        tasks: Tasks,
        indices: PyTree,
        queries: Batch,
        hyper: HyperParams,
        keys: Key[Array, " task"],
    ) -> tuple[Float[Array, " task"], dict[str, Float[Array, " task"]]]:
        """`query_loss_and_metrics` of each task; a subclass may gather queries itself from `tasks` and `indices`."""
        del tasks, indices

        def score_head(head: Head, query: Batch, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
            return query_loss_and_metrics(head, query, hyper, key, leo.network)

        return jax.vmap(score_head)(heads, queries, keys)

    def regulariser(self, learner: Learner, hyper: HyperParams) -> Float[Array, ""]:
        assert isinstance(learner, LEO)
        decoder, weights = learner.decoder, jax.tree.leaves((learner.encoder, learner.relation, learner.decoder))
        return hyper.l2 * l2(*weights) + hyper.orthogonality * orthogonality(decoder.to_mean, decoder.to_raw_scale)

    def adapt_with(self, leo: LEO, supports: Batch, noise: Noise) -> Adaptation:
        """`LEO.adapt_with` for each support set; the trace holds only what the losses need."""
        jax.vmap(leo.network.check)(supports)
        codes = encode(leo, supports, noise)
        code = codes.sample(noise.code)
        adapted, decoded, weights = self.descend(leo, code, supports, noise)
        return jax.vmap(lambda weights, *path: Adaptation(LinearHead(weights), Trace(*path)))(
            weights, codes, code, adapted, decoded
        )

    def descend(self, leo: LEO, code: Float[Array, "task way latent"], supports: Batch, noise: Noise) -> Arrays:
        """Adapted codes, decoded weights and fine-tuned weights."""
        adapted = descend_codes(leo, code, supports, noise)
        last = None if noise.weights is None else noise.weights[:, -1]
        decoded = jax.vmap(leo.decode)(adapted, last)
        return adapted, decoded, descend_weights(leo, decoded, supports, noise)


def encode(leo: LEO, supports: Batch, noise: Noise) -> Gaussian:
    """`LEO.encode` for each support set."""
    if leo.encoder is None or leo.relation is None:
        return jax.vmap(lambda support: leo.encode(support, Noise()))(supports)
    hidden = jax.vmap(leo.encoder)(with_dropout(supports.inputs, noise.encoder_mask, noise.keep_prob))
    first = leo.relation.first.reshape(2, hidden.shape[-1], -1)
    firsts, partners = jax.vmap(lambda support: (support.class_weights(), support.weights()))(supports)
    statistics = means_over_pairs(hidden, first, leo.relation.middle, firsts, partners) @ leo.relation.last
    mean, raw_scale = jnp.split(statistics, 2, axis=2)
    return Gaussian(mean, code_scale(leo.official)(raw_scale))


def descend_codes(
    leo: LEO, code: Float[Array, "task way latent"], supports: Batch, noise: Noise
) -> Float[Array, "task way latent"]:
    """`LEO.descend_codes` for each task.

    Since x·(zM) = (xMᵀ)·z, steps use inputs projected by Mᵀ to the size of a code; only the noise on the weights needs
    the full size.
    """
    inputs = inputs_of_steps(supports.inputs, noise.latent_masks, noise.keep_prob)
    if noise.weights is None or leo.latent_steps == 0:
        projected = inputs @ leo.decoder.to_mean.T
        return descend_in_products(code, leo.latent_step_size, leo.latent_steps, projected, supports)
    slopes = Slopes(weights_scale(leo.official, code.shape[1], leo.network.size))
    decoder, weights_noise = (leo.decoder.to_mean, leo.decoder.to_raw_scale), noise.weights[:, :-1]
    return code_steps(slopes, code, *decoder, leo.latent_step_size, inputs, weights_noise, *classes_first(supports))


def descend_weights(
    leo: LEO, weights: Float[Array, "task way dim"], supports: Batch, noise: Noise
) -> Float[Array, "task way dim"]:
    """`LEO.descend_weights`."""
    inputs = inputs_of_steps(supports.inputs, noise.finetune_masks, noise.keep_prob)
    # on a GPU, inner products of inputs are faster with dropout too: fewer kernels run one after the other
    if noise.finetune_masks is None or leo.finetune_steps == 0 or on_gpu():
        return descend_in_products(weights, leo.finetune_step_size, leo.finetune_steps, inputs, supports)
    return weight_steps(weights, leo.finetune_step_size, inputs, *classes_first(supports))


# Inputs of the steps


def with_dropout(
    inputs: Float[Array, "task example dim"],
    mask: Bool[Array, "task example dim"] | None,
    keep_prob: float | Float[Array, " task"],
) -> Float[Array, "task example dim"]:
    return inputs if mask is None else jax.vmap(apply_dropout)(inputs, mask, keep_prob)


def inputs_of_steps(
    inputs: Float[Array, "task example dim"],
    masks: Bool[Array, "task step example dim"] | None,
    keep_prob: float | Float[Array, " task"],
) -> Float[Array, "task draw example dim"]:
    """The inputs of each step; without dropout, one draw serves all steps."""
    return (
        inputs[:, None]
        if masks is None
        else jax.vmap(jax.vmap(apply_dropout, (None, 0, None)))(inputs, masks, keep_prob)
    )


def at(draws: Float[Array, "task draw ..."], step: int) -> Float[Array, "task ..."]:
    return draws[:, step % draws.shape[1]]


def classes_first(supports: Batch) -> tuple[Float[Array, "task way example"], Float[Array, "task example"]]:
    """Targets with the class axis first, and the weight of each example's loss in `support_loss`."""
    present = supports.mask.astype(supports.targets.dtype)
    share = supports.targets.shape[2] * present / jnp.sum(present, axis=1, keepdims=True)
    return jnp.swapaxes(supports.targets, 1, 2), share


def descend_in_products(
    start: Float[Array, "task way dim"],
    step_size: Float[Array, " dim"],
    num_steps: int,
    inputs: Float[Array, "task draw example dim"],
    supports: Batch,
) -> Float[Array, "task way dim"]:
    """Gradient steps on the weights of a linear softmax head, without forming the intermediate weights.

    Step t has the gradient R_tᵀX_t, where R = ∂loss/∂logits. So weights only move along inputs, and the logits of
    step t follow from inner products of inputs: X_t w_tᵀ = X_t w_0ᵀ - Σ_{s<t} (X_t diag(α) X_sᵀ) R_s.
    """

    def one_task(start: Float[Array, "way dim"], inputs: Float[Array, "draw example dim"], support: Batch):
        draws, examples, dim = inputs.shape
        rows = inputs.reshape(-1, dim)
        unmoved = (rows @ start.T).reshape(draws, examples, -1)
        products = (rows * step_size[None, :] @ rows.T).reshape(draws, examples, draws, examples)
        residuals = []
        for t in range(num_steps):
            now = t % draws
            logits = unmoved[now]
            for s, residual in enumerate(residuals):  # multiply and sum: too small for a fast matrix product
                logits -= jnp.sum(products[now, :, s % draws, :, None] * residual[None], axis=1)
            residuals.append(jax.grad(support_loss)(logits, support))
        if draws == 1:
            residuals = [sum(residuals, start=jnp.zeros_like(unmoved[0]))]
        return start - step_size[None, :] * (jnp.concatenate(residuals).T @ rows)

    return start if num_steps == 0 else jax.vmap(one_task)(start, inputs, supports)


# The scale of weights, and softmax


@dataclasses.dataclass(frozen=True)
class Slopes:
    """A scale with its first and second derivatives."""

    scale: Scale

    def __call__(self, raw: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], ...]:
        if self.scale.official:
            growth = jnp.exp(raw)
            scale = growth - (1 - self.scale.initial)
            slope = jnp.where(scale > 1e-10, growth, jnp.zeros_like(growth))
            return jnp.maximum(scale, 1e-10), slope, slope
        small = jnp.exp(-jnp.abs(raw))
        share = jnp.where(raw >= 0, jnp.ones_like(raw), small) / (1 + small)  # the logistic function
        factor = self.scale.initial / math.log(2)
        return factor * (jnp.maximum(raw, 0) + jnp.log(1 + small)), factor * share, factor * share * (1 - share)


def residual(
    probabilities: Float[Array, "task ... way example"],
    targets: Float[Array, "task ... way example"],
    share: Float[Array, "task ... example"],
) -> Float[Array, "task ... way example"]:
    """R = ∂loss/∂logits."""
    return share[..., None, :] * (probabilities - targets)


def through_softmax(
    of_residual: Float[Array, "task way example"],
    probabilities: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> Float[Array, "task way example"]:
    """The gradient with respect to the logits, given the gradient with respect to R."""
    gradient = of_residual * share[:, None, :]
    return probabilities * (gradient - jnp.sum(probabilities * gradient, axis=1, keepdims=True))


# Products


def rows(
    weights: Float[Array, "task way example"], inputs: Float[Array, "task example dim"]
) -> Float[Array, "task way dim"]:
    """Σ over examples: turns a gradient with respect to logits into one with respect to weights."""
    if on_gpu() and (examples := inputs.shape[1]) <= FEW_EXAMPLES:
        return functools.reduce(jnp.add, (weights[:, :, e, None] * inputs[:, e, None, :] for e in range(examples)))
    return weights @ inputs


def dots(
    inputs: Float[Array, "task example dim"], weights: Float[Array, "task way dim"]
) -> Float[Array, "task way example"]:
    if on_gpu():
        return jnp.sum(weights[:, :, None, :] * inputs[:, None, :, :], axis=3)
    return jnp.einsum("tnd,ted->tne", weights, inputs)


def by_example(
    weights: Float[Array, "task step way example"], of_classes: Float[Array, "task step way dim"]
) -> Float[Array, "task step example dim"]:
    """Σ over classes."""
    return jnp.einsum("tsne,tsnd->tsed", weights, of_classes)


def on_gpu() -> bool:
    """On a GPU, sums are fused into other kernels, and fewer kernels are faster; on a CPU, matrix products are."""
    return jax.default_backend() == "gpu"


def as_rows(array: Float[Array, "*rows numbers"]) -> Float[Array, "all_rows numbers"]:
    """Merge all axes that are summed over: with several, XLA would reorder them and copy the array."""
    return array.reshape(-1, array.shape[-1])


def stack_steps(path: list[Arrays]) -> Arrays:
    return tuple(jnp.stack(part, axis=1) for part in zip(*path, strict=True))


# Latent steps: z ← z - α ∘ ∇L(zM + σ(zS) ∘ ε)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def code_steps(slopes: Slopes, *arguments: Array) -> Float[Array, "task way latent"]:
    return code_steps_forward(slopes, *arguments)[0]


def code_steps_forward(
    slopes: Slopes,
    code: Float[Array, "task way latent"],
    to_mean: Float[Array, "latent dim"],
    to_raw_scale: Float[Array, "latent dim"],
    step_size: Float[Array, " latent"],
    inputs: Float[Array, "task draw example dim"],
    noise: Float[Array, "task step way dim"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> tuple[Float[Array, "task way latent"], Any]:
    projected = inputs @ to_mean.T
    path, saved = [], []
    for t in range(noise.shape[1]):
        seen, projected_now = at(inputs, t), at(projected, t)
        scale, slope, bend = (part * noise[:, t] for part in slopes(code @ to_raw_scale))
        probabilities = jax.nn.softmax(dots(projected_now, code) + dots(seen, scale), axis=1)
        r = residual(probabilities, targets, share)
        of_weights = rows(r, seen)  # G, the gradient with respect to the weights
        gradient = rows(r, projected_now) + (of_weights * slope) @ to_raw_scale.T
        path.append((code, gradient, probabilities))
        saved.append((of_weights, slope, bend))
        code = code - step_size[None, None, :] * gradient
    return code, (to_raw_scale, step_size, inputs, projected, targets, share, stack_steps(path), saved)


def code_steps_backward(
    _slopes: Slopes, all_saved: Any, of_code: Float[Array, "task way latent"]
) -> tuple[Array | None, ...]:
    to_raw_scale, step_size, inputs, projected, targets, share, (codes, gradients, probabilities), saved = all_saved
    parts, rights = [], []
    of_step_size = jnp.zeros_like(step_size)
    for t in reversed(range(len(saved))):
        of_weights, slope, bend = saved[t]
        seen, projected_now = at(inputs, t), at(projected, t)
        of_gradient = -step_size[None, None, :] * of_code
        of_step_size -= jnp.sum(of_code * gradients[:, t], axis=(0, 1))
        back = of_gradient @ to_raw_scale
        of_r = dots(projected_now, of_gradient) + dots(seen, back * slope)
        of_logits = through_softmax(of_r, probabilities[:, t], share)
        of_raw_scale = back * of_weights * bend + rows(of_logits, seen) * slope
        parts.append((of_gradient, of_logits))
        rights.append(jnp.stack([of_weights * slope, of_raw_scale], axis=1))
        of_code = of_code + rows(of_logits, projected_now) + of_raw_scale @ to_raw_scale.T
    of_gradients, of_logits = stack_steps(parts[::-1])
    lefts = jnp.stack([of_gradients, codes], axis=2)  # (task, step, 2, way, latent)
    of_raw_scale = as_rows(lefts).T @ as_rows(jnp.stack(rights[::-1], axis=1))
    residuals = residual(probabilities, targets[:, None], share[:, None])
    of_projected = by_example(residuals, of_gradients) + by_example(of_logits, codes)
    if inputs.shape[1] == 1:
        of_projected = jnp.sum(of_projected, axis=1, keepdims=True)
    of_mean = as_rows(of_projected).T @ as_rows(inputs)
    return of_code, of_mean, of_raw_scale, of_step_size, None, None, None, None


code_steps.defvjp(code_steps_forward, code_steps_backward)


# Fine-tuning steps: θ ← θ - α ∘ ∇L(θ)


@jax.custom_vjp
def weight_steps(*arguments: Array) -> Float[Array, "task way dim"]:
    return weight_steps_forward(*arguments)[0]


def weight_steps_forward(
    weights: Float[Array, "task way dim"],
    step_size: Float[Array, " dim"],
    inputs: Float[Array, "task step example dim"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> tuple[Float[Array, "task way dim"], Any]:
    saved = []
    for s in range(inputs.shape[1]):
        probabilities = jax.nn.softmax(dots(inputs[:, s], weights), axis=1)
        gradient = rows(residual(probabilities, targets, share), inputs[:, s])
        saved.append((probabilities, gradient))
        weights = weights - step_size[None, None, :] * gradient
    return weights, (step_size, inputs, share, saved)


def weight_steps_backward(all_saved: Any, of_weights: Float[Array, "task way dim"]) -> tuple[Array | None, ...]:
    step_size, inputs, share, saved = all_saved
    of_step_size = jnp.zeros_like(step_size)
    for s, (probabilities, gradient) in reversed(list(enumerate(saved))):
        of_step_size -= jnp.sum(of_weights * gradient, axis=(0, 1))
        of_residual = dots(inputs[:, s], -step_size[None, None, :] * of_weights)
        of_weights = of_weights + rows(through_softmax(of_residual, probabilities, share), inputs[:, s])
    return of_weights, of_step_size, None, None, None


weight_steps.defvjp(weight_steps_forward, weight_steps_backward)


# Orthogonality of the decoder W = (M, S)


@jax.custom_vjp
def orthogonality(*halves: Float[Array, "latent dim"]) -> Float[Array, ""]:
    """`losses.orthogonality`: mean E², where E = C - I."""
    return orthogonality_forward(*halves)[0]


def orthogonality_forward(*halves: Float[Array, "latent dim"]) -> tuple[Float[Array, ""], Any]:
    """Also returns the matrix K for which the gradient is KW: only two products have the size of the weights.

    Row i of the gradient is 4/n² Σ_j E_ij ŵ_j, without its component Σ_j E_ij C_ij along ŵ_i = w_i/|w_i|, divided by
    |w_i|.
    """
    products = sum(half @ half.T for half in halves)
    inverse = jax.lax.rsqrt(jnp.maximum(jnp.diag(products), 1e-24))
    scales, identity = inverse[:, None] * inverse[None, :], jnp.eye(len(inverse), dtype=inverse.dtype)
    cosines = scales * products
    errors = cosines - identity
    across = errors - jnp.sum(errors * cosines, axis=1, keepdims=True) * identity
    return jnp.mean(errors**2), (halves, 4 / errors.size * scales * across)


def orthogonality_backward(saved: Any, of_mean: Float[Array, ""]) -> Arrays:
    halves, to_gradient = saved
    return tuple(of_mean * to_gradient @ half for half in halves)


orthogonality.defvjp(orthogonality_forward, orthogonality_backward)


# Pairs of the relation net


@jax.custom_vjp
def means_over_pairs(*arguments: Array) -> Float[Array, "task codes hidden"]:
    """Σ_a Σ_b v_na w_b relu(relu([h_a, h_b] first) middle), where v is `firsts` and w is `partners`."""
    return means_over_pairs_forward(*arguments)[0]


def means_over_pairs_forward(
    hidden_codes: Float[Array, "task example code"],
    first: Float[Array, "2 code hidden"],
    middle: Float[Array, "hidden hidden"],
    firsts: Float[Array, "task codes example"],
    partners: Float[Array, "task example"],
) -> tuple[Float[Array, "task codes hidden"], Any]:
    left, right = (hidden_codes @ half for half in first)
    pairs = jax.nn.relu(left[:, :, None] + right[:, None, :])
    related = jax.nn.relu(pairs @ middle)
    weights = firsts[:, :, :, None] * partners[:, None, None, :]
    means = jnp.einsum("tnab,tabh->tnh", weights, related)
    return means, (hidden_codes, first, middle, firsts, partners, pairs, related)


def means_over_pairs_backward(saved: Any, of_means: Float[Array, "task codes hidden"]) -> tuple[Array | None, ...]:
    hidden_codes, first, middle, firsts, partners, pairs, related = saved
    of_example = jnp.einsum("tna,tnh->tah", firsts, of_means)
    of_related = jnp.where(related > 0, of_example[:, :, None] * partners[:, None, :, None], 0)
    of_pairs = jnp.where(pairs > 0, of_related @ middle.T, 0)
    of_middle = jnp.einsum("tabh,tabk->hk", pairs, of_related)  # in the other order, XLA computes a factor twice
    of_left, of_right = jnp.sum(of_pairs, axis=2), jnp.sum(of_pairs, axis=1)
    of_codes = of_left @ first[0].T + of_right @ first[1].T
    of_first = jnp.stack([jnp.einsum("tec,teh->ch", hidden_codes, half) for half in (of_left, of_right)])
    return of_codes, of_first, of_middle, None, None


means_over_pairs.defvjp(means_over_pairs_forward, means_over_pairs_backward)
