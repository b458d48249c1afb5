"""The anchor of a run, measured on its training classes and chosen on tasks of its validation classes."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from metaleo._jax.devices import fits_on_device
from metaleo.config.schema import TrainConfig
from metaleo.data.metaset import MetaSet
from metaleo.learners.anchor import Anchor
from metaleo.losses import accuracy
from metaleo.tasks.episodes import Episodes, MixedEpisodes, Rows, place_rows
from metaleo.tasks.preparation import ClassMoments, Preparation, along, emphasise, whiten
from metaleo.training.meta_train import split_run_key

POWERS = (0.0, 1 / 8, 1 / 4, 3 / 8)
"""How far rows may be whitened."""
EMPHASES = (0.0, 1 / 8, 1 / 4)
"""How much the directions in which training classes differ may count more than others."""
SHARES = (0.0, 0.5, 1.0)
"""How much of the measured prior may count; without it, classes are where their examples are."""
TYPICAL_SHARE = 0.5
"""Of the prior, while it is chosen how rows are prepared."""
SHARPNESSES = (1.0, 3.0, 10.0)
"""How sharp the classifier of centroids may be that the regression starts from; chosen last, with the next."""
REGULARISERS = (0.03, 0.1, 0.3, 1.0)
"""How strongly the regression may hold weights to their prior mean."""
CLASSES = 800
"""Classes in all tasks of one way and shot, at most: the more ways, the fewer tasks say as much."""
AT_ONCE = 20
"""Tasks in memory together."""
MOST_ROWS = 400
"""Support rows of a task that decides."""
LEAST_SPREAD = 1e-3
"""Smallest variance between classes, as a share of the mean variance within them."""


class Spread(NamedTuple):
    """What an anchor needs to know of classes, along the coordinates of a preparation."""

    preparation: Preparation
    mean: Float[np.ndarray, " dim"]
    within: Float[np.ndarray, " dim"]
    between: Float[np.ndarray, " dim"]

    def anchor(self, share: float, kind: str) -> Anchor:
        prior_shots = share * self.within / self.between
        mean, within, prior_shots = (jnp.asarray(one, jnp.float32) for one in (self.mean, self.within, prior_shots))
        return Anchor.init(self.preparation, mean, within, prior_shots, kind)


def measure_spread(preparation: Preparation, training: MetaSet, validation: MetaSet) -> Spread:
    """How far rows and classes scatter, along the directions in which the means of the training classes do.

    A network that has learned to tell the training classes apart sets their means further apart than those of classes
    it has never seen, all along few directions, and their rows closer together. So validation classes decide the scale:
    of the variance within classes, of that between classes, and of the latter along all directions in which the
    training classes do not differ.
    """
    means = ClassMoments.of(preparation, training).means
    _, directions = np.linalg.eigh(np.cov(means, rowvar=False))
    preparation = along(preparation, directions)
    seen, unseen = (ClassMoments.of(preparation, one) for one in (training, validation))
    spread, new = np.maximum(seen.between(), 0), unseen.between()
    spanned = spread > 1e-6 * spread.max()
    rest = new[~spanned].mean() if not spanned.all() else 0.0
    scale = (new[spanned].mean() - rest) / spread[spanned].mean() if spanned.any() else 0.0
    within = seen.variances * (unseen.variances.mean() / seen.variances.mean())
    between = max(scale, 0.0) * spread + max(rest, LEAST_SPREAD * within.mean())
    return Spread(preparation, seen.means.mean(0), within, between)


def choose_anchor(config: TrainConfig, metaset: MetaSet) -> Anchor:
    """The anchor that makes the fewest errors on tasks of validation classes, over the ways and shots of the run.

    First how rows are prepared, then how much the prior counts, then the scalars of the regression. Of error rates, it
    is the roots that count: one point less matters more to somebody who has many examples and few errors.
    """
    training, validation = metaset.subset(config.train_on), metaset.subset("val")
    key = split_run_key(jax.random.key(config.seed))[2]
    kept = validation.features[validation.rows]
    alone = dataclasses.replace(validation, features=kept, rows=np.arange(len(kept)))

    def place(preparation: Preparation) -> list[Episodes]:
        rows = place_rows(alone, fits_on_device(alone.features.size), preparation)
        return fixed_tasks(config, alone, rows)

    def score(anchor: Anchor, tasks: list[Episodes]) -> float:
        errors = (1 - float(ACCURACY(anchor, one, key, indices_of(config, one))) for one in tasks)
        return -sum(math.sqrt(error) for error in errors)

    def score_prepared(spread: Spread) -> float:
        return score(spread.anchor(TYPICAL_SHARE, kind), place(spread.preparation))

    kind = config.structure.anchor or "logistic"
    prepared = (one for each in whiten(training, POWERS) for one in emphasise(each, training, EMPHASES))
    spread = max((measure_spread(one, training, validation) for one in prepared), key=score_prepared)
    tasks = place(spread.preparation)
    best = max((spread.anchor(share, kind) for share in SHARES), key=lambda anchor: score(anchor, tasks))
    if not best.steps:
        return best
    scalars = [(jnp.log(jnp.float32(s)), jnp.log(jnp.float32(r))) for s in SHARPNESSES for r in REGULARISERS]
    others = [dataclasses.replace(best, log_sharpness=s, log_regulariser=r) for s, r in scalars]
    return max(others, key=lambda anchor: score(anchor, tasks))


def indices_of(config: TrainConfig, tasks: Episodes) -> Int[Array, " task"]:
    """Of the tasks that decide, in whole batches: a remainder would be compiled by itself."""
    number = min(config.validation_tasks, round(CLASSES / (tasks.way * AT_ONCE)) * AT_ONCE)
    return jnp.arange(max(number, min(config.validation_tasks, AT_ONCE)))


def fixed_tasks(config: TrainConfig, metaset: MetaSet, rows: Rows) -> list[Episodes]:
    """Tasks of a few ways and shots that span those of a run: middling and most ways, with few to many shots."""
    if not config.mixed:
        query = min(config.query, int(metaset.counts.min()) - config.shot)
        return [Episodes.over(metaset, config.way, config.shot, query, rows)]
    mixed = MixedEpisodes.between(metaset, *config.spans, config.query, rows)
    ways = sorted({middle(mixed.fewest_way, mixed.way), mixed.way})
    shots = sorted({mixed.fewest_shot, middle(mixed.fewest_shot, mixed.shot), mixed.shot})
    cells = [(way, shot) for way in ways for shot in shots if way * shot <= MOST_ROWS or shot == mixed.fewest_shot]
    return [Episodes.over(metaset, way, shot, mixed.query, rows) for way, shot in cells]


def middle(least: int, most: int) -> int:
    """By ratio, as ways and shots are drawn."""
    return round(math.sqrt(least * most))


def mean_accuracy(anchor: Anchor, tasks: Episodes, key: PRNGKeyArray, indices: Int[Array, " task"]) -> Float[Array, ""]:
    """Of the anchor by itself."""

    def one(index: Int[Array, ""]) -> Float[Array, ""]:
        task = tasks.sample(jax.random.fold_in(key, index))
        weights = anchor.fit(anchor.centroids(task.support), task.support)
        return accuracy(task.query.inputs @ weights[:, :-1].T + weights[None, :, -1], task.query)

    return jax.lax.map(one, indices, batch_size=min(AT_ONCE, len(indices))).mean()


ACCURACY = jax.jit(mean_accuracy)


def validation_tasks(config: TrainConfig, metaset: MetaSet, rows: Rows) -> Episodes:
    """Tasks of validation classes: all other examples are queries, in mixed tasks at most `query` per class."""
    if config.mixed:
        return MixedEpisodes.between(metaset.subset("val"), *config.spans, config.query, rows)
    return Episodes.over(metaset.subset("val"), config.way, config.shot, None, rows)
