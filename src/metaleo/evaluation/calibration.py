"""Calibration of probabilities: a temperature for each number of shots, learned on validation tasks."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special
from jaxtyping import Array, Float, Int, PRNGKeyArray

from metaleo.checkpoints import load_model, save_model
from metaleo.engines import choose_engine
from metaleo.evaluation.evaluate import in_chunks, tasks_at_once
from metaleo.learners.base import Learner
from metaleo.tasks.episodes import Episodes

SHOTS = (1, 2, 5, 10, 20)
"""Shots for which temperatures are learned, if classes have enough examples; others are interpolated."""
QUERY = 15
TASKS = 400
SEED = 1_000_003
"""Seed of the calibration tasks; no run validates on the same tasks."""


Temperatures = list[tuple[int, float]]
"""Pairs of a number of shots and its temperature."""


def calibrate_model(path: Path, episodes: Episodes, shots: Sequence[int] = SHOTS) -> Temperatures:
    """Learn the temperatures of a model file on tasks of these classes, and write them to its header."""
    model = load_model(path)
    found = learn_temperatures(model.learner, episodes, TASKS, shots)
    save_model(path, model.learner, model.structure, {**model.header, "temperatures": found})
    return found


def learn_temperatures(
    learner: Learner, episodes: Episodes, tasks: int = TASKS, shots: Sequence[int] = SHOTS
) -> Temperatures:
    """For each number of shots, the temperature that minimises the query loss over tasks.

    The tasks have the classes and the way of `episodes`.
    """
    episodes, shots = calibration_tasks(episodes, shots)
    asked = {shot: query_answers(learner, episodes, tasks, shot) for shot in shots}
    return [(shot, best_temperature(logits.reshape(-1, episodes.way), answers.reshape(-1)))
            for shot, (logits, answers) in asked.items()]  # fmt: skip


def calibration_tasks(episodes: Episodes, shots: Sequence[int] = SHOTS) -> tuple[Episodes, list[int]]:
    """Tasks of as many shots as the classes have examples for, and the numbers of shots to which they can be cut."""
    fewest = int(episodes.counts.min())
    query = max(1, min(QUERY, fewest // 2))
    fitting = [shot for shot in shots if shot + query <= fewest]
    return dataclasses.replace(episodes, shot=fitting[-1], query=query), fitting


def query_answers(
    learner: Learner, episodes: Episodes, tasks: int, shot: int
) -> tuple[Float[np.ndarray, "task query way"], Int[np.ndarray, "task query"]]:
    """Query logits, and the classes that are right, of calibration tasks cut to this number of shots."""
    logits, targets = QUERY_LOGITS(learner, episodes, jax.random.key(SEED), jnp.arange(tasks), jnp.int32(shot))
    return np.asarray(logits, np.float64), np.asarray(targets).argmax(-1)


def query_logits(
    learner: Learner, episodes: Episodes, key: PRNGKeyArray, indices: Int[Array, " task"], shot: Int[Array, ""]
) -> tuple[Float[Array, "task query way"], Float[Array, "task query way"]]:
    """Query logits and targets of tasks cut to the first `shot` examples per class; one program serves any `shot`."""
    engine = choose_engine(learner)
    there = jnp.tile(jnp.arange(episodes.shot) < shot, episodes.way)

    def ask(indices: Int[Array, " task"]) -> tuple[Float[Array, "task query way"], Float[Array, "task query way"]]:
        tasks = jax.vmap(lambda index: episodes.sample(jax.random.fold_in(key, index)))(indices)
        supports = eqx.tree_at(lambda batch: batch.mask, tasks.support, jnp.tile(there, (len(indices), 1)))
        heads = engine.adapt(learner, supports)
        return jax.vmap(lambda head, inputs: jax.vmap(head)(inputs))(heads, tasks.query.inputs), tasks.query.targets

    return in_chunks(ask, indices, min(20, tasks_at_once(episodes)))


QUERY_LOGITS = jax.jit(query_logits)


def best_temperature(logits: Float[np.ndarray, "query way"], answers: Int[np.ndarray, " query"]) -> float:
    """T that minimises the mean of -log softmax(logits / T)[answer], between 1/20 and 20."""

    def loss(log_temperature: float) -> float:
        scaled = logits / np.exp(log_temperature)
        right = np.take_along_axis(scaled, answers[:, None], 1)[:, 0]
        return float(np.mean(scipy.special.logsumexp(scaled, axis=1) - right))

    found = scipy.optimize.minimize_scalar(loss, bounds=(-np.log(20), np.log(20)), method="bounded")
    return float(np.exp(found.x))
