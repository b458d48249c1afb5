"""Arrays joined to one vector, as the devices of a CPU exchange them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from metaleo.kernels import launching
from metaleo.kernels.launching import core_kernel, on_cores, usable


def joined(arrays: list[Array]) -> Array:
    """All numbers as one vector.

    Without kernels array after array is written into it: joining them, XLA would compute them number by number, asking
    for each whose turn it is.
    """
    size = sum(array.size for array in arrays)
    if on_cores() and all(usable(array.dtype) for array in arrays):
        return launching.launcher(core_kernel("join_arrays", (), ((size,),)))(*arrays)[0]
    vector, end = jnp.zeros(size, arrays[0].dtype), 0
    for array in arrays:
        vector = jax.lax.dynamic_update_slice(vector, array.reshape(-1), (end,))
        end += array.size
    return vector
