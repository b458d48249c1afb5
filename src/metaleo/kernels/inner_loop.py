"""How the kernels of the inner loop are cut to the shapes of a problem, and launched.

Arrays have an axis of runs in front, each with a learner of its own, then one of tasks; `vmap` adds runs.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from metaleo.kernels import nvrtc
from metaleo.model.gaussian import Slopes
from metaleo.together import Arrays

FOLDER = Path(__file__).parent
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block may ask for on the GPUs that have clusters."""
FEW_RUNS = 6
"""So many runs side by side leave room on a GPU, and are hurried; with more of them nothing is wasted instead."""

FULL = 250
"""Blocks, one to a multiprocessor, that keep the largest GPUs busy for two rounds."""


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
    """How the work on tasks of these shapes is shared out, by the kernels of one of the two sources."""

    source: str
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

    def constants(self) -> dict[str, int | float]:
        """For the preprocessor."""
        numbers = dataclasses.asdict(self.shapes)
        numbers |= {name: getattr(self, name) for name in ("together", "passes", "cluster", "threads", "shared_bytes")}
        return {name.upper(): number for name, number in numbers.items()}


def few_runs(shapes: Shapes) -> Cut | None:
    """A cluster for each task, and in it a slice of the features for each block: `few_runs.cu`, if it can do that."""
    cluster = next((blocks for blocks in (4, 2, 1) if shapes.dim % (16 * blocks) == 0), 0)
    threads = 2 * shapes.dim // max(1, cluster)
    # a thread holds as many numbers of the decoder in its registers as a code has, three times over
    if not cluster or not 0 < shapes.latent <= 64 or shapes.latent % 16 or threads > 512 or not has_steps(shapes):
        return None
    pairs, codes = shapes.way * shapes.examples, shapes.way * shapes.latent
    steps = shapes.latent_steps + shapes.finetune_steps
    room = eights(shapes.way)
    long, wide = apart(shapes.latent), apart(shapes.dim // cluster)
    padded = eights(shapes.examples) * room
    inbox, parts = 4, cluster * max(pairs, codes)
    shared_bytes = aligned(
        max(shapes.latent_steps, shapes.finetune_steps) * shapes.examples * wide,
        shapes.latent_steps * shapes.examples * long,
        shapes.way * long, shapes.way * long, codes, shapes.way * wide, shapes.way * wide, steps * pairs, padded, padded,
        steps * shapes.examples, threads // 32 * max(shapes.latent, shapes.examples) * room, pairs, shapes.examples,
        shapes.latent, inbox, inbox, parts, parts,
    )  # fmt: skip
    return Cut("few_runs.cu", shapes, 1, cluster, threads, shared_bytes) if shared_bytes <= MOST_SHARED else None


def many_runs(shapes: Shapes, runs: int = 1) -> Cut | None:
    """A block for as many tasks as have sixteen classes together, or several times as many where the GPU is full anyway:
    `many_runs.cu`, if it can do that."""
    together = min(16 // shapes.way, shapes.tasks)
    warps = next((warps for warps in (8, 4) if shapes.dim % (16 * warps) == 0), 0)
    # a thread holds as many weights in its registers as its warp has features, four times over
    if not together or not 0 < shapes.dim <= 640 or not warps or shapes.latent % 8 or not has_steps(shapes):
        return None
    seen, threads, long = together * shapes.examples, 32 * warps, shapes.latent + 8
    staged = seen if seen <= 16 else 1
    residuals, logits = 16 * (eights(seen) + 8), seen * shapes.way
    shared_bytes = 2 * shapes.latent * (shapes.dim + 8) + aligned(
        16 * (shapes.dim + 4), staged * (shapes.dim + 4), staged * long, warps * max(logits, 16 * (shapes.latent + 4)), 16 * long,
        residuals, residuals, logits, logits, seen, (shapes.latent_steps + shapes.finetune_steps) * seen, 4, 4, 4, 4,
    )  # fmt: skip
    if shared_bytes > MOST_SHARED:
        return None
    parts = -(-shapes.tasks // together)
    passes = min(parts, max(1, runs * parts // FULL))
    return Cut("many_runs.cu", shapes, together, 1, threads, shared_bytes, -(-parts // -(-parts // passes)))


def has_steps(shapes: Shapes) -> bool:
    return shapes.latent_steps > 0 and shapes.finetune_steps > 0


def eights(number: int) -> int:
    return 8 * -(-number // 8)


def apart(width: int) -> int:
    """So many numbers that rows of this width begin in different banks of shared memory."""
    return width + 16 - width % 32


def aligned(*sizes: int) -> int:
    """Bytes of arrays of these many floats, each begun at a multiple of 16 bytes."""
    return sum(-(-size // 4) * 16 for size in sizes)


RUNS: contextvars.ContextVar[int] = contextvars.ContextVar("RUNS", default=1)


@contextlib.contextmanager
def runs_at_once(runs: int) -> Iterator[None]:
    """What is traced in here is for so many runs side by side; for none, it is left to XLA."""
    token = RUNS.set(runs)
    try:
        yield
    finally:
        RUNS.reset(token)


def cut(shapes: Shapes, dtype: np.dtype) -> Cut | None:
    """How the kernels do this here, if they can; they multiply as JAX does on a GPU unless more is asked for, in TF32."""
    if dtype != jnp.float32 or RUNS.get() == 0 or jax.config.values["jax_default_matmul_precision"] not in TF32:
        return None
    if not has_clusters() or nvrtc.library() is None:
        return None
    runs = RUNS.get()
    return many_runs(shapes, runs) if runs > FEW_RUNS else few_runs(shapes) or many_runs(shapes)


TF32 = (None, "default", "fastest", "tensorfloat32")


def has_clusters() -> bool:
    """Whether JAX computes on an NVIDIA GPU of compute capability 9.0 or later."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    return float(device.compute_capability) >= 9


def source(*names: str) -> str:
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in names)


@functools.cache
def ptx(cut: Cut, slopes: Slopes) -> str:
    scale = {"OFFICIAL": int(slopes.official), "INITIAL": float(slopes.initial)}
    text = source("cluster.cuh", "common.cuh", cut.source)
    return nvrtc.compile_ptx(text, cut.constants() | scale, jax.devices()[0].compute_capability)


@functools.cache
def launcher(name: str, cut: Cut, slopes: Slopes, results: tuple[tuple[int, ...], ...]) -> Callable[..., Arrays]:
    """A kernel as a function of arrays over tasks, and with results of these shapes for each task."""

    @custom_vmap
    def launch(*arrays: Float[Array, "run ..."]) -> Arrays:
        runs = len(arrays[0])
        call = jax.ffi.ffi_call(
            "__gpu$xla.gpu.ptx",
            [jax.ShapeDtypeStruct((runs, cut.shapes.tasks, *shape), jnp.float32) for shape in results],
        )
        numbers = {
            "grid_x": runs * cut.clusters * cut.cluster, "grid_y": 1, "grid_z": 1,
            "block_x": cut.threads, "block_y": 1, "block_z": 1,
            "shared_mem_bytes": cut.shared_bytes,
        }  # fmt: skip
        return tuple(
            call(
                *arrays,
                name=name,
                kernel_type="ptx",
                kernel_data=ptx(cut, slopes),
                output_indices=tuple(np.int32(len(arrays) + i) for i in range(len(results))),
                **{key: np.int32(number) for key, number in numbers.items()},
            )
        )

    @launch.def_vmap
    def more_runs(size: int, batched: list[bool], *arrays: Array) -> tuple[Arrays, tuple[bool, ...]]:
        every = (
            array if own else jnp.broadcast_to(array, (size, *array.shape))
            for array, own in zip(arrays, batched, strict=True)
        )
        joined = launch(*(array.reshape(-1, *array.shape[2:]) for array in every))
        return tuple(array.reshape(size, -1, *array.shape[1:]) for array in joined), (True,) * len(results)

    def of_one_run(*arrays: Array) -> Arrays:
        return tuple(array[0] for array in launch(*(array[None] for array in arrays)))

    return of_one_run


def adapt_forward(cut: Cut, slopes: Slopes, *arrays: Array) -> Arrays:
    """(z, M, S, α of codes and of weights, inputs of latent and of fine-tuning steps, the former times Mᵀ, ε, targets,
    share) to z′, θ, θ′; the losses of all steps; of latent steps z and its gradient; of all steps the probabilities;
    and of latent steps and after them zS."""
    shapes = cut.shapes
    latent, codes, weights = (shapes.latent_steps,), (shapes.way, shapes.latent), (shapes.way, shapes.dim)
    steps, pairs = (shapes.latent_steps + shapes.finetune_steps,), (shapes.way, shapes.examples)
    results = codes, weights, weights, steps, latent + codes, latent + codes, steps + pairs
    return launcher("adapt_forward", cut, slopes, (*results, (shapes.latent_steps + 1, *weights)))(*arrays)


def adapt_backward(cut: Cut, slopes: Slopes, *arrays: Array) -> Arrays:
    """(the same but for z; gradients, probabilities, zS; ∂/∂z′, ∂/∂θ, ∂/∂θ′, ∂/∂losses) to ∂/∂z, ∂/∂α of codes by class
    and of weights; of latent steps ∂/∂(their gradient) and of all steps ∂/∂logits; what goes into the gradient of S,
    two for each latent step and one after them, and of M."""
    shapes = cut.shapes
    latent, codes, weights = (shapes.latent_steps,), (shapes.way, shapes.latent), (shapes.way, shapes.dim)
    steps, pairs = (shapes.latent_steps + shapes.finetune_steps,), (shapes.way, shapes.examples)
    results = codes, codes, (shapes.dim,), latent + codes, steps + pairs, (2 * shapes.latent_steps + 1, *weights)
    return launcher("adapt_backward", cut, slopes, (*results, weights))(*arrays)
