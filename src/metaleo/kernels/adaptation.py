"""All of a task's inner loop as two kernels: latent steps, decoding and fine-tuning, and the way back.

The kernels give what gradients are made of; the products that make gradients of it, over all tasks at once, are left to
XLA. `closed_form.py` has the same for latent steps and for fine-tuning apart, and its names.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from metaleo.closed_form import as_rows, by_example, classes_first, code_descent, residuals_of_steps, weight_descent
from metaleo.kernels.inner_loop import Shapes, adapt_backward, adapt_forward, cut
from metaleo.kernels.launching import CORES, Cut, apart_by, runs_at_once, trusted
from metaleo.model.gaussian import Slopes
from metaleo.together import Arrays, together


@functools.cache
def adaptation(slopes: Slopes, latent_steps: int) -> Callable[..., Arrays]:
    """z′, θ, θ′ and the losses of latent and of fine-tuning steps: a function of (z, M, S, α of codes, α of weights,
    inputs of latent steps, inputs of fine-tuning steps, ε, targets, mask)."""
    descend_codes, descend_weights = code_descent(slopes, latent_steps), weight_descent()

    def one(code, to_mean, to_raw_scale, step_size, finetune_step_size, inputs, finetune_inputs, noise, targets, mask):
        labels = targets, mask
        adapted, losses = descend_codes(code, to_mean, to_raw_scale, step_size, inputs, noise[:-1], *labels)
        decoded = adapted @ to_mean + slopes(adapted @ to_raw_scale)[0] * noise[-1]
        tuned, finetune_losses = descend_weights(decoded, finetune_step_size, finetune_inputs, *labels)
        return adapted, decoded, tuned, losses, finetune_losses

    def many(*arguments: Array) -> Any:
        *arrays, targets, mask = arguments
        shapes, dtype = shapes_of(arrays[0], *arrays[5:7]), arrays[0].dtype
        here, tried = cut(shapes, dtype), cut(dataclasses.replace(shapes, tasks=TRIED), dtype)
        if here is None or tried is None or not trusted(difference, tried, slopes):
            return jax.vmap(one, (0, *[None] * 4, *[0] * 5))(*arguments)
        results: Any = adapt_tasks(here, slopes, *arrays, *classes_first(targets, mask))
        adapted, decoded, tuned, losses = results
        return adapted, decoded, tuned, losses[:, :latent_steps], losses[:, latent_steps:]

    return together(one, many, shared=(1, 2, 3, 4))


def shapes_of(
    code: Float[Array, "task way latent"],
    inputs: Float[Array, "task step example dim"],
    finetune_inputs: Float[Array, "task finetune_step example dim"],
) -> Shapes:
    (tasks, way, latent), (_, steps, examples, dim) = code.shape, inputs.shape
    return Shapes(tasks, way, examples, latent, dim, steps, finetune_inputs.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def adapt_tasks(cut: Cut, slopes: Slopes, *arguments: Array) -> Arrays:
    return forward(cut, slopes, *arguments)[0]


def forward(
    cut: Cut,
    slopes: Slopes,
    code: Float[Array, "task way latent"],
    to_mean: Float[Array, "latent dim"],
    to_raw_scale: Float[Array, "latent dim"],
    step_size: Float[Array, " latent"],
    finetune_step_size: Float[Array, " dim"],
    inputs: Float[Array, "task step example dim"],
    finetune_inputs: Float[Array, "task finetune_step example dim"],
    noise: Float[Array, "task steps_and_one way dim"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> tuple[Arrays, Any]:
    given = to_mean, to_raw_scale, step_size, finetune_step_size, inputs, finetune_inputs, inputs @ to_mean.T, noise
    given = *given, targets, share
    adapted, decoded, tuned, losses, codes, gradients, probabilities, *raw = adapt_forward(cut, slopes, code, *given)
    more = (*raw, codes) if cut.sources == CORES else raw or (codes, adapted)  # of many runs zS is computed again
    path = gradients, probabilities, *more
    return (adapted, decoded, tuned, losses), (given, adapted, decoded, codes, path)


def backward(cut: Cut, slopes: Slopes, kept: Any, of_results: Arrays) -> tuple[Array | None, ...]:
    given, adapted, decoded, codes, path = kept
    to_mean, to_raw_scale, _, finetune_step_size, inputs, finetune_inputs, _, noise, targets, share = given
    results = adapt_backward(cut, slopes, *given, *path, *of_results)
    of_code, of_step_size, of_finetune_step_size, of_gradients, of_logits, rights, of_means, *more = results
    tasks, steps, way, latent = codes.shape
    lefts = jnp.stack([of_gradients, codes], axis=2).reshape(tasks, 2 * steps, way, latent)
    of_raw_scale = as_rows(jnp.concatenate([lefts, adapted[:, None]], axis=1)).T @ as_rows(rights)

    residuals, finetune_residuals = jnp.split(residuals_of_steps(path[1], targets, share), [steps], axis=1)
    of_logits, of_finetune_logits = jnp.split(of_logits, [steps], axis=1)
    of_projected = more[0] if more else by_example(residuals, of_gradients) + by_example(of_logits, codes)
    of_mean = as_rows(of_projected).T @ as_rows(inputs) + as_rows(adapted).T @ as_rows(of_means)

    # needed, and computed, only where the inputs are learned too
    scale, slope, _ = (part * noise[:, :-1] for part in slopes(codes @ to_raw_scale))
    of_inputs = by_example(of_logits, scale) + by_example(residuals, (of_gradients @ to_raw_scale) * slope)
    of_inputs = of_inputs + of_projected @ to_mean
    rates = finetune_step_size[None, None, None, :]
    moves, of_moves = (of_rows(part, finetune_inputs) for part in (finetune_residuals, of_finetune_logits))
    weights = decoded[:, None] - rates * sums_before(moves)
    after = (of_means - of_results[1])[:, None] - of_moves - sums_before(of_moves)
    of_finetune_inputs = by_example(of_finetune_logits, weights) - by_example(finetune_residuals, rates * after)

    return (
        of_code,
        of_mean,
        of_raw_scale,
        jnp.sum(of_step_size, axis=(0, 1)),
        jnp.sum(of_finetune_step_size, axis=0),
        of_inputs,
        of_finetune_inputs,
        None,
        None,
        None,
    )


adapt_tasks.defvjp(forward, backward)


def of_rows(
    weights: Float[Array, "task step way example"], inputs: Float[Array, "task step example dim"]
) -> Float[Array, "task step way dim"]:
    return jnp.einsum("tsne,tsed->tsnd", weights, inputs)


def sums_before(steps: Float[Array, "task step way dim"]) -> Float[Array, "task step way dim"]:
    """The sum over all earlier steps."""
    return jnp.cumsum(steps, axis=1) - steps


# Trust


TRIED = 4
"""Tasks that the kernels are tried on: more than a block takes of the paper's, and not a multiple."""


def difference(cut: Cut, slopes: Slopes) -> float:
    """Between the kernels and XLA, on random tasks with padding: the largest of all results and gradients, in terms of
    the largest number of each array."""
    shapes, generator = cut.shapes, np.random.default_rng(0)

    def normal(*shape: int) -> Float[Array, "..."]:
        return jnp.asarray(generator.normal(size=shape), jnp.float32)

    scale = 0.8 / shapes.latent**0.5
    tasks, way, examples, dim = shapes.tasks, shapes.way, shapes.examples, shapes.dim
    arguments = (
        normal(tasks, way, shapes.latent),
        scale * normal(shapes.latent, dim),
        scale * normal(shapes.latent, dim),
        0.1 * jnp.abs(normal(shapes.latent)),
        0.1 * jnp.abs(normal(dim)),
        0.5 * normal(tasks, shapes.latent_steps, examples, dim),
        0.5 * normal(tasks, shapes.finetune_steps, examples, dim),
    )
    noise = normal(tasks, shapes.latent_steps + 1, way, dim)
    targets = jnp.broadcast_to(jnp.eye(way)[jnp.arange(examples) % way], (tasks, examples, way))
    mask = jnp.ones((tasks, examples), bool).at[0, -1].set(False)

    def by_xla(*arguments: Array) -> Arrays:
        adapt = jax.vmap(adaptation(slopes, shapes.latent_steps), (0, *[None] * 4, *[0] * 5))
        adapted, decoded, tuned, *losses = adapt(*arguments, noise, targets, mask)
        return adapted, decoded, tuned, jnp.concatenate(losses, axis=1)

    with runs_at_once(0):
        expected, back = jax.vjp(jax.jit(by_xla), *arguments)
        of_results = tuple(normal(*result.shape) for result in expected)
        expected = *expected, *back(of_results)
    own, kept = forward(cut, slopes, *arguments, noise, *classes_first(targets, mask))
    own = *own, *backward(cut, slopes, kept, of_results)[: len(arguments)]
    return apart_by(own, expected)
