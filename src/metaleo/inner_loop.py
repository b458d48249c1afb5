"""Adaptation by gradient descent: on codes, then on weights (Algorithm 1, lines 10-13)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from metaleo.objective import support_loss
from metaleo.tasks.task import Batch


def descend(
    loss: Callable[[Float[Array, "*shape"], PyTree], Float[Array, ""]],
    start: Float[Array, "*shape"],
    step_size: Float[Array, "..."] | float,
    num_steps: int,
    noise: PyTree = None,
    first_order: bool = False,
    limit: float | None = None,
) -> tuple[Float[Array, "*shape"], Float[Array, " step"]]:
    """x ← x - α ∘ ∇loss(x), `num_steps` times; also the loss before each step.

    `noise` has one entry per step on its leading axes; step t sees `loss(x, noise[t])`. The whole path is
    differentiable, to any order; `first_order` treats each inner gradient as a constant. A gradient longer than
    `limit` is shortened to it: through a deep network a step can be of any length, and the next one of any more.
    """

    def step(x, noise_now):
        value, gradient = jax.value_and_grad(loss)(x, noise_now)
        if limit is not None:
            length = jnp.sqrt(jnp.sum(gradient**2) + 1e-12)  # never zero: its own gradient is needed too
            gradient *= jnp.minimum(1.0, limit / length)
        if first_order:
            gradient = jax.lax.stop_gradient(gradient)
        return x - step_size * gradient, value

    return jax.lax.scan(step, start, noise, length=num_steps, unroll=True)


def descend_linear(
    start: Float[Array, "way dim"],
    step_size: Float[Array, " dim"],
    num_steps: int,
    inputs: Float[Array, "draw example dim"],
    support: Batch,
) -> tuple[Float[Array, "way dim"], Float[Array, " step"]]:
    """The same steps on the weights of a linear softmax head, without ever forming the weights in between.

    Step t has the gradient R_tᵀX_t, where R = ∂loss/∂logits, so weights only move along inputs, and the logits of
    step t follow from inner products of inputs: X_t w_tᵀ = X_t w_0ᵀ - Σ_{s<t} (X_t diag(α) X_sᵀ) R_s.
    `inputs` are those of each step (dropout differs from step to step), or one draw that serves all of them.
    """
    if num_steps == 0:
        return start, jnp.zeros(0, start.dtype)
    draws, examples, dim = inputs.shape
    rows = inputs.reshape(-1, dim)
    unmoved = (rows @ start.T).reshape(draws, examples, -1)
    products = (rows * step_size[None, :] @ rows.T).reshape(draws, examples, draws, examples)
    losses, residuals = [], []
    for t in range(num_steps):
        now = t % draws
        logits = unmoved[now]
        for s, residual in enumerate(residuals):  # multiply and sum: too small for a matrix product to pay
            logits -= jnp.sum(products[now, :, s % draws, :, None] * residual[None], axis=1)
        value, residual = jax.value_and_grad(support_loss)(logits, support)
        losses.append(value)
        residuals.append(residual)
    if draws == 1:
        residuals = [sum(residuals, start=jnp.zeros_like(unmoved[0]))]
    moved = jnp.concatenate(residuals).T @ rows
    return start - step_size[None, :] * moved, jnp.array(losses)
