"""Hardware: compilation options, devices (cores, GPUs, several hosts) and memory."""

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
"""Operations that XLA may record once and launch on a GPU as a whole: the default, plus loops (WHILE)."""


def jit(function: Callable[..., Any], *, loops: bool = False, **options: Any) -> Callable[..., Any]:
    """`jax.jit` with faster compiler options.

    On a GPU, the many small kernels of a meta-step may run concurrently, which is a fifth faster; with `loops`, whole
    loops are launched at once, which saves 12 µs per iteration. If each CPU core is a device of its own, products are
    not split among cores, which is a tenth faster.
    """
    settings = None
    if jax.default_backend() == "gpu":
        settings = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
        settings |= {"xla_gpu_enable_command_buffer": IN_GRAPHS} if loops else {}
    elif jax.default_backend() == "cpu" and jax.local_device_count() > 1:
        settings = {"xla_cpu_multi_thread_eigen": False}
    return jax.jit(function, compiler_options=settings, **options)


def memory_bytes() -> int:
    """The memory of the device that JAX computes on; 8 GiB where the system does not say, as on Windows."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system has the function, or knows these names
        return 2**33


def fits_on_device(floats: int) -> bool:
    """Whether this many numbers take less than half of the device's memory; each CPU device holds its own copy."""
    copies = jax.local_device_count() if jax.default_backend() == "cpu" else 1
    return 4 * floats * copies < memory_bytes() / 2


def private_cache_folder(name: str) -> Path | None:
    """The folder ~/.cache/metaleo/name ($XDG_CACHE_HOME), for files that are executed. None if it cannot be created, or
    if other users have access to it."""
    if not hasattr(os, "geteuid"):
        return None
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "metaleo" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # the home folder is read-only or missing
        return None
    theirs = status.st_uid != os.geteuid() or status.st_mode & 0o077
    return None if theirs or not os.access(folder, os.W_OK) else folder


def enable_compilation_cache() -> None:
    """Let JAX cache compiled programs across processes in ~/.cache/metaleo/compiled ($XDG_CACHE_HOME).

    Commands call this; importing the library does not, because it configures the whole process. JAX's own settings take
    precedence: JAX_COMPILATION_CACHE_DIR sets another folder, and JAX_ENABLE_COMPILATION_CACHE=0 disables the cache.
    There is no cache either if the folder cannot be created or other users have access to it, because its contents are
    executed.
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
                program.unlink(missing_ok=True)  # its writer was killed; JAX would fail on it every time
    except OSError:
        return
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": 2**30,  # least recently used programs are evicted first
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    # a cache error, such as a full disk, costs only time
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


AXIS = "devices"
MOST_CORES = 4
"""Maximum number of CPU devices: each holds its own copy of features and weights."""


def use_all_cores(devices: int | None = None) -> None:
    """Make each core a device, so that the tasks of a meta-batch, or runs, are split among the cores.

    Work that was begun on another number of devices goes on with that: otherwise it would be rounded otherwise.

    XLA computes the many small products of a meta-step on one core at a time: two devices train and test nearly twice
    as fast. Commands that train or test call this; importing the library does not, because it configures the whole
    process. It changes nothing if the number of devices is already configured, or if there are several hosts.
    """
    settled = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if settled or "JAX_COORDINATOR_ADDRESS" in os.environ:
        return
    try:
        jax.config.update("jax_num_cpu_devices", min(usable_cores(), MOST_CORES) if devices is None else devices)
    except RuntimeError:  # JAX has already initialised its devices
        return


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), (AXIS,))


def replicate(tree: PyTree) -> PyTree:
    """Copy the arrays to every device."""
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
    """A function that every device runs on its shard; the specs define how inputs and outputs are sharded."""
    return jax.shard_map(function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def can_share(number: int) -> bool:
    """Whether this many tasks can be split evenly among several devices of a single host."""
    return jax.device_count() > 1 and jax.process_count() == 1 and number % jax.device_count() == 0


def mean_over_devices(tree: PyTree) -> PyTree:
    """Inside `on_each_device`: the mean of the trees over all devices, exchanged as one vector."""
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])
    vector = jnp.zeros(ends[-1], leaves[0].dtype)
    for leaf, end in zip(leaves, ends, strict=True):  # `concatenate` would select the leaf for each number
        vector = jax.lax.dynamic_update_slice(vector, leaf.reshape(-1), (end - leaf.size,))
    parts = jnp.split(jax.lax.pmean(vector, AXIS), ends[:-1])
    return jax.tree.unflatten(structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])


# Rounding. Sums over devices, batches and engines are computed in different orders: the same run on another number of
# devices ends with other last digits, and after thousands of steps with other weights.


def rounding(engine: str | None = None) -> dict[str, Any]:
    """What decides how results are rounded, for the header of a saved state."""
    found: dict[str, Any] = {} if engine is None else {"engine": engine}
    found |= {"devices": jax.device_count(), "backend": jax.default_backend()}
    if found["backend"] == "cpu" and found["devices"] == 1:
        found["cores"] = usable_cores()  # among which XLA splits the products of a single device
    return found


def warn_of_other_rounding(path: Path, header: dict[str, Any], engine: str | None = None) -> None:
    """Say in one line what is not as it was when a state was saved."""
    now = {"jax": jax.__version__} | rounding(engine)
    before = header | {"jax": header.get("versions", {}).get("jax")}
    other = [name for name in now if before.get(name) not in (None, now[name])]  # version 0.1 saved only that of JAX
    if other:
        then, here = (", ".join(f"{name} {each[name]}" for name in other) for each in (before, now))
        warnings.warn(
            f"{path.parent} was begun with {then} and goes on with {here}: rounding differs, so that the result will "
            "not be exactly that of a run that was left alone",
            stacklevel=2,
        )


def join_hosts() -> None:
    """Join a multi-process run, if the environment variables define one."""
    if "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    try:
        processes, process = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        jax.distributed.initialize(
            num_processes=None if processes is None else int(processes),  # None: JAX asks the cluster's scheduler
            process_id=None if process is None else int(process),
        )
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"cannot join the other hosts: {str(error).splitlines()[0]}") from error
    results = os.dup(1)  # standard output is for results, but JAX's distributed runtime prints there too
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", encoding="utf-8") if is_first_host() else open(os.devnull, "w")  # noqa: SIM115


def is_first_host() -> bool:
    """Whether this process is the one that writes files and prints messages."""
    return jax.process_index() == 0


def barrier(what: str) -> None:
    """Wait until all hosts reach this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def broadcast(tree: PyTree) -> PyTree:
    """Copy the first host's arrays to every host; shapes must be the same on all hosts."""
    return multihost_utils.broadcast_one_to_all(tree) if jax.process_count() > 1 else tree


def any_host(here: bool) -> bool:
    if jax.process_count() == 1:
        return here
    return bool(np.any(multihost_utils.process_allgather(np.array(here))))
