"""Sampled functions at each stage of adaptation, to show the effect of the latent steps."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PRNGKeyArray
from sklearn.utils import check_random_state

from metaleo.errors import BadInput
from metaleo.estimators.classifier import pad, padded_length
from metaleo.learners.base import Learner
from metaleo.learners.leo import LEO
from metaleo.learners.leo_noise import Noise, draw_noise
from metaleo.serve.costs import program_bytes
from metaleo.tasks.sines_and_lines import DOMAIN
from metaleo.tasks.task import Batch

GRID = np.linspace(*DOMAIN, 101, dtype=np.float32)
"""The x at which functions are evaluated."""
POINTS, AT_ONCE = 32, 32
"""Minimum padded number of points, and functions sampled per call: one compiled program serves nearly all requests."""


class Stages(NamedTuple):
    """Sampled functions after each stage of their adaptation."""

    names: list[str]
    functions: Float[np.ndarray, "stage function point"]


def sample_stages(leo: LEO, points: np.ndarray, count: int, seed: int) -> Stages:
    """Functions before any latent step, after each, and after fine-tuning if the model does that.

    The last stage holds the same functions as `LEORegressor` with the same `random_state`.
    """
    support = support_of(points)
    keys = jax.random.split(jax.random.key(check_random_state(seed).randint(2**31)), count)
    blocks = [keys[np.minimum(np.arange(first, first + AT_ONCE), count - 1)] for first in range(0, count, AT_ONCE)]
    x = jnp.asarray(GRID[:, None])
    functions = np.concatenate([np.asarray(stages_of_many(leo, support, block, x)) for block in blocks])[:count]
    if not np.isfinite(functions).all():
        raise BadInput("the functions are not finite: are the points of the kind that the model was trained for?")
    steps = [f"after {n} latent step{'s'[: n > 1]}" for n in range(1, leo.latent_steps + 1)]
    names = ["before any latent step", *steps, *(["after fine-tuning"] if leo.finetune_steps else [])]
    return Stages(names, functions.swapaxes(0, 1))


def padded_points(count: int) -> int:
    return max(POINTS, padded_length(count))


def support_of(points: np.ndarray) -> Batch:
    padded = padded_points(len(points))
    return Batch(pad(points[:, :1], padded), pad(points[:, 1:], padded), jnp.arange(padded) < len(points))


def sampling_bytes(leo: LEO, points: np.ndarray) -> int:
    """Memory that `sample_stages` takes; the program is compiled on the way."""
    keys, x = jax.random.split(jax.random.key(0), AT_ONCE), jnp.asarray(GRID[:, None])
    return program_bytes(stages_of_many, leo, support_of(points), keys, x)


def function_model(learner: Learner) -> LEO:
    """The learner, if it models functions from one number to one number; otherwise raises `BadInput`."""
    if not isinstance(learner, LEO) or (learner.network.inputs, learner.network.targets) != ((1,), (1,)):
        raise BadInput("of models that predict numbers, only a LEO of functions from one number to one can be shown")
    return learner


@jax.jit
def stages_of_many(
    leo: LEO, support: Batch, keys: Key[Array, " function"], x: Float[Array, "point 1"]
) -> Float[Array, "function stage point"]:
    def values(weights: Float[Array, "code size"]) -> Float[Array, " point"]:
        return jax.vmap(leo.network.head(weights))(x)[:, 0]

    return jax.vmap(lambda key: jax.vmap(values)(path(leo, support, key)))(keys)


def path(leo: LEO, support: Batch, key: PRNGKeyArray) -> Float[Array, "stage code size"]:
    """θ of each stage of one sampled adaptation (Algorithm 1, lines 7-13)."""
    noise = draw_noise(leo, support, None, key)
    one_step = dataclasses.replace(leo, latent_steps=1)

    def step(code, drawn):
        now = Noise(weights=None if drawn is None else jnp.stack([drawn, drawn]))  # `descend_codes` skips the last
        after, _ = one_step.descend_codes(code, support, now)
        return after, after

    each_step, last = (None, None) if noise.weights is None else (noise.weights[:-1], noise.weights[-1])
    start = leo.encode(support, noise).sample(noise.code)
    _, codes = jax.lax.scan(step, start, each_step, length=leo.latent_steps)
    weights = jax.vmap(lambda code: leo.decode(code, last))(jnp.concatenate([start[None], codes]))
    if not leo.finetune_steps:
        return weights
    return jnp.concatenate([weights, leo.descend_weights(weights[-1], support, noise)[0][None]])
