"""The anchor of a run, measured on its training classes and chosen on tasks of its validation classes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from metaleo._jax.devices import fits_on_device
from metaleo.config.schema import TrainConfig
from metaleo.data.metaset import MetaSet
from metaleo.evaluation.evaluate import mean_validation_score
from metaleo.learners.anchor import Anchor
from metaleo.learners.leo import LEO
from metaleo.tasks.episodes import Episodes, MixedEpisodes, Rows, place_rows
from metaleo.tasks.preparation import ClassMoments, Preparation, rotated, whiten
from metaleo.training.meta_train import split_run_key

POWERS = (0.0, 1 / 8, 1 / 4, 3 / 8)
"""How far rows may be whitened."""
SHARES = (0.0, 0.5, 1.0)
"""How much of the measured prior may count; without it, classes are where their examples are."""
REGULARISERS = (0.03, 0.1, 0.3, 1.0)
"""How strongly the regression may hold weights to their prior mean; chosen last, after the other two."""
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
    preparation = rotated(preparation, directions)
    seen, unseen = (ClassMoments.of(preparation, one) for one in (training, validation))
    spread, new = np.maximum(seen.between(), 0), unseen.between()
    spanned = spread > 1e-6 * spread.max()
    rest = new[~spanned].mean() if not spanned.all() else 0.0
    scale = (new[spanned].mean() - rest) / spread[spanned].mean() if spanned.any() else 0.0
    within = seen.variances * (unseen.variances.mean() / seen.variances.mean())
    between = max(scale, 0.0) * spread + max(rest, LEAST_SPREAD * within.mean())
    return Spread(preparation, seen.means.mean(0), within, between)


def choose_anchor(config: TrainConfig, metaset: MetaSet) -> Anchor:
    """The anchor that is best before any training, on validation tasks."""
    training, validation = metaset.subset(config.train_on), metaset.subset("val")
    learner = config.structure.init(jax.random.key(config.seed))
    assert isinstance(learner, LEO)
    key = split_run_key(jax.random.key(config.seed))[2]

    def score(anchor: Anchor, tasks: Episodes) -> float:
        return float(
            SCORE(dataclasses.replace(learner, anchor=anchor), tasks, key, jnp.arange(config.validation_tasks))
        )

    found: list[tuple[float, Anchor]] = []
    for preparation in whiten(training, POWERS):
        spread = measure_spread(preparation, training, validation)
        rows = place_rows(metaset, fits_on_device(metaset.features.size), spread.preparation)
        tasks = validation_tasks(config, metaset, rows)
        for share in SHARES:
            anchor = spread.anchor(share, config.structure.anchor or "logistic")
            found.append((score(anchor, tasks), anchor))
    best = max(found, key=lambda one: one[0])[1]
    tasks = validation_tasks(
        config, metaset, place_rows(metaset, fits_on_device(metaset.features.size), best.preparation)
    )
    weaker = [dataclasses.replace(best, log_regulariser=jnp.log(jnp.float32(value))) for value in REGULARISERS]
    return max(weaker, key=lambda anchor: score(anchor, tasks)) if best.steps else best


SCORE = jax.jit(mean_validation_score)


def validation_tasks(config: TrainConfig, metaset: MetaSet, rows: Rows) -> Episodes:
    """Tasks of validation classes: all other examples are queries, in mixed tasks at most `query` per class."""
    if config.mixed:
        return MixedEpisodes.between(metaset.subset("val"), *config.spans, config.query, rows)
    return Episodes.over(metaset.subset("val"), config.way, config.shot, None, rows)
