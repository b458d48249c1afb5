"""Comparisons: the same tasks for all, paired differences, and the same results after a kill."""

import dataclasses
import json
import shutil
import signal

import jax
import numpy as np
import pytest

from helpers.commands import fails
from helpers.runs import owned_by_another
from helpers.small import make_metaset
from metaleo import data
from metaleo._io.files import read_json
from metaleo.checkpoints import load_model
from metaleo.cli import main
from metaleo.config.presets import PRESETS
from metaleo.experiments import compare
from metaleo.tasks.task import normalise
from metaleo.training.run import TrainingRun

pytestmark = pytest.mark.usefixtures("loose_dtypes")
LEARNERS = ("nearest-centroid", "maml", "cl2n")
SMALL = ("--data", "features.npz", "--way", "3", "--steps", "8", "--tasks", "40", "--shot", "1")
COMPARE = ("compare", *SMALL, "--learner", *LEARNERS)


@pytest.fixture(scope="module", autouse=True)
def one_inner_step():
    """A preset that compiles fast."""
    structure = dataclasses.replace(PRESETS["maml"].structure, finetune_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "maml", dataclasses.replace(PRESETS["maml"], structure=structure))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted comparison, beside its features."""
    folder = tmp_path_factory.mktemp("compare")
    data.save_data(make_metaset(images=20), folder / "features.npz")
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.chdir(folder)
        main([*COMPARE, "--out", "whole"])
    return folder


@pytest.fixture
def here(whole, tmp_path, monkeypatch):
    """A copy of it that a test may spoil; its features are those of the original."""
    shutil.copytree(whole / "whole", tmp_path / "copy")
    monkeypatch.chdir(whole)
    return tmp_path / "copy"


def results(folder):
    """Everything but wall times."""
    found = json.loads((folder / "results.json").read_text())
    for rows in found["shots"].values():
        for row in rows:
            assert row.pop("training_seconds") >= 0
            assert row.pop("testing_seconds") >= 0
    return found


def no_training(*_):
    raise AssertionError("trained or tested again")


def test_differences_are_paired(whole):
    rows = {row["learner"]: row for row in results(whole / "whole")["shots"]["1"]}
    scores = {name: np.load(whole / f"whole/1shot/{name}/test.npz")["accuracy"].astype(np.float64) for name in rows}
    assert set(rows) == set(LEARNERS)
    for name, row in rows.items():
        difference = scores[name] - scores["nearest-centroid"]
        error = np.sqrt(np.sum((difference - difference.mean()) ** 2) / 39 / 40)
        np.testing.assert_allclose(row["accuracy"], scores[name].mean())
        np.testing.assert_allclose(
            row["difference"], row["accuracy"] - rows["nearest-centroid"]["accuracy"], atol=1e-12
        )
        np.testing.assert_allclose(row["difference_interval"], 1.96 * error)
    assert rows["maml"]["difference_interval"] < rows["maml"]["accuracy_interval"]  # the same tasks


def test_evaluate_agrees(whole, monkeypatch, capsys):
    """The models are ordinary ones, tested on the tasks of `metaleo evaluate`; the untrained ones too."""
    monkeypatch.chdir(whole)
    rows = {row["learner"]: row for row in results(whole / "whole")["shots"]["1"]}
    for learner in ("maml", "cl2n"):
        main(["evaluate", f"whole/1shot/{learner}", "--tasks", "40", "--json"])
        (report,) = json.loads(capsys.readouterr().out)["models"]
        assert 1 / 20 < rows[learner]["temperature"] != 1
        for name in ("accuracy", "nll", "calibration_error", "temperature", "calibrated_nll", "calibrated_error"):
            assert np.isclose(report[name], rows[learner][name]), name


def test_outputs_agree(whole):
    found = results(whole / "whole")
    assert found["reference"] == "nearest-centroid"  # the first, without LEO
    rows = found["shots"]["1"]
    assert [row["accuracy"] for row in rows] == sorted((row["accuracy"] for row in rows), reverse=True)
    text = (whole / "whole/compare.md").read_text()
    assert text.startswith("```sh\nmetaleo compare --data ")
    table = [line.replace("*", "").split(" | ") for line in text.splitlines() if " ± " in line and line[0] == "|"]
    assert [line[0][2:] for line in table] == [row["learner"] for row in rows]
    assert [line[1].split()[0] for line in table] == [f"{100 * row['accuracy']:.2f}" for row in rows]
    assert [line[3] for line in table] == [f"{row['calibrated_nll']:.3f}" for row in rows]
    assert [line[4] for line in table] == [f"{100 * row['calibrated_error']:.1f}" for row in rows]
    assert found["machine"]["device"] in text
    assert (whole / "whole/compare.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((whole / "whole/compare.json").read_text())["tasks"] == 40


def test_second_run_repeats_nothing(here, capsys, monkeypatch):
    monkeypatch.setattr(compare, "train_with_progress", no_training)
    monkeypatch.setattr(compare, "score_learner", no_training)
    before = (here / "results.json").read_text()
    main([*COMPARE, "--out", str(here), "--json"])
    assert capsys.readouterr().out == before
    assert (here / "results.json").read_text() == before
    main(["compare", *SMALL, "--learner", "maml", "--out", str(here), "--json"])  # part of it
    assert [row["learner"] for row in json.loads(capsys.readouterr().out)["shots"]["1"]] == ["maml"]


def test_going_on_after_a_kill(here, whole, capsys):
    """One learner untouched, one without its score, one half written."""
    shutil.rmtree(here / "1shot/cl2n")
    score = here / "1shot/maml/test.npz"
    score.write_bytes(score.read_bytes()[:100])
    (here / "results.json").unlink()
    main([*COMPARE, "--out", str(here)])
    assert results(here) == results(whole / "whole")
    said = capsys.readouterr()
    assert "[1/3] nearest-centroid, 3-way 1-shot: done" in said.err
    assert "[2/3] maml, 3-way 1-shot\n" in said.err
    assert [line.split()[0] for line in said.out.splitlines() if " ± " in line] == [
        row["learner"] for row in results(here)["shots"]["1"]
    ]


def test_scores_from_before_temperatures_are_made_again(here, capsys):
    path = here / "1shot/cl2n/test.npz"
    with np.load(path) as held:
        old = {name: held[name] for name in held.files if not name.startswith("calibrated")}
    np.savez(path, **old)
    before = results(here)["shots"]["1"]
    main([*COMPARE, "--out", str(here)])
    assert results(here)["shots"]["1"] == before
    assert "cl2n, 3-way 1-shot\n" in capsys.readouterr().err


def test_interrupted(whole, tmp_path, monkeypatch, capsys):
    """Asked to stop in the second learner: it says how to go on, and going on ends at the same results."""
    save = TrainingRun.save

    def save_and_interrupt(run, state):
        save(run, state)
        if run.config.structure.learner == "maml":
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.chdir(whole)
    monkeypatch.setattr(TrainingRun, "save", save_and_interrupt)
    with pytest.raises(SystemExit) as end:
        main([*COMPARE, "--out", str(tmp_path / "cut")])
    monkeypatch.setattr(TrainingRun, "save", save)
    assert end.value.code == 130
    said = capsys.readouterr().err
    assert "stopped and saved; run the same command again" in said
    assert "--resume" not in said
    assert not (tmp_path / "cut/results.json").exists()
    main([*COMPARE, "--out", str(tmp_path / "cut")])
    assert results(tmp_path / "cut") == results(whole / "whole")


def test_lost_time_is_not_made_up(here):
    with compare.timed(here, "training"):
        assert read_json(here / "times.json") == {"training": None}  # what a kill would leave
    assert read_json(here / "times.json")["training"] >= 0
    (here / "times.json").write_text('{"training": null}')
    with compare.timed(here, "training"):
        pass
    assert read_json(here / "times.json") == {"training": None}


def test_mean_feature(monkeypatch):
    train = make_metaset().subset("train")
    monkeypatch.setattr(compare, "SLAB", 7)
    expected = np.mean([normalise(train.features[row]) for row in train.rows], axis=0)
    np.testing.assert_allclose(compare.mean_feature(train), expected, atol=1e-6)


def test_untrained_learners_know_the_training_mean(whole, tmp_path):
    metaset = make_metaset(images=20)
    config = compare.Comparison(str(whole / "features.npz"), (1,), ("cl2n",), 3, 8, 40, 0).config(
        "cl2n", 1, metaset.dim
    )
    compare.make_untrained(metaset, tmp_path / "model.safetensors", config)
    centre = load_model(tmp_path / "model.safetensors").learner.centre
    np.testing.assert_array_equal(centre, compare.mean_feature(metaset.subset("train")))


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "Try:\n  metaleo compare" in capsys.readouterr().out


# Mistakes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--learner", "maml", "mamml"], "unknown learner 'mamml': did you mean maml? Known are leo, "),
        (["--learner", "maml", "maml"], "--learner has maml twice"), (["--shot", "1", "1"], "--shot has 1 twice"),
        (["--learner"], "--learner needs at least one"), (["--shot", "0"], "--shot 0 must be at least 1"),
        (["--steps", "0"], "--steps 0 must be at least 1"), (["--tasks", "1"], "--tasks 1 must be at least 2"),
        (["--seed", "-1"], "--seed -1 must be from 0 to 4,294,967,295"), (["--way", "1"], "--way 1 must be at least 2"),
        (["--way", "6"], "6-way tasks need 6 classes; the val split has 5"),
        (["--shot", "1", "6"], "6 shots and 15 queries need 21 examples"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_written(whole, tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(whole)
    assert said in fails(capsys, *COMPARE, *flags, "--out", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flag", ["--steps", "--tasks", "--seed"])
def test_other_settings(here, capsys, flag):
    said = fails(capsys, *COMPARE, flag, "9", "--out", str(here))
    assert f"{flag[2:]} {results(here)['settings'][flag[2:]]}, not 9" in said
    assert "--overwrite" in said


def test_another_process_is_at_work(here, capsys):
    before = results(here)
    for busy in (here, here / "1shot/maml"):
        with owned_by_another(busy):
            assert "another process is at work in" in fails(capsys, *COMPARE, "--overwrite", "--out", str(here))
    with owned_by_another(here):
        assert "another process is at work in" in fails(capsys, *COMPARE, "--out", str(here))
    assert results(here) == before


def test_other_features_of_the_same_name(here, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data.save_data(make_metaset(images=20, seed=1), "features.npz")
    settings = json.loads((here / "compare.json").read_text())
    (here / "compare.json").write_text(json.dumps(settings | {"data": str(tmp_path / "features.npz")}))
    assert "the features are not the same" in fails(capsys, *COMPARE, "--out", str(here))


def test_a_run_that_was_changed(here, capsys):
    path = here / "1shot/maml/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"meta_batch": 3}))
    assert "meta_batch 3, not 12" in fails(capsys, *COMPARE, "--out", str(here))


def test_overwrite(here, whole, tmp_path, capsys):
    main([*COMPARE, "--learner", "nearest-centroid", "--tasks", "20", "--overwrite", "--out", str(here)])
    assert not (here / "1shot/maml").exists()
    assert results(here)["settings"]["tasks"] == 20
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("precious")
    capsys.readouterr()
    for flags, said in (([], "is not a comparison"), (["--overwrite"], "holds something else")):
        assert said in fails(capsys, *COMPARE, *flags, "--out", str(tmp_path / "thesis"))
    assert (tmp_path / "thesis/chapter.tex").exists()


def test_advice_names_the_simplest_of_the_best():
    random = np.random.default_rng(0)
    base = random.uniform(0.4, 0.9, 400)

    def advice(**ahead):
        scores = {name.replace("_", "-"): base + points / 100 + 0.01 * random.normal(size=400)
                  for name, points in ahead.items()}  # fmt: skip
        return compare.advise(scores)

    told = advice(leo=2.0, cl2n=0.0, nearest_centroid=-1.0)
    assert told.startswith("use leo: +2.0")
    assert told.endswith("against cl2n, the best without training")
    assert advice(leo=0.0, cl2n=0.04).startswith("use cl2n: it needs no training, and ")
    assert advice(leo=0.04, cl2n=0.0).startswith("use cl2n: it needs no training, and ")
    assert advice(leo=-3.0, cl2n=0.0) == "use cl2n: it needs no training, and nothing here is better"
    assert "; ridge is level with it" in advice(leo=2.0, ridge=1.98, cl2n=0.0)
    assert advice(leo=2.0, ridge=0.0).startswith("leo is the best; add nearest-centroid")


def test_advice_is_in_all_results(whole):
    found = results(whole / "whole")["advice"]
    assert found.keys() == {"1"}
    assert found["1"][1:] in (whole / "whole/compare.md").read_text()


def test_no_learner_is_trained_longer_than_its_preset():
    plan = compare.Comparison(learners=("leo-anchored", "leo"), steps=100_000)
    assert plan.config("leo-anchored", 1, 8).steps == PRESETS["anchored"].training["steps"]
    assert plan.config("leo", 1, 8).steps == 100_000
