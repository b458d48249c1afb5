"""Gradient descent in the inner loop: on codes, then on weights (Algorithm 1, lines 10-13)."""

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
    """x ← x - α ∘ ∇loss(x), `num_steps` times; also returns the loss before each step.

    `noise` has one entry per step on its leading axes; step t uses `loss(x, noise[t])`. The whole path is
    differentiable, to any order; `first_order` treats each inner gradient as a constant. A gradient whose norm exceeds
    `max_grad_norm` is scaled down to it: in a deep network one step can be very long, and the next even longer.
    """

    def step(x, noise_now):
        value, gradient = jax.value_and_grad(loss)(x, noise_now)
        if max_grad_norm is not None:
            length = jnp.sqrt(jnp.sum(gradient**2) + 1e-12)  # never zero, so that its own gradient is finite
            gradient *= jnp.minimum(1.0, max_grad_norm / length)
        if first_order:
            gradient = jax.lax.stop_gradient(gradient)
        return x - step_size * gradient, value

    return jax.lax.scan(step, start, noise, length=num_steps, unroll=True)
