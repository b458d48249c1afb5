"""Engines that leave LEO's inner loop to kernels, on the problems that those are built for; all else is XLA's."""

import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree, UInt32
from metaleo._jax.random import key_words
from metaleo.engines.closed_form import ClosedForm, classes_first, inputs_of_steps
from metaleo.learners.base import HyperParams, Learner
from metaleo.learners.leo import LEO
from metaleo.learners.leo_noise import Noise
from metaleo.nn.heads import Head, LinearHead
from metaleo.tasks.episodes import DeviceRows, Episodes
from metaleo.tasks.task import Batch, Tasks

from metaleo_kernels.inner_loop import FEW, MANY, Problem, adapt_tasks
from metaleo_kernels.launching import Arrays, built, launcher, usable
from metaleo_kernels.queries import kernel, score_queries

FEW_RUNS = 6
"""So many runs side by side leave room on a GPU, and are hurried; with more of them nothing is wasted instead."""


class Cuda(ClosedForm):
    """For few runs: a task is shared out among several multiprocessors, and XLA does the rest beside it."""

    name: ClassVar[str] = "cuda"
    kernels: ClassVar[str] = FEW

    def supports(self, learner: Learner, runs: int) -> bool:
        return runs <= FEW_RUNS and super().supports(learner, runs) and usable()

    def descend(self, leo: LEO, code: Float[Array, "task way latent"], supports: Batch, noise: Noise) -> Arrays:
        problem = self.problem(leo, supports)
        if noise.weights is None or noise.latent_masks is None or problem is None:
            return super().descend(leo, code, supports, noise)
        masks = noise.latent_masks, noise.finetune_masks
        inputs = (inputs_of_steps(supports.inputs, of_steps, noise.keep_prob) for of_steps in masks)
        learned = leo.decoder.to_mean, leo.decoder.to_raw_scale, leo.latent_step_size, leo.finetune_step_size
        return adapt_tasks(problem, code, *learned, *inputs, noise.weights, *classes_first(supports))

    def problem(self, leo: LEO, supports: Batch) -> Problem | None:
        """What the kernels are asked for, if they are built for it."""
        (tasks, examples, dim), (latent, _) = supports.inputs.shape, leo.decoder.to_mean.shape
        steps, dtypes = (leo.latent_steps, leo.finetune_steps), (leo.decoder.to_mean.dtype, supports.inputs.dtype)
        way = supports.targets.shape[2]
        problem = Problem(way, examples, latent, dim, *steps, leo.official, tasks, self.kernels)
        return problem if all(dtype == jnp.float32 for dtype in dtypes) and problem.built else None


class CudaMany(Cuda):
    """For many runs: a multiprocessor takes several tasks, and noise and query loss have kernels too."""

    name: ClassVar[str] = "cuda-many"
    kernels: ClassVar[str] = MANY

    def supports(self, learner: Learner, runs: int) -> bool:
        return runs > FEW_RUNS and ClosedForm.supports(self, learner, runs) and usable()

    def draw_noise(self, leo: LEO, supports: Batch, hyper: HyperParams, keys: Key[Array, " task"]) -> Noise:
        noise = super().draw_noise(leo, supports, hyper, keys)
        if noise.weights is None or not built("draw_normals"):
            return noise
        return eqx.tree_at(lambda noise: noise.weights, noise, normals(jax.vmap(key_words)(keys), noise.weights.shape))

    def query_losses(
        self,
        leo: LEO,
        heads: Head,
        tasks: Tasks,
        indices: PyTree,
        queries: Batch,
        hyper: HyperParams,
        keys: Key[Array, " task"],
    ) -> tuple[Float[Array, " task"], dict[str, Float[Array, " task"]]]:
        """The kernel reads the rows of the queries where they lie, instead of a copy of them."""
        assert isinstance(heads, LinearHead)
        features = tasks.rows.features if isinstance(tasks, Episodes) and isinstance(tasks.rows, DeviceRows) else None
        asked = kernel(queries.targets.shape[2], *queries.inputs.shape[1:])
        if features is None or heads.weights.dtype != jnp.float32 or not built(asked):
            return super().query_losses(leo, heads, tasks, indices, queries, hyper, keys)
        keep_prob = jnp.broadcast_to(jnp.asarray(hyper.keep_prob, jnp.float32), len(keys))
        words, rows = jax.vmap(key_words)(keys), indices.query.reshape(len(keys), -1)
        losses, accuracies = score_queries(
            heads.weights, words, keep_prob, queries.targets, queries.mask, rows, features
        )
        return losses, {"query_loss": losses, "query_accuracy": accuracies}


def normals(words: UInt32[Array, "task 2"], shape: tuple[int, ...]) -> Float[Array, "task ..."]:
    """`randomness.normals` of the weights, for each task by the words of its key."""
    size = math.prod(shape[1:])
    return launcher("draw_normals", ((shape[0], size),))(words)[0].reshape(shape)
