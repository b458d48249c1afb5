"""Files of version 0.1 still load, and lead to the same numbers (tests/golden/README.md says how they were made)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from metaleo.checkpoints import load_model
from metaleo.cli import main
from metaleo.config.schema import TrainConfig
from metaleo.data.feature_files import load_data
from metaleo.estimators.classifier import adapt, load_task
from metaleo.features.recipes import Recipe

OLD = Path(__file__).parent / "golden/v0.1"


def test_a_model_file():
    model = load_model(OLD / "run")
    assert model.structure.max_grad_norm == model.learner.max_grad_norm == 5.0  # `limit` in the file
    assert TrainConfig.from_json(model.header["config"]).hyper.keep_prob == 0.5  # `keep` in the file


@pytest.mark.usefixtures("loose_dtypes")
def test_a_task_file():
    test = load_data("sample").subset("test")
    queries, expected = test.read(test.rows[[50, 150]]), [[0.463921, 0.536079], [0.513593, 0.486407]]
    task = load_task(OLD / "task.safetensors")
    assert task.classes == ("crab", "worm")
    np.testing.assert_allclose(task.probabilities(queries), expected, atol=2e-5)
    again = adapt(load_model(OLD / "run"), test.read(test.rows[[0, 1, 100]]), ["worm", "worm", "crab"])
    np.testing.assert_allclose(again.probabilities(queries), expected, atol=2e-4)


@pytest.mark.usefixtures("loose_dtypes")
def test_a_run_goes_on(tmp_path, capsys):
    """Two more steps: the validation accuracy that version 0.1 came to."""
    shutil.copytree(OLD / "run", tmp_path / "run")
    main(["train", "--resume", "--out", str(tmp_path / "run"), "--steps", "6", "--json"])
    (seed,) = json.loads(capsys.readouterr().out)["seeds"]
    assert (seed["step"], seed["best_step"]) == (6, 6)
    np.testing.assert_allclose(seed["validation_accuracy"], 0.320808, atol=2e-3)


def test_a_recipe():
    values = {name: value for name, value in vars(Recipe()).items() if name != "keep_prob"}
    assert Recipe.from_json({**values, "drops": [0.5], "keep": 0.8}).keep_prob == 0.8
