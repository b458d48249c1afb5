"""All of a task's inner loop as two kernels: latent steps, decoding and fine-tuning, and the way back.

The kernels give what gradients are made of; the products that make gradients of it, over all tasks at once, are left to
XLA. `metaleo.engines.closed_form` has the same in parts, and its names.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from metaleo.engines.closed_form import as_rows, by_example, residual

from metaleo_kernels.launching import Arrays, Shape, built, launcher

FEW, MANY = "few_runs", "many_runs"
"""How the work is shared out: a task to several blocks, or several tasks to a block."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Of the inner loop of tasks that share a learner: what its kernels are built for, and the tasks."""

    way: int
    examples: int
    latent: int
    dim: int
    latent_steps: int
    finetune_steps: int
    official: bool
    tasks: int
    kernels: str

    def kernel(self, which: str) -> str:
        """The name of one of the kernels."""
        numbers = dataclasses.astuple(self)[:7]
        return "_".join((self.kernels, which, *(str(int(number)) for number in numbers)))

    @property
    def built(self) -> bool:
        return built(self.kernel("forward")) and built(self.kernel("backward"))

    def launch(self, which: str, shapes: tuple[Shape, ...], *arrays: Array) -> Arrays:
        """With results of these shapes for each task."""
        return launcher(self.kernel(which), tuple((self.tasks, *shape) for shape in shapes))(*arrays)

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        """Of codes, of weights, and of the probabilities of all steps."""
        steps = self.latent_steps + self.finetune_steps
        return (self.way, self.latent), (self.way, self.dim), (steps, self.way, self.examples)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def adapt_tasks(problem: Problem, *arguments: Array) -> Arrays:
    """z′, θ and θ′."""
    return forward(problem, *arguments)[0]


def forward(
    problem: Problem,
    code: Float[Array, "task way latent"],
    to_mean: Float[Array, "latent dim"],
    to_raw_scale: Float[Array, "latent dim"],
    step_size: Float[Array, " latent"],
    finetune_step_size: Float[Array, " dim"],
    inputs: Float[Array, "task step example dim"],
    finetune_inputs: Float[Array, "task finetune_step example dim"],
    noise: Float[Array, "task decodings way dim"],
    targets: Float[Array, "task way example"],
    share: Float[Array, "task example"],
) -> tuple[Arrays, Any]:
    given = to_mean, to_raw_scale, step_size, finetune_step_size, inputs, finetune_inputs, inputs @ to_mean.T, noise
    given = *given, targets, share
    codes, weights, probabilities = problem.shapes
    path = (problem.latent_steps, *codes)
    shapes = codes, weights, weights, path, path, probabilities
    if problem.kernels == FEW:
        shapes = *shapes, (problem.latent_steps + 1, *weights)
    adapted, decoded, tuned, codes, gradients, probabilities, *raw = problem.launch("forward", shapes, code, *given)
    more = raw or (codes, adapted)  # of many runs zS is computed again
    return (adapted, decoded, tuned), (given, adapted, codes, (gradients, probabilities, *more))


def backward(problem: Problem, kept: Any, of_results: Arrays) -> tuple[Array | None, ...]:
    given, adapted, codes, path = kept
    inputs, targets, share = given[4], given[8], given[9]
    of_codes, of_weights, of_probabilities = problem.shapes
    steps = problem.latent_steps
    shapes = of_codes, of_codes, (problem.dim,), (steps, *of_codes), of_probabilities
    shapes = *shapes, (2 * steps + 1, *of_weights), of_weights
    results = problem.launch("backward", shapes, *given, *path, *of_results)
    of_code, of_step_size, of_finetune_step_size, of_gradients, of_logits, rights, of_means = results
    lefts = jnp.stack([of_gradients, codes], axis=2).reshape(-1, 2 * steps, *of_codes)
    of_raw_scale = as_rows(jnp.concatenate([lefts, adapted[:, None]], axis=1)).T @ as_rows(rights)
    residuals = residual(path[1][:, :steps], targets[:, None], share[:, None])
    of_projected = by_example(residuals, of_gradients) + by_example(of_logits[:, :steps], codes)
    of_mean = as_rows(of_projected).T @ as_rows(inputs) + as_rows(adapted).T @ as_rows(of_means)
    of_step_sizes = jnp.sum(of_step_size, axis=(0, 1)), jnp.sum(of_finetune_step_size, axis=0)
    return of_code, of_mean, of_raw_scale, *of_step_sizes, None, None, None, None, None


adapt_tasks.defvjp(forward, backward)
