"""A trained model beside what needs no training, on the same validation tasks."""

import dataclasses
import warnings

import jax
import numpy as np

from metaleo._jax.devices import fits_on_device
from metaleo.evaluation.evaluate import score_learner
from metaleo.learners.base import Learner
from metaleo.learners.linear import LogisticRegression
from metaleo.learners.metric import NearestCentroid
from metaleo.tasks.episodes import Episodes, place_rows
from metaleo.tasks.task import Batch
from metaleo.training.anchoring import validation_tasks
from metaleo.training.meta_train import RunState
from metaleo.training.run import TrainingRun

SHOTS = (1, 5)
QUERY = 15
TASKS = 200
SEED = 1_000_005
"""Seed of these tasks, which no validation uses."""


@dataclasses.dataclass(frozen=True)
class Beside:
    """Mean accuracies on the same tasks of validation classes."""

    way: int
    shot: int
    model: float
    centroid: float
    logistic: float

    @property
    def behind(self) -> bool:
        """Whether the model is not the best."""
        return self.model <= max(self.centroid, self.logistic)


def beside_baselines(run: TrainingRun, state: RunState) -> list[Beside]:
    """The best learner of the run's first seed, nearest centroid and logistic regression, at one shot and at five.

    Shots that the validation classes have no examples for are left out.
    """
    assert run.metaset is not None
    structure, validation = run.config.structure, run.metaset.subset("val")
    fewest, way = int(validation.counts.min()), run.config.way
    learner: Learner = jax.tree.map(lambda leaf: leaf[0], state.best)
    plain = place_rows(run.metaset, fits_on_device(run.metaset.features.size))
    found = []
    for shot in SHOTS:
        query = min(QUERY, fewest - shot)
        if query < 1 or structure.tail is not None:
            continue

        episodes = Episodes.over(validation, way, shot, query, plain)
        own = dataclasses.replace(episodes, rows=run.calibration.rows)
        centroid, logistic = (mean_accuracy(one, episodes) for one in (NearestCentroid(), LogisticRegression()))
        found.append(Beside(way, shot, mean_accuracy(learner, own), centroid, logistic))
    return found


def mean_accuracy(learner: Learner, episodes: Episodes) -> float:
    return float(score_learner(learner, episodes, SEED, TASKS).accuracy.mean())


LEVEL_TASKS = 100


def validation_levels(run: TrainingRun) -> dict[str, float]:
    """Accuracy of nearest centroids and scikit-learn's logistic regression on validation tasks like the run's own."""
    from sklearn.linear_model import LogisticRegression as Logistic

    assert run.metaset is not None
    if run.config.structure.tail is not None:
        return {}
    plain = place_rows(run.metaset, fits_on_device(run.metaset.features.size))
    tasks, draw = validation_tasks(run.config, run.metaset, plain), jax.jit(Episodes.sample)
    centroid, logistic = [], []
    for key in jax.random.split(jax.random.key(SEED), LEVEL_TASKS):
        task = draw(tasks, key)
        (rows, labels), (asked, truth) = present(task.support), present(task.query)
        there = np.unique(labels)
        centres = np.stack([rows[labels == label].mean(0) for label in there])
        distances = (centres**2).sum(1) - 2 * asked @ centres.T
        centroid.append((there[distances.argmin(1)] == truth).mean())
        model = Logistic(C=LogisticRegression.C, class_weight="balanced", max_iter=300)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # as many classes as rows are no mistake here
            logistic.append(model.fit(rows, labels).score(asked, truth))
    return {"nearest centroid": float(np.mean(centroid)), "logistic regression": float(np.mean(logistic))}


def present(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels, without the padding."""
    mask = np.asarray(batch.mask)
    return np.asarray(batch.inputs)[mask], np.asarray(batch.targets).argmax(1)[mask]
