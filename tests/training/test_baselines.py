"""What stands beside a model that is being trained, against scikit-learn by hand."""

import jax
import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from helpers.small import DIM, make_metaset
from metaleo.config.presets import resolve_config
from metaleo.tasks.episodes import place_rows
from metaleo.training import baselines
from metaleo.training.anchoring import validation_tasks
from metaleo.training.baselines import SEED, present, validation_levels
from metaleo.training.run import TrainingRun


@pytest.mark.parametrize("mixed", [True, False])
def test_levels_are_those_of_the_runs_own_validation_tasks(tmp_path, mixed):
    spans = {"ways": (2, 5), "shots": (1, 3)} if mixed else {"shot": 2}
    learner = "leo-anchored" if mixed else "leo"
    metaset = make_metaset(images=20)
    given = {"way": 3, "query": 4, "validation_tasks": 5}
    config = resolve_config(DIM, learner=learner, data="features.npz", **given, **spans)
    run = TrainingRun(config, tmp_path, metaset)
    found = validation_levels(run)
    tasks = validation_tasks(config, metaset, place_rows(metaset))
    scores, draw = [], jax.jit(type(tasks).sample)
    for key in jax.random.split(jax.random.key(SEED), baselines.LEVEL_TASKS):
        task = draw(tasks, key)
        (rows, labels), (asked, truth) = present(task.support), present(task.query)
        centres = [rows[labels == label].mean(0) for label in np.unique(labels)]
        nearest = KNeighborsClassifier(1).fit(centres, np.unique(labels))
        scores.append((nearest.predict(asked) == truth).mean())
        assert len(set(labels)) >= 2
    np.testing.assert_allclose(found["nearest centroid"], np.mean(scores))
    assert 1 / 5 < found["logistic regression"] <= 1
