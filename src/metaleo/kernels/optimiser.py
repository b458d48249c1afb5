"""The optimiser on a CPU: clipping and Adam in two passes over the memory, of which XLA makes nine."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from metaleo.kernels import launching
from metaleo.kernels.launching import LANES, Kernel, core_kernel, on_cores, usable


def in_two_passes(optimiser: optax.GradientTransformation, clip: float) -> optax.GradientTransformation:
    """The same as `optimiser`, which clips values and then the norm at `clip`, takes Adam's step with Optax's numbers,
    and none where the gradient is not finite."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[PyTree, Any]:
        leaves, structure = jax.tree.flatten(updates)
        if not fits(leaves):
            return optimiser.update(updates, state, params)
        *clips, adam = state.inner_state
        count = optax.safe_increment(adam.count)
        corrections = jnp.stack([1 - decay**count for decay in (FIRST_DECAY, SECOND_DECAY)])
        finite, *results = launching.launcher(kernel(tuple(leaf.shape for leaf in leaves), clip))(
            corrections, *leaves, *jax.tree.leaves(adam.mu), *jax.tree.leaves(adam.nu)
        )
        thirds = (results[i : i + len(leaves)] for i in range(0, 3 * len(leaves), len(leaves)))
        direction, first, second = map(structure.unflatten, thirds)
        finite = finite > 0
        adam = adam._replace(count=jnp.where(finite, count, adam.count), mu=first, nu=second)
        return direction, state._replace(
            notfinite_count=jnp.where(finite, 0, optax.safe_increment(state.notfinite_count)),
            last_finite=finite,
            total_notfinite=jnp.where(finite, state.total_notfinite, optax.safe_increment(state.total_notfinite)),
            inner_state=(*clips, adam),
        )

    return optax.GradientTransformation(optimiser.init, update)


FIRST_DECAY, SECOND_DECAY, SMALL = 0.9, 0.999, 1e-8
"""Those of Adam, in Optax as in its paper."""


def fits(leaves: list[Array]) -> bool:
    return on_cores() and all(leaf.size % LANES == 0 and usable(leaf.dtype) for leaf in leaves)


def kernel(shapes: tuple[tuple[int, ...], ...], clip: float) -> Kernel:
    numbers = {
        "clip": clip,
        "first_decay": FIRST_DECAY,
        "first_share": 1 - FIRST_DECAY,
        "second_decay": SECOND_DECAY,
        "second_share": 1 - SECOND_DECAY,
        "small": SMALL,
    }
    return core_kernel("adam_update", tuple(numbers.items()), ((), *3 * shapes), in_place=True)
