"""The path of adaptation, step by step, in z and in θ; and a map over many tasks."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from metaleo.checkpoints import Candidate
from metaleo.errors import BadInput
from metaleo.evaluation.evaluate import in_blocks, map_tasks, task_key
from metaleo.learners import LEO, MAML, Joint, Learner, MetaSGD, Reptile
from metaleo.nn.heads import GeneratedHead, Head, LinearHead
from metaleo.tasks import Episodes, Tasks
from metaleo.tasks.sines_and_lines import SinesAndLines
from metaleo.tasks.task import Batch

Descending = LEO | MAML | MetaSGD | Reptile
"""Learners that adapt by gradient steps."""
Report = Callable[[int], None]


def ignore_progress(done: int) -> None:
    del done


def unwrap_joint(learner: Learner, support: Batch) -> tuple[Any, Batch]:
    """The inner learner of a `Joint`, and the support set as it sees it; other learners stay as they are."""
    return (learner.learner, learner.seen(support)) if isinstance(learner, Joint) else (learner, support)


def inner_learner(learner: Learner) -> Learner:
    return learner.learner if isinstance(learner, Joint) else learner


def steps_codes(learner: Learner) -> bool:
    """Whether the learner takes gradient steps on latent codes."""
    inner = inner_learner(learner)
    return isinstance(inner, LEO) and inner.latent_steps > 0


def parameters(head: Head) -> Float[Array, "code size"]:
    """θ of a head that was generated or adapted by gradient steps."""
    if isinstance(head, LinearHead):
        return head.weights
    if isinstance(head, GeneratedHead):
        return head.parameters
    raise TypeError(f"{type(head).__name__} has no parameters of its own")


def code_path(learner: LEO, support: Batch) -> Float[Array, "point code latent"]:
    """z before the first latent step and after each step, using means instead of samples and no dropout."""

    def after(steps: int) -> Float[Array, "code latent"]:
        return dataclasses.replace(learner, latent_steps=steps).adapt(support).trace.adapted_code

    return jnp.stack([after(steps) for steps in range(learner.latent_steps + 1)])


def weight_path(learner: Descending, support: Batch) -> Float[Array, "point code size"]:
    """θ before the first step in θ and after each step: for LEO its fine-tuning steps, for other learners all steps."""
    if isinstance(learner, LEO):
        field, total = "finetune_steps", learner.finetune_steps
    else:
        field, total = "num_steps", learner.num_steps

    def after(steps: int) -> Float[Array, "code size"]:
        return parameters(dataclasses.replace(learner, **{field: steps}).adapt(support).head)

    return jnp.stack([after(steps) for steps in range(total + 1)])


def decode(learner: LEO, codes: Float[Array, "point code latent"]) -> Float[Array, "point code size"]:
    """θ decoded from every point of a path in z."""
    return jax.vmap(lambda code: learner.decode(code, None))(codes)


def descending(candidate: Candidate) -> Descending:
    """The inner learner; raise `BadInput` if it takes no gradient steps."""
    inner = inner_learner(candidate.learner)
    if not isinstance(inner, Descending):
        name = candidate.config.structure.learner
        raise BadInput(f"{candidate.path} ({name}) takes no gradient steps; LEO, MAML, Meta-SGD and Reptile do")
    if candidate.model.structure.anchored:
        raise BadInput(f"{candidate.path} adds decoded weights to an anchor; this analysis is of LEO without one")
    return inner


class Labelled(NamedTuple):
    """A support set, the label of each of its codes, and the rows of the examples behind each code, if any.

    A label is the row of the first example of a class, or the family of a function: 1 for a sine, 0 for a line.
    """

    support: Batch
    labels: Int[Array, " code"]
    rows: Int[Array, "code shot"] | None


def draw_labelled(tasks: Tasks, key: PRNGKeyArray) -> Labelled:
    if isinstance(tasks, SinesAndLines):
        curve, task = tasks.draw(key)
        return Labelled(task.support, curve.is_sine[None].astype(jnp.int32), None)
    if isinstance(tasks, Episodes):
        indices = tasks.sample_indices(key)
        return Labelled(tasks.gather(indices).support, indices.support[:, 0], indices.support)
    raise TypeError(f"{type(tasks).__name__} has no labels")


def map_over_tasks(
    function: Callable[[Any, Any, PRNGKeyArray], PyTree],
    learner: Learner,
    tasks: Tasks,
    seed: int,
    num_tasks: int,
    progress: Report = ignore_progress,
    *,
    draw: Callable[[Any, PRNGKeyArray], Any] = lambda tasks, key: tasks.sample(key),
    on_host: Callable[[PyTree], PyTree] = lambda values: values,
    at_once: int = 50,
) -> PyTree:
    """Apply `function(learner, task, key)` to each of the tasks on which `metaleo evaluate` tests with this seed.

    The key is not the one that drew the task. `on_host` processes each block of values in NumPy before the next block
    starts.
    """

    @jax.jit
    def block(learner: Learner, tasks: Tasks, key: PRNGKeyArray, indices: Int[Array, " task"]) -> PyTree:
        return map_tasks(
            lambda drawn, own: function(learner, drawn, own), lambda own: draw(tasks, own), key, indices, at_once
        )

    def values(indices: Int[Array, " task"]) -> PyTree:
        left = num_tasks - int(indices[0])  # the last block is full-sized, but only part of it is used
        found = block(learner, tasks, task_key(seed), indices)
        found = jax.tree.map(lambda leaf: np.asarray(leaf)[:left], found)
        refuse_divergence(found, min(int(indices[-1]) + 1, num_tasks))
        return on_host(found)

    return in_blocks(values, num_tasks, progress, block=2 * at_once)


def refuse_divergence(values: PyTree, seen: int) -> None:
    """Raise `BadInput` if adaptation produced NaN or Inf."""
    leaves = [leaf for leaf in jax.tree.leaves(values) if np.issubdtype(leaf.dtype, np.floating)]
    if not all(np.isfinite(leaf).all() for leaf in leaves):
        raise BadInput(f"adaptation leads to NaN or Inf within the first {seen:,} tasks: the model diverges there")
