"""Adaptation by gradient descent: on codes, then on weights (Algorithm 1, lines 10-13)."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, PyTree


def descend(
    loss: Callable[[Float[Array, "*shape"], PyTree], Float[Array, ""]],
    start: Float[Array, "*shape"],
    step_size: Float[Array, "..."] | float,
    num_steps: int,
    noise: PyTree = None,
    first_order: bool = False,
) -> tuple[Float[Array, "*shape"], Float[Array, " step"]]:
    """x ← x - α ∘ ∇loss(x), `num_steps` times; also the loss before each step.

    `noise` has one entry per step on its leading axes; step t sees `loss(x, noise[t])`. The whole path is
    differentiable, to any order; `first_order` treats each inner gradient as a constant.
    """

    def step(x, noise_now):
        value, gradient = jax.value_and_grad(loss)(x, noise_now)
        if first_order:
            gradient = jax.lax.stop_gradient(gradient)
        return x - step_size * gradient, value

    return jax.lax.scan(step, start, noise, length=num_steps, unroll=True)
