"""The inner loop of training with a linear decoder and a linear head, its derivatives written out.

`inner_loop.descend` says what is computed, and is what a single task gets. Under `vmap` over tasks that share the
learner, as in every meta-step, the steps of all tasks are taken together here: the second derivatives are the few
products they need to be, products with the decoder are of all tasks at once, and those that make up its gradient of
all steps at once.

Shapes: task, step (or one draw for all steps), example, class (n), latent (l), dim (d).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from metaleo.inner_loop import descend, descend_linear
from metaleo.model.gaussian import Slopes
from metaleo.objective import support_loss
from metaleo.tasks.task import Batch
from metaleo.together import Arrays, together

FEW = 8
"""Examples whose sum is written out."""


def softmax_loss(
    logits: Float[Array, "task way example"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> tuple[Float[Array, " task"], Float[Array, "task way example"]]:
    """The loss of each task, and the probabilities."""
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    loss = jnp.sum(share * jnp.sum(targets * (total - logits), axis=1), axis=1)
    return loss, jnp.exp(logits - total)


def residual(
    probabilities: Float[Array, "task way example"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> Float[Array, "task way example"]:
    """R = ∂loss/∂logits."""
    return share[:, None, :] * (probabilities - targets)


def residuals_of_steps(
    probabilities: Float[Array, "task step way example"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> Float[Array, "task step way example"]:
    return share[:, None, None, :] * (probabilities - targets[:, None])


def to_logits(
    gradient: Float[Array, "task way example"],
    loss_gradient: Float[Array, " task"],
    probabilities: Float[Array, "task way example"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> Float[Array, "task way example"]:
    """The gradient with respect to the logits, from those with respect to R and to the loss itself."""
    gradient = gradient * share[:, None, :]
    through = probabilities * (gradient - jnp.sum(probabilities * gradient, axis=1, keepdims=True))
    return through + loss_gradient[:, None, None] * residual(probabilities, targets, share)


def rows(
    weights: Float[Array, "task way example"], inputs: Float[Array, "task example dim"]
) -> Float[Array, "task way dim"]:
    """Σ over examples: how a gradient of logits reaches weights, as each example's share of each row."""
    if on_gpu() and (examples := inputs.shape[1]) <= FEW:
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
    """There a sum joins the kernels around it, and their number counts; a CPU is quicker with matrix products."""
    return jax.default_backend() == "gpu"


# Latent steps: z ← z - α ∘ ∇L(zM + σ(zS) ∘ ε)


def forward_codes(
    slopes: Slopes,
    code: Float[Array, "task way latent"],
    to_raw_scale: Float[Array, "latent dim"],
    step_size: Float[Array, " latent"],
    inputs: Float[Array, "task draw example dim"],
    projected: Float[Array, "task draw example latent"],
    noise: Float[Array, "task step way dim"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> tuple[Array, Array, Arrays, Any]:
    """Adapted codes; losses before each step; codes, their gradients and the probabilities of each step; and what else
    the way back needs of it."""
    losses, path, kept = [], [], []
    for t in range(noise.shape[1]):
        seen, projected_now = at(inputs, t), at(projected, t)
        scale, slope, bend = (part * noise[:, t] for part in slopes(code @ to_raw_scale))
        logits = dots(projected_now, code) + dots(seen, scale)
        loss, probabilities = softmax_loss(logits, targets, share)
        r = residual(probabilities, targets, share)
        of_weights = rows(r, seen)  # G, the gradient with respect to the weights
        gradient = rows(r, projected_now) + (of_weights * slope) @ to_raw_scale.T
        losses.append(loss)
        path.append((code, gradient, probabilities))
        kept.append((of_weights, slope, bend))
        code = code - step_size[None, None, :] * gradient
    return code, jnp.stack(losses, axis=1), stack_steps(path), kept


def backward_codes(
    to_raw_scale: Float[Array, "latent dim"],
    step_size: Float[Array, " latent"],
    inputs: Float[Array, "task draw example dim"],
    projected: Float[Array, "task draw example latent"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
    path: Arrays,
    kept: Any,
    code_gradient: Float[Array, "task way latent"],
    loss_gradients: Float[Array, "task step"],
) -> tuple[Array, Array, Array, Array, Array]:
    """∂/∂z₀, ∂/∂α; of each step ∂/∂(its gradient) and ∂/∂(its logits); and for the gradient of S, of each step what
    goes with the former (the weights' part of its gradient) and with its codes (∂/∂(zS))."""
    parts, rights = [], []
    of_step_size = jnp.zeros_like(step_size)
    _, gradients, probabilities = path
    for t in reversed(range(len(kept))):
        of_weights, slope, bend = kept[t]
        seen, projected_now = at(inputs, t), at(projected, t)
        of_gradient = -step_size[None, None, :] * code_gradient
        of_step_size -= jnp.sum(code_gradient * gradients[:, t], axis=(0, 1))
        back = of_gradient @ to_raw_scale
        of_r = dots(projected_now, of_gradient) + dots(seen, back * slope)
        of_logits = to_logits(of_r, loss_gradients[:, t], probabilities[:, t], targets, share)
        of_raw_scale = back * of_weights * bend + rows(of_logits, seen) * slope
        parts.append((of_gradient, of_logits))
        rights.append(jnp.stack([of_weights * slope, of_raw_scale], axis=1))
        code_gradient = code_gradient + rows(of_logits, projected_now) + of_raw_scale @ to_raw_scale.T
    of_gradients, of_logits = stack_steps(parts[::-1])
    return code_gradient, of_step_size, of_gradients, of_logits, jnp.stack(rights[::-1], axis=1)


def as_rows(array: Float[Array, "*rows numbers"]) -> Float[Array, "all_rows numbers"]:
    """With one axis for all that is summed over: of several, XLA changes the order, and moves the numbers."""
    return array.reshape(-1, array.shape[-1])


def stack_steps(path: list[Arrays]) -> Arrays:
    return tuple(jnp.stack(part, axis=1) for part in zip(*path, strict=True))


def at(draws: Float[Array, "task draw ..."], step: int) -> Float[Array, "task ..."]:
    """What a step sees; one draw serves all of them."""
    return draws[:, step % draws.shape[1]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def descend_codes_of_tasks(slopes: Slopes, *arguments: Array) -> Arrays:
    return codes_forward(slopes, *arguments)[0]


def codes_forward(
    slopes: Slopes,
    code: Float[Array, "task way latent"],
    to_mean: Float[Array, "latent dim"],
    to_raw_scale: Float[Array, "latent dim"],
    step_size: Float[Array, " latent"],
    inputs: Float[Array, "task draw example dim"],
    noise: Float[Array, "task step way dim"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> tuple[Arrays, Any]:
    projected = inputs @ to_mean.T
    given = to_raw_scale, step_size, inputs, projected
    adapted, losses, path, kept = forward_codes(slopes, code, *given, noise, targets, share)
    return (adapted, losses), (to_mean, noise, (*given, targets, share, path, kept))


def codes_backward(slopes: Slopes, all_kept: Any, gradients: Arrays) -> tuple[Array | None, ...]:
    to_mean, noise, given = all_kept
    to_raw_scale, _, inputs, _, targets, share, (codes, _, probabilities), _ = given
    of_code, of_step_size, of_gradients, of_logits, rights = backward_codes(*given, *gradients)
    lefts = jnp.stack([of_gradients, codes], axis=2)  # (task, step, 2, way, latent)
    of_raw_scale = as_rows(lefts).T @ as_rows(rights)
    residuals = residuals_of_steps(probabilities, targets, share)
    of_projected = by_example(residuals, of_gradients) + by_example(of_logits, codes)
    # needed, and computed, only where the inputs are learned too
    scale, slope, _ = (part * noise for part in slopes(codes @ to_raw_scale))
    of_inputs = by_example(of_logits, scale) + by_example(residuals, (of_gradients @ to_raw_scale) * slope)
    if inputs.shape[1] == 1:
        of_projected, of_inputs = (jnp.sum(part, axis=1, keepdims=True) for part in (of_projected, of_inputs))
    of_inputs = of_inputs + of_projected @ to_mean
    of_mean = as_rows(of_projected).T @ as_rows(inputs)
    return of_code, of_mean, of_raw_scale, of_step_size, of_inputs, None, None, None


descend_codes_of_tasks.defvjp(codes_forward, codes_backward)


# Fine-tuning steps: θ ← θ - α ∘ ∇L(θ)


@jax.custom_vjp
def descend_weights_of_tasks(*arguments: Array) -> Arrays:
    return weights_forward(*arguments)[0]


def weights_forward(
    weights: Float[Array, "task way dim"],
    step_size: Float[Array, " dim"],
    inputs: Float[Array, "task step example dim"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> tuple[Arrays, Any]:
    losses, path, kept = [], [], []
    for s in range(inputs.shape[1]):
        loss, probabilities = softmax_loss(dots(inputs[:, s], weights), targets, share)
        gradient = rows(residual(probabilities, targets, share), inputs[:, s])
        losses.append(loss)
        path.append(probabilities)
        kept.append((weights, gradient))
        weights = weights - step_size[None, None, :] * gradient
    return (weights, jnp.stack(losses, axis=1)), (step_size, inputs, targets, share, jnp.stack(path, axis=1), kept)


def weights_backward(all_kept: Any, gradients: Arrays) -> tuple[Array | None, ...]:
    step_size, inputs, targets, share, probabilities, kept = all_kept
    of_weights, of_losses = gradients
    of_step_size, parts = jnp.zeros_like(step_size), []
    for s in reversed(range(len(kept))):
        _, gradient = kept[s]
        of_step_size -= jnp.sum(of_weights * gradient, axis=(0, 1))
        of_gradient = -step_size[None, None, :] * of_weights
        of_r = dots(inputs[:, s], of_gradient)
        of_logits = to_logits(of_r, of_losses[:, s], probabilities[:, s], targets, share)
        parts.append((of_gradient, of_logits))
        of_weights = of_weights + rows(of_logits, inputs[:, s])
    # needed, and computed, only where the inputs are learned too
    of_gradients, of_logits = stack_steps(parts[::-1])
    residuals, weights = residuals_of_steps(probabilities, targets, share), jnp.stack([w for w, _ in kept], axis=1)
    of_inputs = by_example(of_logits, weights) + by_example(residuals, of_gradients)
    return of_weights, of_step_size, of_inputs, None, None


descend_weights_of_tasks.defvjp(weights_forward, weights_backward)


# One task, or all of them


@functools.cache
def code_descent(slopes: Slopes, steps: int) -> Callable[..., Arrays]:
    """`descend` on codes: a function of (code, M, S, α, inputs of each step or of all, ε, targets, mask)."""

    def one(code, to_mean, to_raw_scale, step_size, inputs, noise, targets, mask):
        def loss(code, now):
            seen, projected, weights_noise = now
            scale, *_ = slopes(code @ to_raw_scale)
            return support_loss(projected @ code.T + seen @ (scale * weights_noise).T, Batch(seen, targets, mask))

        def each_step(draws):
            return jnp.broadcast_to(draws, (steps, *draws.shape[1:]))

        each = each_step(inputs), each_step(inputs @ to_mean.T), noise
        return descend(loss, code, step_size[None, :], steps, each)

    def many(*arguments: Array) -> Any:
        *arrays, targets, mask = arguments
        return descend_codes_of_tasks(slopes, *arrays, *classes_first(targets, mask))

    return together(one, many, shared=(1, 2, 3))


@functools.cache
def weight_descent() -> Callable[..., Arrays]:
    """`descend_linear` on weights, each step with inputs of its own: a function of (θ, α, inputs, targets, mask)."""

    def one(weights, step_size, inputs, targets, mask):
        return descend_linear(weights, step_size, len(inputs), inputs, Batch(inputs[0], targets, mask))

    def many(weights, step_size, inputs, targets, mask):
        if on_gpu():  # in inner products there are fewer kernels, one after the other
            return jax.vmap(one, (0, None, 0, 0, 0))(weights, step_size, inputs, targets, mask)
        return descend_weights_of_tasks(weights, step_size, inputs, *classes_first(targets, mask))

    return together(one, many, shared=(1,))


def classes_first(
    targets: Float[Array, "task example way"], mask: Bool[Array, "task example"]
) -> tuple[Float[Array, "task way example"], Float[Array, "task example"]]:
    """Targets turned, as the products here like them, and what the loss of each example counts in `support_loss`."""
    present = mask.astype(targets.dtype)
    return jnp.swapaxes(targets, 1, 2), targets.shape[2] * present / jnp.sum(present, axis=1, keepdims=True)
