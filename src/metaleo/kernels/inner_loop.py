"""How the kernels of the inner loop are cut to the shapes of a problem, and launched."""

import numpy as np
from jaxtyping import Array

from metaleo.kernels import launching
from metaleo.kernels.launching import (
    CORES,
    LANES,
    MOST_SHARED,
    RUNS,
    Cut,
    Shapes,
    aligned,
    apart,
    eights,
    many,
    on_cores,
    usable,
)
from metaleo.model.gaussian import Slopes
from metaleo.together import Arrays

FEW = "common.cuh", "slopes.cuh", "few_runs.cu"
MANY = "common.cuh", "slopes.cuh", "weights.cuh", "many_runs.cu"
FULL = 250
"""Blocks, one to a multiprocessor, that keep the largest GPUs busy for two rounds."""


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
        shapes.way * long, shapes.way * long, codes, shapes.way * wide, shapes.way * wide, steps * pairs, padded,
        padded, steps * shapes.examples, threads // 32 * max(shapes.latent, shapes.examples) * room, pairs,
        shapes.examples, shapes.latent, inbox, inbox, parts, parts,
    )  # fmt: skip
    return Cut(FEW, shapes, 1, cluster, threads, shared_bytes) if shared_bytes <= MOST_SHARED else None


def many_runs(shapes: Shapes, runs: int = 1) -> Cut | None:
    """A block for as many tasks as have sixteen classes together, or for several times as many where the GPU is full
    anyway: `many_runs.cu`, if it can do that."""
    together = min(16 // shapes.way, shapes.tasks)
    warps = next((warps for warps in (8, 4) if shapes.dim % (16 * warps) == 0), 0)
    # a thread holds as many weights in its registers as its warp has features, four times over
    if not together or not 0 < shapes.dim <= 640 or not warps or shapes.latent % 16 or not has_steps(shapes):
        return None
    seen, threads, long = together * shapes.examples, 32 * warps, shapes.latent + 8
    staged, arrival = seen if seen <= 16 else 1, 4
    wide = max(together * shapes.way, staged) * (shapes.dim + 4)
    residuals, logits = 16 * (eights(seen) + 8), seen * shapes.way
    shared_bytes = 2 * shapes.latent * (shapes.dim + 8) + aligned(
        wide, wide, staged * shapes.latent, warps * max(logits, 16 * (shapes.latent + 4)),
        16 * long, 16 * long, 16 * long, residuals, residuals, logits, logits, seen,
        (shapes.latent_steps + shapes.finetune_steps) * seen, shapes.latent, shapes.dim, arrival, arrival,
    )  # fmt: skip
    if shared_bytes > MOST_SHARED:
        return None
    parts = -(-shapes.tasks // together)
    passes = min(parts, max(1, runs * parts // FULL))
    return Cut(MANY, shapes, together, 1, threads, shared_bytes, -(-parts // -(-parts // passes)))


def cores(shapes: Shapes) -> Cut | None:
    """A core for all tasks: `cores/inner_loop.h`, if vectors divide what it has."""
    fits = shapes.latent % LANES == 0 and shapes.dim % LANES == 0 and has_steps(shapes)
    return Cut(CORES, shapes, shapes.tasks, 1, 1, 0) if fits else None


def has_steps(shapes: Shapes) -> bool:
    return shapes.latent_steps > 0 and shapes.finetune_steps > 0


def cut(shapes: Shapes, dtype: np.dtype) -> Cut | None:
    """How the kernels do this here, if they can."""
    if on_cores():
        fitting = cores(shapes)
        return fitting if fitting and usable(dtype) else None
    if not usable(dtype):
        return None
    return many_runs(shapes, RUNS.get()) if many() else few_runs(shapes) or many_runs(shapes)


def adapt_forward(cut: Cut, slopes: Slopes, *arrays: Array) -> Arrays:
    """(z, M, S, α of codes and of weights, inputs of latent and of fine-tuning steps, the former times Mᵀ, ε, targets,
    share) to z′, θ, θ′; the losses of all steps; of latent steps z and its gradient; of all steps the probabilities;
    and, but for many runs, of latent steps and after them zS."""
    shapes = cut.shapes
    latent, codes, weights = (shapes.latent_steps,), (shapes.way, shapes.latent), (shapes.way, shapes.dim)
    steps, pairs = (shapes.latent_steps + shapes.finetune_steps,), (shapes.way, shapes.examples)
    results: tuple[tuple[int, ...], ...]
    results = codes, weights, weights, steps, latent + codes, latent + codes, steps + pairs
    if cut.sources != MANY:
        results = *results, (shapes.latent_steps + 1, *weights)
    return launching.launcher(cut.kernel("adapt_forward", slopes, results))(*arrays)


def adapt_backward(cut: Cut, slopes: Slopes, *arrays: Array) -> Arrays:
    """(the same but for z; gradients, probabilities, and zS, or on a CPU zS and z, or of many runs z and z′; ∂/∂z′,
    ∂/∂θ, ∂/∂θ′, ∂/∂losses) to ∂/∂z, ∂/∂α of codes by class and of weights; of latent steps ∂/∂(their gradient) and of
    all steps ∂/∂logits; what goes into the gradient of S, two for each latent step and one after them, and of M; and on
    a CPU ∂/∂(inputs times Mᵀ)."""
    shapes = cut.shapes
    latent, codes, weights = (shapes.latent_steps,), (shapes.way, shapes.latent), (shapes.way, shapes.dim)
    steps, pairs = (shapes.latent_steps + shapes.finetune_steps,), (shapes.way, shapes.examples)
    results: tuple[tuple[int, ...], ...] = (
        codes,
        codes,
        (shapes.dim,),
        latent + codes,
        steps + pairs,
        (2 * shapes.latent_steps + 1, *weights),
        weights,
    )
    if cut.sources == CORES:
        results = *results, (shapes.latent_steps, shapes.examples, shapes.latent)
    return launching.launcher(cut.kernel("adapt_backward", slopes, results))(*arrays)
