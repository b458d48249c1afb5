"""The machine: compiling for it, its devices (cores, GPUs, several hosts), its memory."""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, PyTree

from metaleo.errors import BadInput

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
"""What XLA may record once and hand to a GPU as a whole: by default all of this but loops."""


def jit(function: Callable[..., Any], *, loops: bool = False, **options: Any) -> Callable[..., Any]:
    """`jax.jit`. On a GPU the many small kernels of a meta-step may also run side by side, a fifth faster, and loops be
    handed over whole, 12 µs less for each turn; where each core of a CPU is a device of its own, none hands parts of
    its products to the others, a tenth faster."""
    settings = None
    if jax.default_backend() == "gpu":
        settings = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
        settings |= {"xla_gpu_enable_command_buffer": IN_GRAPHS} if loops else {}
    elif jax.default_backend() == "cpu" and jax.local_device_count() > 1:
        settings = {"xla_cpu_multi_thread_eigen": False}
    return jax.jit(function, compiler_options=settings, **options)


def memory_bytes() -> int:
    """The memory of the device that JAX computes on."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fits_on_device(floats: int) -> bool:
    """Whether so many numbers take less than half of the device's memory; cores that are devices each have a copy."""
    copies = jax.local_device_count() if jax.default_backend() == "cpu" else 1
    return 4 * floats * copies < memory_bytes() / 2


def private_cache_folder(name: str) -> Path | None:
    """~/.cache/metaleo/name ($XDG_CACHE_HOME), for what is run from there: None where it cannot be made, or is not this
    user's alone."""
    if not hasattr(os, "geteuid"):
        return None
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "metaleo" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # a read-only home, or none
        return None
    theirs = status.st_uid != os.geteuid() or status.st_mode & 0o077
    return None if theirs or not os.access(folder, os.W_OK) else folder


def enable_compilation_cache() -> None:
    """Let JAX keep compiled programs in ~/.cache/metaleo/compiled ($XDG_CACHE_HOME) from one process to the next.

    For commands, not on import: it is the configuration of the whole process. JAX's own settings win, so
    JAX_COMPILATION_CACHE_DIR is another folder and JAX_ENABLE_COMPILATION_CACHE=0 none; neither is there one where
    the folder cannot be made, or is not this user's alone: what is in it is run.
    """
    own = jax.config.values
    if own["jax_compilation_cache_dir"] is not None or not own["jax_enable_compilation_cache"]:
        return
    folder = private_cache_folder("compiled")
    if folder is None:
        return
    try:
        for program in folder.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("cache") + "atime").exists():
                program.unlink(missing_ok=True)  # its writer was killed; JAX would stumble over it for ever
    except OSError:
        return
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": 2**30,  # the least recently used go first
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    # a full disk, say: it costs time and nothing else
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)


AXIS = "devices"
MOST_CORES = 4
"""Devices that a CPU is cut into at most: each keeps features and weights of its own."""


def use_all_cores() -> None:
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


def replicate(tree: PyTree) -> PyTree:
    """The same arrays on every device."""
    return put_on_devices(tree, Spec())


def put_on_devices(tree: PyTree, spec: Spec) -> PyTree:
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


def on_each_device(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
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


def join_hosts() -> None:
    """Become one of several processes, if the environment says so."""
    if "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    try:
        processes, process = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        jax.distributed.initialize(
            num_processes=None if processes is None else int(processes),  # none: JAX asks the scheduler
            process_id=None if process is None else int(process),
        )
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"cannot join the other hosts: {str(error).splitlines()[0]}") from error
    results = os.dup(1)  # standard output is for results, but what joins the hosts talks there too
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", encoding="utf-8") if is_first_host() else open(os.devnull, "w")  # noqa: SIM115


def is_first_host() -> bool:
    """Whether this process is the one that writes files and talks to people."""
    return jax.process_index() == 0


def barrier(what: str) -> None:
    """Wait until all hosts are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def broadcast(tree: PyTree) -> PyTree:
    """What the first host has, on every host; arrays of one shape on all of them."""
    return multihost_utils.broadcast_one_to_all(tree) if jax.process_count() > 1 else tree


def any_host(here: bool) -> bool:
    if jax.process_count() == 1:
        return here
    return bool(np.any(multihost_utils.process_allgather(np.array(here))))
