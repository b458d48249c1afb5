"""How the kernels of `inner_loop.cu` are cut to the shapes of a problem, and launched.

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
CLUSTERS = (4, 2, 1)
"""Blocks that share a task: as many of these as divide its features."""
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block may ask for on the GPUs that have clusters."""
MOST_LATENT = 64
"""A thread holds as many numbers of the decoder in its registers, three times over."""
MOST_THREADS = 512


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

    @property
    def cluster(self) -> int:
        return next((blocks for blocks in CLUSTERS if self.dim % (16 * blocks) == 0), 0)

    @property
    def slice(self) -> int:
        return self.dim // self.cluster

    @property
    def threads(self) -> int:
        return 2 * self.slice

    @property
    def shared_bytes(self) -> int:
        """`sizeof(Shared)`."""
        pairs, codes, steps = self.way * self.examples, self.way * self.latent, self.latent_steps + self.finetune_steps
        room = 8 * -(-self.way // 8)  # for classes, in eights
        long, wide = apart(self.latent), apart(self.slice)
        padded = 8 * -(-self.examples // 8) * room
        inbox, parts = 4, self.cluster * max(pairs, codes)
        return aligned(
            max(self.latent_steps, self.finetune_steps) * self.examples * wide,
            self.latent_steps * self.examples * long,
            self.way * long, self.way * long, codes, self.way * wide, self.way * wide, steps * pairs, padded, padded,
            steps * self.examples, self.threads // 32 * max(self.latent, self.examples) * room, pairs, self.examples,
            self.latent, inbox, inbox, parts, parts,
        )  # fmt: skip

    @property
    def fit(self) -> bool:
        """Whether the kernels can be cut to these shapes."""
        if not self.cluster or not 0 < self.latent <= MOST_LATENT or self.latent % 16 or self.threads > MOST_THREADS:
            return False
        return self.latent_steps > 0 and self.finetune_steps > 0 and self.shared_bytes <= MOST_SHARED

    def constants(self) -> dict[str, int | float]:
        """For the preprocessor."""
        more = {"cluster": self.cluster, "shared_bytes": self.shared_bytes}
        return {name.upper(): number for name, number in (dataclasses.asdict(self) | more).items()}


def apart(width: int) -> int:
    """So many numbers that rows of this width begin in different banks of shared memory."""
    return width + 16 - width % 32


def aligned(*sizes: int) -> int:
    """Bytes of arrays of these many floats, each begun at a multiple of 16 bytes."""
    return sum(-(-size // 4) * 16 for size in sizes)


SWITCHED_OFF = contextvars.ContextVar("SWITCHED_OFF", default=False)


@contextlib.contextmanager
def switched_off(off: bool = True) -> Iterator[None]:
    """What is traced in here is left to XLA: quicker where there are so many runs that the GPU is full anyway."""
    token = SWITCHED_OFF.set(off)
    try:
        yield
    finally:
        SWITCHED_OFF.reset(token)


def usable(shapes: Shapes, dtype: np.dtype) -> bool:
    """Whether the kernels can do this here; they multiply as JAX does on a GPU unless more is asked for, in TF32."""
    if dtype != jnp.float32 or SWITCHED_OFF.get() or jax.config.values["jax_default_matmul_precision"] not in TF32:
        return False
    return has_clusters() and nvrtc.library() is not None and shapes.fit


TF32 = (None, "default", "fastest", "tensorfloat32")


def has_clusters() -> bool:
    """Whether JAX computes on an NVIDIA GPU of compute capability 9.0 or later."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    return float(device.compute_capability) >= 9


def source() -> str:
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in ("cluster.cuh", "inner_loop.cu"))


@functools.cache
def ptx(shapes: Shapes, slopes: Slopes) -> str:
    scale = {"OFFICIAL": int(slopes.official), "INITIAL": float(slopes.initial)}
    return nvrtc.compile_ptx(source(), shapes.constants() | scale, jax.devices()[0].compute_capability)


@functools.cache
def launcher(name: str, shapes: Shapes, slopes: Slopes, results: tuple[tuple[int, ...], ...]) -> Callable[..., Arrays]:
    """A kernel as a function of arrays over tasks, and with results of these shapes for each task."""

    @custom_vmap
    def launch(*arrays: Float[Array, "run ..."]) -> Arrays:
        runs = len(arrays[0])
        call = jax.ffi.ffi_call(
            "__gpu$xla.gpu.ptx",
            [jax.ShapeDtypeStruct((runs, shapes.tasks, *shape), jnp.float32) for shape in results],
        )
        numbers = {
            "grid_x": runs * shapes.tasks * shapes.cluster, "grid_y": 1, "grid_z": 1,
            "block_x": shapes.threads, "block_y": 1, "block_z": 1,
            "shared_mem_bytes": shapes.shared_bytes,
        }  # fmt: skip
        return tuple(
            call(
                *arrays,
                name=name,
                kernel_type="ptx",
                kernel_data=ptx(shapes, slopes),
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


def adapt_forward(shapes: Shapes, slopes: Slopes, *arrays: Array) -> Arrays:
    """(z, M, S, α of codes and of weights, inputs of latent and of fine-tuning steps, the former times Mᵀ, ε, targets,
    share) to z′, θ, θ′; the losses of all steps; of latent steps z and its gradient; of all steps the probabilities;
    and of latent steps and after them zS."""
    latent, codes, weights = (shapes.latent_steps,), (shapes.way, shapes.latent), (shapes.way, shapes.dim)
    steps, pairs = (shapes.latent_steps + shapes.finetune_steps,), (shapes.way, shapes.examples)
    results = codes, weights, weights, steps, latent + codes, latent + codes, steps + pairs
    return launcher("adapt_forward", shapes, slopes, (*results, (shapes.latent_steps + 1, *weights)))(*arrays)


def adapt_backward(shapes: Shapes, slopes: Slopes, *arrays: Array) -> Arrays:
    """(the same but for z; gradients, probabilities, zS; ∂/∂z′, ∂/∂θ, ∂/∂θ′, ∂/∂losses) to ∂/∂z, ∂/∂α of codes by class
    and of weights; of latent steps ∂/∂(their gradient) and of all steps ∂/∂logits; what goes into the gradient of S,
    two for each latent step and one after them, and of M."""
    latent, codes, weights = (shapes.latent_steps,), (shapes.way, shapes.latent), (shapes.way, shapes.dim)
    steps, pairs = (shapes.latent_steps + shapes.finetune_steps,), (shapes.way, shapes.examples)
    results = codes, codes, (shapes.dim,), latent + codes, steps + pairs, (2 * shapes.latent_steps + 1, *weights)
    return launcher("adapt_backward", shapes, slopes, (*results, weights))(*arrays)
