"""The inner loop of training with a linear decoder and a linear head, its derivatives written out.

`inner_loop.descend` says what is computed, and is what a single task gets. Under `vmap` over tasks that share the
learner, as in every meta-step, the steps of all tasks are taken together here: the second derivatives are the few
products they need to be, products with the decoder are of all tasks at once, and those that make up its gradient of
all steps at once.

Shapes: task, step (or one draw for all steps), example, class (n), latent (l), dim (d).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, Float

from metaleo.inner_loop import descend, descend_linear
from metaleo.objective import support_loss
from metaleo.tasks.task import Batch

Slopes = Callable[[Float[Array, "*shape"]], tuple[Float[Array, "*shape"], ...]]
"""Of σ as a function of what the decoder says: itself, its first and its second derivative."""
Arrays = tuple[Array, ...]
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
    weights: Float[Array, "task way example"], of_classes: Float[Array, "task way dim"]
) -> Float[Array, "task example dim"]:
    """Σ over classes."""
    return jnp.einsum("tne,tnd->ted", weights, of_classes)


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
) -> tuple[Float[Array, "task way latent"], Float[Array, "task step"], Any]:
    """Adapted codes, losses before each step, and what the way back needs of each step."""
    losses, path = [], []
    for t in range(noise.shape[1]):
        seen, projected_now = at(inputs, t), at(projected, t)
        scale, slope, bend = (part * noise[:, t] for part in slopes(code @ to_raw_scale))
        logits = dots(projected_now, code) + dots(seen, scale)
        loss, probabilities = softmax_loss(logits, targets, share)
        r = residual(probabilities, targets, share)
        of_weights = rows(r, seen)  # G, the gradient with respect to the weights
        gradient = rows(r, projected_now) + (of_weights * slope) @ to_raw_scale.T
        losses.append(loss)
        path.append((code, gradient, probabilities, of_weights, slope, bend))
        code = code - step_size[None, None, :] * gradient
    return code, jnp.stack(losses, axis=1), path


def backward_codes(
    to_raw_scale: Float[Array, "latent dim"],
    step_size: Float[Array, " latent"],
    inputs: Float[Array, "task draw example dim"],
    projected: Float[Array, "task draw example latent"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
    path: Any,
    code_gradient: Float[Array, "task way latent"],
    loss_gradients: Float[Array, "task step"],
) -> tuple[Array, Array, list[Arrays]]:
    """∂/∂z₀, ∂/∂α, and of each step what the other gradients are made of: ∂/∂(its gradient), ∂/∂(its logits),
    ∂/∂(zS), and what reaches S beside it."""
    parts = []
    of_step_size = jnp.zeros_like(step_size)
    for t in reversed(range(len(path))):
        _, gradient, probabilities, of_weights, slope, bend = path[t]
        seen, projected_now = at(inputs, t), at(projected, t)
        of_gradient = -step_size[None, None, :] * code_gradient
        of_step_size -= jnp.sum(code_gradient * gradient, axis=(0, 1))
        back = of_gradient @ to_raw_scale
        of_r = dots(projected_now, of_gradient) + dots(seen, back * slope)
        of_logits = to_logits(of_r, loss_gradients[:, t], probabilities, targets, share)
        of_raw_scale = back * of_weights * bend + rows(of_logits, seen) * slope
        parts.append((of_gradient, of_logits, of_raw_scale, of_weights * slope))
        code_gradient = code_gradient + rows(of_logits, projected_now) + of_raw_scale @ to_raw_scale.T
    return code_gradient, of_step_size, parts[::-1]


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
    adapted, losses, path = forward_codes(slopes, code, *given, noise, targets, share)
    return (adapted, losses), (to_mean, noise, (*given, targets, share, path))


def codes_backward(slopes: Slopes, kept: Any, gradients: Arrays) -> tuple[Array | None, ...]:
    to_mean, noise, given = kept
    to_raw_scale, _, inputs, _, targets, share, path = given
    of_code, of_step_size, parts = backward_codes(*given, *gradients)
    codes, residuals = [p[0] for p in path], [residual(p[2], targets, share) for p in path]
    lefts = [left for code, part in zip(codes, parts, strict=True) for left in (part[0], code)]
    rights = [right for part in parts for right in (part[3], part[2])]
    of_raw_scale = jnp.einsum("ktnl,ktnd->ld", jnp.stack(lefts), jnp.stack(rights))
    of_projected, of_inputs = [], []
    for t, (code, r, (of_gradient, of_logits, _, _)) in enumerate(zip(codes, residuals, parts, strict=True)):
        of_projected.append(by_example(r, of_gradient) + by_example(of_logits, code))
        scale, slope, _ = (part * noise[:, t] for part in slopes(code @ to_raw_scale))
        # needed, and computed, only where the inputs are learned too
        of_inputs.append(by_example(of_logits, scale) + by_example(r, (of_gradient @ to_raw_scale) * slope))
    of_projected, of_inputs = jnp.stack(of_projected, axis=1), jnp.stack(of_inputs, axis=1)
    if inputs.shape[1] == 1:
        of_projected, of_inputs = (jnp.sum(part, axis=1, keepdims=True) for part in (of_projected, of_inputs))
    of_inputs = of_inputs + of_projected @ to_mean
    of_mean = jnp.einsum("tsel,tsed->ld", of_projected, inputs)
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
    losses, path = [], []
    for s in range(inputs.shape[1]):
        loss, probabilities = softmax_loss(dots(inputs[:, s], weights), targets, share)
        gradient = rows(residual(probabilities, targets, share), inputs[:, s])
        losses.append(loss)
        path.append((weights, probabilities, gradient))
        weights = weights - step_size[None, None, :] * gradient
    return (weights, jnp.stack(losses, axis=1)), (step_size, inputs, targets, share, path)


def weights_backward(kept: Any, gradients: Arrays) -> tuple[Array | None, ...]:
    step_size, inputs, targets, share, path = kept
    of_weights, of_losses = gradients
    of_step_size, of_inputs = jnp.zeros_like(step_size), []
    for s in reversed(range(len(path))):
        weights, probabilities, gradient = path[s]
        of_step_size -= jnp.sum(of_weights * gradient, axis=(0, 1))
        of_gradient = -step_size[None, None, :] * of_weights
        of_r = dots(inputs[:, s], of_gradient)
        of_logits = to_logits(of_r, of_losses[:, s], probabilities, targets, share)
        r = residual(probabilities, targets, share)
        of_inputs.append(by_example(of_logits, weights) + by_example(r, of_gradient))
        of_weights = of_weights + rows(of_logits, inputs[:, s])
    return of_weights, of_step_size, jnp.stack(of_inputs[::-1], axis=1), None, None


descend_weights_of_tasks.defvjp(weights_forward, weights_backward)


# One task, or all of them


def together(one: Callable[..., Arrays], many: Callable[..., Arrays], shared: tuple[int, ...]) -> Callable[..., Arrays]:
    """`one` for a task; under `vmap`, where the arguments numbered in `shared` are the same for all tasks, `many`.

    A primitive of its own: what `jax.custom_batching` makes cannot be differentiated in reverse.
    """
    primitive = Primitive("one_task_or_many")
    primitive.multiple_results = True

    def plain(*arguments: Array, jaxpr: ClosedJaxpr) -> list[Array]:
        return jaxpr_as_fun(jaxpr)(*arguments)

    def derivative(primals: Sequence[Array], tangents: Sequence[Any], jaxpr: ClosedJaxpr) -> Any:
        return jax.jvp(jaxpr_as_fun(jaxpr), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))

    def mapped(arguments: Sequence[Array], axes: Sequence[int | None], jaxpr: ClosedJaxpr) -> Any:
        if any(axes[i] is not None for i in shared):  # every task with a learner of its own
            results = jax.vmap(jaxpr_as_fun(jaxpr), tuple(axes))(*arguments)
        else:
            pairs = list(zip(arguments, axes, strict=True))
            size = next(argument.shape[axis] for argument, axis in pairs if axis is not None)
            fronts = [batching.bdim_at_front(argument, axis, size) for argument, axis in pairs]
            results = many(*(arguments[i] if i in shared else front for i, front in enumerate(fronts)))
        return results, [0] * len(results)

    primitive.def_impl(plain)
    primitive.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
    ad.primitive_jvps[primitive] = derivative
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    return lambda *arguments: tuple(primitive.bind(*arguments, jaxpr=jax.make_jaxpr(one)(*arguments)))


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
