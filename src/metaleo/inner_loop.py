"""Adaptation by gradient descent: on codes, then on weights (Algorithm 1, lines 10-13)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def descend(
    loss: Callable[[Float[Array, "*shape"], PyTree], Float[Array, ""]],
    start: Float[Array, "*shape"],
    step_size: Float[Array, "..."] | float,
    num_steps: int,
    noise: PyTree = None,
    first_order: bool = False,
    max_grad_norm: float | None = None,
) -> tuple[Float[Array, "*shape"], Float[Array, " step"]]:
    """x ← x - α ∘ ∇loss(x), `num_steps` times; also the loss before each step.

    `noise` has one entry per step on its leading axes; step t sees `loss(x, noise[t])`. The whole path is
    differentiable, to any order; `first_order` treats each inner gradient as a constant. A gradient longer than
    `limit` is shortened to it: through a deep network a step can be of any length, and the next one of any more.
    """

    def step(x, noise_now):
        value, gradient = jax.value_and_grad(loss)(x, noise_now)
        if max_grad_norm is not None:
            length = jnp.sqrt(jnp.sum(gradient**2) + 1e-12)  # never zero: its own gradient is needed too
            gradient *= jnp.minimum(1.0, max_grad_norm / length)
        if first_order:
            gradient = jax.lax.stop_gradient(gradient)
        return x - step_size * gradient, value

    return jax.lax.scan(step, start, noise, length=num_steps, unroll=True)
