"""Kernels: whether they can be used here, how they are cut to the shapes of a problem, compiled and launched.

Arrays have an axis of runs in front, each with a learner of its own, then one of tasks; `vmap` adds runs.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from metaleo.kernels import native, nvrtc
from metaleo.model.gaussian import Slopes
from metaleo.together import Arrays

FOLDER = Path(__file__).parent
CORES = ("cores",)
"""The sources of what a CPU's cores run; all others are for GPUs."""
LANES = 16
"""Numbers of the widest vectors that a core has: what they do not divide is left to XLA."""
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block may ask for on the GPUs that have clusters."""
MOST_NUMBERS = 2**31 - 1
"""Of an array that a kernel reads or writes: it counts in 32 bits."""


Numbers = tuple[tuple[str, int | float], ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function of some sources, for arrays of given shapes, and how it is launched for a run."""

    name: str
    sources: tuple[str, ...]
    constants: Numbers
    """Besides its sizes that follow, for the preprocessor."""
    clusters: int
    cluster: int
    """Blocks of a cluster."""
    threads: int
    shared_bytes: int
    """`sizeof(Shared)`."""
    results: tuple[tuple[int, ...], ...]
    """Their shapes, of a run."""
    resident: int = 1
    """Blocks that a multiprocessor should have registers for."""
    in_place: bool = False
    """Results but the first take the memory of the argument at their place."""
    from_table: bool = False
    """The last of its arguments is a table that all runs share, the one before it has numbers of its rows."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Of the inner loop of tasks that share a learner."""

    tasks: int
    way: int
    examples: int
    latent: int
    dim: int
    latent_steps: int
    finetune_steps: int


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the work on tasks of these shapes is shared out, by the kernels of some sources."""

    sources: tuple[str, ...]
    shapes: Shapes
    together: int
    """Tasks that are taken by one cluster of blocks."""
    cluster: int
    """Blocks of a cluster."""
    threads: int
    shared_bytes: int
    """`sizeof(Shared)`."""
    passes: int = 1
    """How often a cluster does that, one after the other."""

    @property
    def clusters(self) -> int:
        """For the tasks of a learner."""
        return -(-self.shapes.tasks // (self.together * self.passes))

    def kernel(self, name: str, slopes: Slopes, results: tuple[tuple[int, ...], ...]) -> Kernel:
        """The one of that name, with results of these shapes for each task."""
        numbers: dict[str, int | float] = {"official": int(slopes.official), "initial": float(slopes.initial)}
        if self.sources != CORES:  # which see what shapes they are given
            numbers |= dataclasses.asdict(self.shapes) | {"together": self.together, "passes": self.passes}
        return Kernel(
            name, self.sources, tuple(numbers.items()), self.clusters, self.cluster, self.threads, self.shared_bytes,
            tuple((self.shapes.tasks, *shape) for shape in results),
        )  # fmt: skip


def core_kernel(name: str, constants: Numbers, results: tuple[tuple[int, ...], ...], **how: bool) -> Kernel:
    """One that a core runs as it is: nothing is shared out."""
    return Kernel(name, CORES, constants, 1, 1, 1, 0, results, **how)


def eights(number: int) -> int:
    return 8 * -(-number // 8)


def apart(width: int) -> int:
    """So many numbers that rows of this width begin in different banks of shared memory."""
    return width + 16 - width % 32


def aligned(*sizes: int) -> int:
    """Bytes of arrays of these many floats, each begun at a multiple of 16 bytes."""
    return sum(-(-size // 4) * 16 for size in sizes)


FEW_RUNS = 6
"""So many runs side by side leave room on a GPU, and are hurried; with more of them nothing is wasted instead."""

RUNS: contextvars.ContextVar[int] = contextvars.ContextVar("RUNS", default=1)


@contextlib.contextmanager
def runs_at_once(runs: int) -> Iterator[None]:
    """What is traced in here is for so many runs side by side; for none, it is left to XLA."""
    token = RUNS.set(runs)
    try:
        yield
    finally:
        RUNS.reset(token)


def many() -> bool:
    """Whether what is traced is for many runs."""
    return RUNS.get() > FEW_RUNS


def hurried() -> bool:
    """Whether kernels are better left to the inner loop: on a GPU with few runs, where XLA runs others beside it."""
    return has_clusters() and not many()


def usable(dtype: np.dtype) -> bool:
    """Whether kernels can be used here; on a GPU they multiply as JAX does unless more is asked for, in TF32."""
    if dtype != jnp.float32 or RUNS.get() == 0:
        return False
    if on_cores():
        return native.library() is not None
    return jax.config.values["jax_default_matmul_precision"] in TF32 and has_clusters() and nvrtc.library() is not None


TF32 = (None, "default", "fastest", "tensorfloat32")


def on_cores() -> bool:
    """Whether it is a CPU that computes."""
    return jax.default_backend() == "cpu" and not has_clusters()


def has_clusters() -> bool:
    """Whether JAX computes on an NVIDIA GPU of compute capability 9.0 or later."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    return float(device.compute_capability) >= 9


def source(*names: str) -> str:
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in names)


def constants(kernel: Kernel) -> Numbers:
    """For the preprocessor."""
    numbers = (
        *kernel.constants,
        *((name, getattr(kernel, name)) for name in ("cluster", "threads", "resident", "shared_bytes")),
    )
    return tuple((name.upper(), number) for name, number in numbers)


@functools.cache
def ptx(sources: tuple[str, ...], constants: Numbers) -> str:
    capability = jax.devices()[0].compute_capability
    return nvrtc.compile_ptx(source("cluster.cuh", *sources), dict(constants), capability)


@functools.cache
def launcher(kernel: Kernel) -> Callable[..., Arrays]:
    """A kernel as a function of the arrays of a run."""

    @custom_vmap
    def launch(*arrays: Array) -> Arrays:
        runs = len(arrays[0])
        own = arrays[:-1] if kernel.from_table else arrays
        largest = max(*(array.size for array in own), *(runs * math.prod(shape) for shape in kernel.results))
        if runs > 1 and largest > MOST_NUMBERS:
            rest = arrays[len(own) :]
            halves = (
                launch(*(array[: runs // 2] for array in own), *rest),
                launch(*(array[runs // 2 :] for array in own), *rest),
            )
            return tuple(map(jnp.concatenate, zip(*halves, strict=True)))
        results = [jax.ShapeDtypeStruct((runs, *shape), jnp.float32) for shape in kernel.results]
        if kernel.sources == CORES:
            numbers = {n: np.int32(x) if isinstance(x, int) else np.float32(x) for n, x in kernel.constants}
            aliases = {i: i for i in range(1, len(arrays))} if kernel.in_place else None
            call = jax.ffi.ffi_call(native.target(kernel.name), results, input_output_aliases=aliases)
            return tuple(call(*arrays, **numbers))
        call = jax.ffi.ffi_call("__gpu$xla.gpu.ptx", results)
        launch_sizes = {
            "grid_x": runs * kernel.clusters * kernel.cluster, "grid_y": 1, "grid_z": 1,
            "block_x": kernel.threads, "block_y": 1, "block_z": 1,
            "shared_mem_bytes": kernel.shared_bytes,
        }  # fmt: skip
        return tuple(
            call(
                *arrays,
                name=kernel.name,
                kernel_type="ptx",
                kernel_data=ptx(kernel.sources, constants(kernel)),
                output_indices=tuple(np.int32(len(arrays) + i) for i in range(len(kernel.results))),
                **{key: np.int32(number) for key, number in launch_sizes.items()},
            )
        )

    @launch.def_vmap
    def more_runs(size: int, batched: list[bool], *given: Array) -> tuple[Arrays, tuple[bool, ...]]:
        arrays, table = list(given), None
        if kernel.from_table:
            table = arrays.pop()
            *batched, many_tables = batched
            if many_tables:  # one below the other
                rows = arrays[-1] if batched[-1] else jnp.broadcast_to(arrays[-1], (size, *arrays[-1].shape))
                first = jnp.arange(size, dtype=rows.dtype) * table.shape[1]
                arrays[-1], batched[-1] = rows + first.reshape(-1, *[1] * (rows.ndim - 1)), True
                table = table.reshape(-1, table.shape[2])
        every = (
            array if own else jnp.broadcast_to(array, (size, *array.shape))
            for array, own in zip(arrays, batched, strict=True)
        )
        flat = (array.reshape(-1, *array.shape[2:]) for array in every)
        joined = launch(*flat, *([] if table is None else [table]))
        return tuple(array.reshape(size, -1, *array.shape[1:]) for array in joined), (True,) * len(joined)

    def of_one_run(*arrays: Array) -> Arrays:
        *own, last = arrays
        own = *(array[None] for array in own), last if kernel.from_table else last[None]
        return tuple(array[0] for array in launch(*own))

    return of_one_run


# Trust


TOLERATED = 0.02
"""Of the largest number of an array. Products in TF32 differ by a tenth of this; a kernel gone wrong, by all of it."""


@functools.cache
def trusted(difference: Callable[..., float], *arguments: Any) -> bool:
    """Whether kernels compute here what XLA does: tried once per process, before they are used.

    On a GPU, that is: how they get there is no documented interface of XLA.
    """
    if on_cores():
        return True
    try:
        with jax.ensure_compile_time_eval():
            apart = difference(*arguments)
        if apart <= TOLERATED:
            return True
        what = f"differ from XLA by {apart:.2g} on this GPU"
    except RuntimeError as error:  # of NVRTC or XLA
        what = f"do not work on this GPU ({str(error).splitlines()[0]})"
    warnings.warn(f"kernels {what}: going on without them", stacklevel=2)
    return False


def apart_by(arrays: tuple[Any, ...], expected: tuple[Any, ...]) -> float:
    """The largest difference, in terms of the largest number of each array; NaN, where there is one."""
    apart = (jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in zip(arrays, expected, strict=True))
    return float(np.max([*apart]))
