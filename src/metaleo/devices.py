"""The devices of a program: the cores of a CPU, one or more GPUs, or those of several hosts."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, PyTree

AXIS = "devices"
MOST_CORES = 4
"""Devices that a CPU is cut into at most: each keeps features and weights of its own."""


def use_cores() -> None:
    """Make a device of each core, so that the tasks of a meta-batch, or runs, are shared out among them.

    XLA computes the many small products of a meta-step on one core after the other: two devices train and test nearly
    twice as fast. For commands that do that, not on import, since it is the configuration of the whole process; whoever
    has settled the number of devices, or uses several hosts, keeps what they have.
    """
    settled = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if settled or "JAX_COORDINATOR_ADDRESS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", min(cores, MOST_CORES))
    except RuntimeError:  # something has been computed already
        return


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), (AXIS,))


def everywhere(tree: PyTree) -> PyTree:
    """The same arrays on every device."""
    return put(tree, Spec())


def put(tree: PyTree, spec: Spec) -> PyTree:
    if jax.device_count() == 1:
        return jax.tree.map(jnp.asarray, tree)
    sharding = NamedSharding(mesh(), spec)

    def put_leaf(leaf: Array | np.ndarray) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put_leaf(jax.random.key_data(leaf)))
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(put_leaf, tree)


def on_each(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A function run by every device, on what the specs give it and give back."""
    return jax.shard_map(function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def can_share(number: int) -> bool:
    """Whether so many tasks are shared out evenly among more than one device of this host."""
    return jax.device_count() > 1 and jax.process_count() == 1 and number % jax.device_count() == 0


def mean_over_devices(tree: PyTree) -> PyTree:
    """Inside `on_each`: the mean of what the devices have, exchanged as one vector."""
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])
    vector = jnp.zeros(ends[-1], leaves[0].dtype)
    for leaf, end in zip(leaves, ends, strict=True):  # concatenating, XLA would ask for each number whose turn it is
        vector = jax.lax.dynamic_update_slice(vector, leaf.reshape(-1), (end - leaf.size,))
    parts = jnp.split(jax.lax.pmean(vector, AXIS), ends[:-1])
    return jax.tree.unflatten(structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])
