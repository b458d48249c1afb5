"""A trained model beside what needs no training, on the same validation tasks."""

import dataclasses
import warnings
from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from metaleo._jax.devices import fits_on_device
from metaleo.evaluation import calibration
from metaleo.evaluation.calibration import calibration_tasks, query_answers
from metaleo.learners.base import Learner
from metaleo.learners.linear import LogisticRegression
from metaleo.tasks.episodes import Episodes, place_rows
from metaleo.tasks.task import Batch, Task
from metaleo.training.anchoring import validation_tasks
from metaleo.training.meta_train import RunState
from metaleo.training.run import TrainingRun

SHOTS = (1, 5)
TASKS = 200
LEVEL_TASKS = 100
SEED = 1_000_005
"""Seed of the tasks of `validation_levels`, which no validation uses."""


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

    On the first of the tasks that its temperatures are learned on, so nothing is compiled again. Shots that the
    validation classes have no examples for are left out.
    """
    if run.config.structure.tail is not None:
        return []
    learner: Learner = jax.tree.map(lambda leaf: leaf[0], state.best)
    own, shots = calibration_tasks(run.calibration)
    plain, key = with_plain_rows(run, own), jax.random.key(calibration.SEED)
    found = []
    for shot in (shot for shot in SHOTS if shot in shots):
        logits, answers = query_answers(learner, own, calibration.TASKS, shot)
        accuracy = (logits.argmax(-1) == answers)[:TASKS].mean()
        tasks = draw(plain, (jax.random.fold_in(key, index) for index in range(min(TASKS, calibration.TASKS))))
        there = jnp.tile(jnp.arange(own.shot) < shot, own.way)
        cut = (eqx.tree_at(lambda task: task.support.mask, task, there) for task in tasks)
        found.append(Beside(own.way, shot, float(accuracy), *mean_accuracies(cut)))
    return found


def validation_levels(run: TrainingRun) -> dict[str, float]:
    """Accuracy of nearest centroids and logistic regression on validation tasks like the run's own."""
    if run.config.structure.tail is not None or run.metaset is None:
        return {}
    tasks = with_plain_rows(run, validation_tasks(run.config, run.metaset, run.calibration.rows))
    centroid, logistic = mean_accuracies(draw(tasks, jax.random.split(jax.random.key(SEED), LEVEL_TASKS)))
    return {"nearest centroid": centroid, "logistic regression": logistic}


def with_plain_rows(run: TrainingRun, tasks: Episodes) -> Episodes:
    """The same tasks, of rows as they are."""
    assert run.metaset is not None
    return dataclasses.replace(tasks, rows=place_rows(run.metaset, fits_on_device(run.metaset.features.size)))


def draw(tasks: Episodes, keys: Iterable[jax.Array]) -> Iterable[Task]:
    sample = jax.jit(type(tasks).sample)
    return (sample(tasks, key) for key in keys)


def mean_accuracies(tasks: Iterable[Task]) -> tuple[float, float]:
    """Of nearest centroids, and of scikit-learn's logistic regression."""
    from sklearn.linear_model import LogisticRegression as Logistic
    from threadpoolctl import threadpool_limits

    centroid, logistic = [], []
    with threadpool_limits(1), warnings.catch_warnings():  # threads only wait for each other in problems this small
        warnings.simplefilter("ignore", UserWarning)  # as many classes as rows are no mistake here
        for task in tasks:
            (rows, labels), (asked, truth) = present(task.support), present(task.query)
            there = np.unique(labels)
            centres = np.stack([rows[labels == label].mean(0) for label in there])
            distances = (centres**2).sum(1) - 2 * asked @ centres.T
            centroid.append((there[distances.argmin(1)] == truth).mean())
            model = Logistic(C=LogisticRegression.C, class_weight="balanced", max_iter=300)
            logistic.append(model.fit(rows, labels).score(asked, truth))
    return float(np.mean(centroid)), float(np.mean(logistic))


def present(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels, without the padding."""
    mask = np.asarray(batch.mask)
    return np.asarray(batch.inputs)[mask], np.asarray(batch.targets).argmax(1)[mask]
