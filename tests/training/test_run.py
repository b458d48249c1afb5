"""Runs that are cut, killed, interrupted and resumed end as if nothing had happened."""

import dataclasses
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import safetensors.numpy

from helpers.small import DIM, HYPER, adapt, make_metaset
from helpers.small import logits as logits_of
from metaleo import data
from metaleo._io.files import load_tree, read_header
from metaleo._io.run_log import read_metrics
from metaleo._jax import devices
from metaleo.checkpoints import load_model, model_paths
from metaleo.config.presets import resolve_config
from metaleo.config.schema import TrainConfig
from metaleo.engines import use_engine
from metaleo.errors import BadInput
from metaleo.evaluation import calibration
from metaleo.evaluation.calibration import calibration_tasks, query_answers
from metaleo.learners.metric import NearestCentroid
from metaleo.learners.registry import Structure
from metaleo.tasks.episodes import HostRows
from metaleo.tasks.task import labelled
from metaleo.training import baselines
from metaleo.training import run as runs
from metaleo.training.baselines import Beside, beside_baselines, with_plain_rows
from metaleo.training.population import devices_of
from metaleo.training.run import TrainingRun, create_run_folder, resume_config

pytestmark = pytest.mark.usefixtures("loose_dtypes")
CONFIG = TrainConfig(
    data="features.npz", way=3, shot=1, query=4, steps=12, meta_batch=3, validate_every=4, validation_tasks=10,
    structure=Structure(learner="meta-sgd", dim=DIM, way=3, finetune_steps=1), hyper=HYPER,
)  # fmt: skip


def nothing(records):
    """A reporter that keeps quiet."""


def train(folder, config=CONFIG, report=nothing):
    if not (folder / "config.json").exists():
        create_run_folder(folder, config, overwrite=False)
    return TrainingRun(config, folder, make_metaset()).train(report)


def contents(folder):
    """What a run leaves, down to the last bit (versions and file layout aside)."""
    files = sorted(folder.glob("*.safetensors"))
    return [(file.name, file.read_bytes()) for file in files] + [read_metrics(folder / "metrics.jsonl")]


def cut_at(step):
    def report(records):
        if records[0]["step"] == step:
            raise KeyboardInterrupt

    return report


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with jax.numpy_dtype_promotion("standard"):
        train(folder)
    return folder


@pytest.mark.parametrize("step", [4, 8])
def test_resuming_gives_exactly_the_same(tmp_path, whole, step):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", report=cut_at(step))
    train(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(whole)


@pytest.mark.slow
def test_lines_past_the_saved_state_are_written_once(tmp_path, whole, monkeypatch):
    """A kill between a report and the next save: the state is older than the metrics, the last line is torn."""
    monkeypatch.setattr(runs, "report_every", lambda: 2)
    monkeypatch.setattr(runs, "SAVE_SECONDS", 10**6)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", report=cut_at(6))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "se')
    train(tmp_path / "run")
    steps = [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [2, 4, 6, 8, 10, 12]
    assert contents(tmp_path / "run")[:-1] == contents(whole)[:-1]


def test_a_stale_model_is_repaired_on_resuming(tmp_path, whole):
    """A kill between saving the state and saving the model must not lose the better model."""
    train(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    train(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(whole)


@pytest.mark.slow
def test_seeds_side_by_side_are_the_seeds_alone(tmp_path, whole):
    train(tmp_path / "both", dataclasses.replace(CONFIG, seeds=2))
    alone = load_model(whole / "model.safetensors")
    first, second = (load_model(path) for path in model_paths(tmp_path / "both"))
    assert (first.header["seed"], second.header["seed"]) == (0, 1)
    for a, b in zip(jax.tree.leaves(first.learner), jax.tree.leaves(alone.learner), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert np.abs(first.learner.step_size - second.learner.step_size).max() > 1e-3
    assert len(read_metrics(tmp_path / "both" / "metrics.jsonl")) == 2 * 3


@pytest.mark.slow
def test_features_left_on_the_disk_train_the_same(tmp_path, whole, monkeypatch):
    """A file larger than memory: rows are fetched from the map, inside the compiled loop."""
    monkeypatch.setattr("metaleo._jax.devices.memory_bytes", lambda: 0)
    data.save_data(make_metaset(), tmp_path / "features.npz")
    metaset = data.load_data(tmp_path / "features.npz")
    create_run_folder(tmp_path / "run", CONFIG, overwrite=False)
    run = TrainingRun(CONFIG, tmp_path / "run", metaset)
    assert isinstance(run.training.rows, HostRows)
    assert isinstance(metaset.features, np.memmap)
    run.train(nothing)
    ours, theirs = (load_model(folder / "model.safetensors").learner for folder in (tmp_path / "run", whole))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_more_steps_can_be_asked_for(tmp_path, whole):
    train(tmp_path / "run", dataclasses.replace(CONFIG, steps=8))
    longer = resume_config(tmp_path / "run", steps=12)
    assert longer == CONFIG
    train(tmp_path / "run", longer)
    assert (tmp_path / "run/state.safetensors").read_bytes() == (whole / "state.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_without_data_resumes_exactly_too(tmp_path):
    """Sines and lines, with a learning rate that falls: nothing but the step number decides where it is."""
    config = resolve_config(
        1, problem="sines-and-lines", steps=6, meta_batch=2, query=3, validate_every=2, validation_tasks=4, latent=4,
        latent_steps=1, hidden=3, width=4,
    )  # fmt: skip
    for folder in ("whole", "cut"):
        create_run_folder(tmp_path / folder, config, overwrite=False)
    TrainingRun(config, tmp_path / "whole").train(nothing)
    with pytest.raises(KeyboardInterrupt):
        TrainingRun(config, tmp_path / "cut").train(cut_at(4))
    TrainingRun(resume_config(tmp_path / "cut", None), tmp_path / "cut").train(nothing)
    assert contents(tmp_path / "cut")[-1] == contents(tmp_path / "whole")[-1]
    ends = [load_model(tmp_path / folder / "model.safetensors").learner for folder in ("cut", "whole")]
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(one, other)
    losses = [record["validation_loss"] for record in read_metrics(tmp_path / "whole" / "metrics.jsonl") if
              "validation_loss" in record]  # fmt: skip
    assert len(losses) == 3
    model = load_model(tmp_path / "whole" / "model.safetensors")
    assert np.isclose(model.header["validation_loss"], min(losses), atol=1e-4)
    with pytest.raises(BadInput, match="falls to zero over its 6 steps"):
        resume_config(tmp_path / "cut", 12)


def test_early_stopping_ends_the_run(tmp_path):
    still = dataclasses.replace(HYPER, learning_rate=0.0)
    state = train(tmp_path / "run", dataclasses.replace(CONFIG, hyper=still, patience=1, steps=100))
    assert bool(state.stopped.all())
    assert int(state.step[0]) == 8  # the second validation is no better than the first
    again = train(tmp_path / "run", dataclasses.replace(CONFIG, hyper=still, patience=1, steps=100))
    assert int(again.step[0]) == 8


def test_persistent_nan_stops_with_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "MOST_SKIPPED_IN_A_ROW", 8)
    poisoned = dataclasses.replace(CONFIG, hyper=dataclasses.replace(HYPER, l2=float("nan")), steps=100)
    with pytest.raises(BadInput, match=r"8 meta-gradients were NaN or Inf \(by step 8\)"):
        train(tmp_path / "run", poisoned)
    arrays = safetensors.numpy.load_file(tmp_path / "run" / "model.safetensors")
    assert all(np.isfinite(leaf).all() for leaf in arrays.values())
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert records[-1]["skipped"] == 8


def test_later_legs_compile_nothing(tmp_path, compilations_so_far):
    after_each_leg = []
    config = dataclasses.replace(CONFIG, steps=20)
    train(tmp_path / "run", config, lambda records: after_each_leg.append(len(compilations_so_far)))
    assert len(after_each_leg) == 5
    assert after_each_leg[1] == after_each_leg[-1]


def test_a_run_goes_on_with_the_engine_it_was_begun_with(tmp_path):
    config = dataclasses.replace(CONFIG, structure=Structure(learner="leo", dim=DIM, way=3, latent=4, latent_steps=1))
    with use_engine("reference"):
        train(tmp_path / "run", dataclasses.replace(config, steps=4))
    run = TrainingRun(config, tmp_path / "run", make_metaset())
    assert run.engine.name == "closed-form"
    run.load()
    assert run.engine.name == "reference"
    header = read_header(tmp_path / "run/state.safetensors")
    assert (header["engine"], header["devices"]) == ("reference", jax.device_count())
    assert devices_of(tmp_path / "run") == jax.device_count()
    assert devices_of(tmp_path) is None
    (tmp_path / "compare.json").write_text("{}")
    assert devices_of(tmp_path) == jax.device_count()


@pytest.mark.parametrize("change", [{"devices": 3}, {"engine": "warp"}, {"backend": "tpu"}], ids=str)
def test_a_run_that_cannot_go_on_as_it_was_begun_says_so(tmp_path, monkeypatch, change):
    monkeypatch.setattr(runs, "rounding", lambda engine: devices.rounding(engine) | change)
    train(tmp_path / "run", dataclasses.replace(CONFIG, steps=4))
    ((name, value),) = change.items()
    with pytest.warns(UserWarning, match=f"run was begun with {name} {value} and goes on with {name} .*: rounding"):
        TrainingRun(CONFIG, tmp_path / "run", make_metaset()).load()


def test_folders_are_guarded(tmp_path):
    folder = tmp_path / "run"
    create_run_folder(folder, CONFIG, overwrite=False)
    with pytest.raises(BadInput, match="resume=True or replace it with overwrite=True"):
        create_run_folder(folder, CONFIG, overwrite=False)
    create_run_folder(folder, CONFIG, overwrite=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match="holds something else"):
        create_run_folder(tmp_path / "precious", CONFIG, overwrite=True)
    with pytest.raises(BadInput, match="nothing to resume"):
        resume_config(tmp_path / "nowhere", None)
    with pytest.raises(BadInput, match="no model yet"):
        model_paths(folder)
    assert resume_config(folder, None) == CONFIG


def command(folder, *flags):
    """A real process, so that real signals can hit it."""
    return [
        sys.executable, "-m", "metaleo.cli", "train", "--data", str(folder / "features.npz"), "--way", "3",
        "--shot", "1", "--learner", "meta-sgd", "--query", "4", "--meta-batch", "3", "--validate-every", "20",
        "--validation-tasks", "10", "--finetune-steps", "1", "--patience", "1000000", *flags,
    ]  # fmt: skip


def steps_so_far(folder):
    return max((record["step"] for record in read_metrics(folder / "metrics.jsonl")), default=0)


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signals_save_and_leave(tmp_path, number):
    data.save_data(make_metaset(), tmp_path / "features.npz")
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(tmp_path, "--steps", "1000000", "--out", str(run)), stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: steps_so_far(run) >= 40)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "metaleo train --resume --out" in errors
    assert "Traceback" not in errors
    config = TrainConfig.read(run / "config.json")
    state = load_tree(run / "state.safetensors", jax.eval_shape(TrainingRun(config, run, make_metaset()).start))
    assert int(state.step[0]) == steps_so_far(run)  # nothing that was reported is lost


def anchored_config(**changes):
    """A short run of an anchored LEO on mixed tasks."""
    given = {"steps": 6, "validate_every": 2, "validation_tasks": 20, "meta_batch": 3, "query": 4, "latent": 4}
    spans = {"way": 3, "ways": (2, 4), "shots": (1, 3), "decay": False}
    return resolve_config(8, learner="leo-anchored", data="features.npz", **spans, **{**given, **changes})


def test_an_anchored_run_starts_from_its_anchor_and_resumes_to_the_same_bits(tmp_path):
    metaset = make_metaset()
    whole = TrainingRun(anchored_config(), tmp_path / "whole", metaset)
    create_run_folder(whole.folder, whole.config, overwrite=False)
    state = whole.train(lambda records: None)
    assert whole.anchor_score is not None
    assert float(state.best_score[0]) >= whole.anchor_score
    parts = TrainingRun(anchored_config(steps=2), tmp_path / "parts", metaset)
    create_run_folder(parts.folder, parts.config, overwrite=False)
    parts.train(lambda records: None)
    again = TrainingRun(dataclasses.replace(parts.config, steps=6), parts.folder, metaset)
    resumed = again.train(lambda records: None)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    start = whole.start().learner.anchor
    np.testing.assert_array_equal(start.mean, state.learner.anchor.mean)  # measured, never learned
    np.testing.assert_array_equal(start.preparation.whitening, state.learner.anchor.preparation.whitening)


def test_with_a_learning_rate_of_zero_the_anchor_stays_the_best(tmp_path):
    run = TrainingRun(anchored_config(learning_rate=0.0), tmp_path / "run", make_metaset())
    create_run_folder(run.folder, run.config, overwrite=False)
    state = run.train(lambda records: None)
    assert int(state.best_step[0]) == 0
    assert float(state.best_score[0]) == run.anchor_score


def best_of(state):
    return jax.tree.map(lambda leaf: leaf[0], state.best)


def accuracies(learner, episodes, shot):
    """On calibration tasks whose support sets really have so many examples, by the learner itself."""
    tasks, sample = calibration_tasks(episodes)[0], jax.jit(type(episodes).sample)
    kept = (np.arange(tasks.way)[:, None] * tasks.shot + np.arange(shot)).ravel()
    for index in range(baselines.TASKS):
        task = sample(tasks, jax.random.fold_in(jax.random.key(calibration.SEED), index))
        support = labelled(task.support.inputs[kept], np.repeat(np.arange(tasks.way), shot), tasks.way)
        found = logits_of(adapt(learner, support).head, task.query.inputs)
        yield np.mean(np.asarray(found).argmax(1) == np.asarray(task.query.targets).argmax(1))


def test_baselines_stand_beside_a_model(tmp_path):
    run = TrainingRun(anchored_config(steps=2), tmp_path / "run", make_metaset())
    create_run_folder(run.folder, run.config, overwrite=False)
    state = run.train(lambda records: None)
    beside = beside_baselines(run, state)
    assert [(one.way, one.shot) for one in beside] == [(3, 1), (3, 5)]
    assert all(1 / 3 < value <= 1 for one in beside for value in (one.model, one.centroid, one.logistic))
    plain = with_plain_rows(run, calibration_tasks(run.calibration)[0])
    for one in beside:  # the same tasks: our own nearest centroids come to what is computed by hand
        logits, answers = query_answers(NearestCentroid(), plain, baselines.TASKS, one.shot)
        assert one.centroid == pytest.approx((logits.argmax(-1) == answers).mean())
        assert one.model == pytest.approx(np.mean([*accuracies(best_of(state), run.calibration, one.shot)]), abs=1e-6)
    assert Beside(5, 1, 0.6, 0.6, 0.5).behind
    assert not Beside(5, 1, 0.61, 0.6, 0.5).behind
