"""Data of one's own on the command line: adapt, predict, split, train, info; and one line for every mistake."""

import csv
import dataclasses
import io
import json
import os
import warnings
from pathlib import Path

import datasets
import jax
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from helpers.commands import SMALL, fails, told
from helpers.images import CONV4
from helpers.small import DIM, make_metaset, make_model
from helpers.tables import write_dataset
from metaleo._io.files import write_text
from metaleo.checkpoints import load_model, save_model
from metaleo.cli import main
from metaleo.cli.common import emit, evaluation_table
from metaleo.data import load_data, save_data
from metaleo.estimators.classifier import adapt, load_task
from metaleo.estimators.examples import read_examples
from metaleo.evaluation.evaluate import Evaluation
from metaleo.features.backbone_files import TrainedBackbone, blank, load_backbone, save_backbone
from metaleo.features.embed import embed_slab
from metaleo.features.images import decode

pytestmark = pytest.mark.usefixtures("loose_dtypes")
CENTRES = {"ant": 0, "bee": 1, "cat": 2}


def make_rows(count, seed):
    """Rows around one direction per class, in turn."""
    random = np.random.default_rng(seed)
    names = [list(CENTRES)[i % 3] for i in range(count)]
    rows = 3 * np.eye(DIM)[[CENTRES[name] for name in names]] + 0.5 * random.normal(size=(count, DIM))
    return rows.astype(np.float32), names


def write_csv(path, rows, **beside):
    """Numbers x0, x1 …, and other columns before them."""
    head = [*beside, *(f"x{i}" for i in range(rows.shape[1]))]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *([*own, *row] for *own, row in zip(*beside.values(), rows, strict=True))])
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A fresh folder with a model, examples to learn from and examples to classify."""
    monkeypatch.chdir(tmp_path)
    model = make_model("prototypical")
    config = {"data": "/somewhere/mine.csv", "way": 3, "shot": 2, "steps": 40}
    known = {"seed": 0, "step": 20, "validation_accuracy": 0.5, "classes": ["a", "b"]}
    header = {**known, "temperatures": [[1, 2.0], [10, 2.0]], "config": config}
    save_model(tmp_path / "run/model.safetensors", model.learner, model.structure, header)
    rows, names = make_rows(8, 0)
    write_csv(tmp_path / "support.csv", rows, label=names)
    rows, names = make_rows(6, 1)
    names[1] = ""
    write_csv(tmp_path / "query.csv", rows, text=[f"row, {i}" for i in range(6)], label=names)
    return tmp_path


@pytest.fixture
def task(here, capsys):
    main(["adapt", "run", "support.csv", "-o", "task.safetensors"])
    capsys.readouterr()
    return "task.safetensors"


# From examples to predictions.


def test_adapt_is_adapt(here, capsys):
    made = told(capsys, "adapt", "run", "support.csv", "--out", "a/task.safetensors")
    assert made == {"task": "a/task.safetensors", "model": "run", "classes": {"ant": 3, "bee": 3, "cat": 2},
                    "temperature": pytest.approx(2)}  # fmt: skip
    found = load_task(here / "a/task.safetensors")
    expected = adapt(load_model(here / "run/model.safetensors"), *make_rows(8, 0))
    np.testing.assert_allclose(found.logits(make_rows(6, 1)[0]), expected.logits(make_rows(6, 1)[0]), rtol=1e-5)
    assert found.about["model"] == "run"


def test_predictions_as_csv(task, capsys):
    main(["predict", task, "query.csv"])
    out = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out.out)))
    assert list(rows[0]) == ["text", "label", "class", "probability", "unsure"]
    assert [row["label"] for row in rows] == ["ant", "", "cat", "ant", "bee", "cat"]
    assert [row["text"] for row in rows] == [f"row, {i}" for i in range(6)]
    assert [row["class"] for row in rows] == make_rows(6, 1)[1]
    assert all(0.33 < float(row["probability"]) <= 1 for row in rows)
    assert "6 predictions" in out.err
    assert "100.0 % of the 5 that have a label are right" in out.err


def test_predictions_as_json(task, capsys):
    result = told(capsys, "predict", task, "query.csv", "--probabilities", "--unsure-below", "0.9")
    assert (result["classes"], result["labelled"], result["accuracy"]) == (["ant", "bee", "cat"], 5, 1.0)
    for row in result["predictions"]:
        assert row["unsure"] == (row["probability"] < 0.9)
        assert row["probabilities"][row["class"]] == row["probability"] == max(row["probabilities"].values())
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert "probabilities" not in told(capsys, "predict", task, "query.csv")["predictions"][0]
    assert not any(
        row["unsure"] for row in told(capsys, "predict", task, "query.csv", "--unsure-below", "0")["predictions"]
    )


def test_predictions_as_files(here, task, capsys):
    main(["predict", task, "query.csv", "-o", "out/found.csv", "--probabilities"])
    assert capsys.readouterr().out == ""
    with open("out/found.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-3:] == ["p(ant)", "p(bee)", "p(cat)"]
    main(["predict", task, "query.csv", "-o", "found.json"])
    assert json.loads((here / "found.json").read_text())["predictions"][2]["class"] == rows[2]["class"]


def test_a_spreadsheet_computes_nothing_of_what_users_wrote(here, capsys):
    """A text that begins like a formula has an apostrophe in CSV, and is as it was in JSON; numbers stay numbers."""
    rows, _ = make_rows(4, 0)
    words = ["=1+1", "plain", "@SUM(A1)", "-2"]
    write_csv("support.csv", rows, label=["=HYPERLINK(1)", "bee"] * 2)
    write_csv("odd.csv", rows, **{"+note": words})
    main(["adapt", "nearest-centroid", "support.csv", "-o", "odd.safetensors"])
    main(["predict", "odd.safetensors", "odd.csv", "-o", "odd.out.csv", "--probabilities"])
    with open("odd.out.csv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["'+note"] for row in found] == ["'=1+1", "plain", "'@SUM(A1)", "-2"]
    assert {row["class"] for row in found} == {"'=HYPERLINK(1)", "bee"}
    assert not any(cell.startswith(("=", "+", "@")) for row in found for cell in (*row, *row.values()))
    capsys.readouterr()
    told_rows = told(capsys, "predict", "odd.safetensors", "odd.csv")["predictions"]
    assert [row["+note"] for row in told_rows] == words
    assert {row["class"] for row in told_rows} == {"=HYPERLINK(1)", "bee"}


def test_accuracy_counts_what_is_wrong(here, task, capsys):
    rows, names = make_rows(4, 1)
    write_csv("wrong.csv", rows, kind=["cat", *names[1:]])
    found = told(capsys, "predict", task, "wrong.csv", "--label", "kind")
    assert found["accuracy"] == 0.75
    assert [row["kind"] for row in found["predictions"]] == ["cat", *names[1:]]
    assert "accuracy" not in told(capsys, "predict", task, "wrong.csv")


def test_columns_by_name(here, task, capsys):
    """Other names, and numbers that are no part of the vector."""
    rows, names = make_rows(8, 0)
    write_csv("other.csv", rows, id=range(8), kind=names)
    made = told(capsys, "adapt", "run", "other.csv", "--label", "kind", "--ignore", "id", "-o", "other.safetensors")
    assert made["classes"] == {"ant": 3, "bee": 3, "cat": 2}
    one, other = (told(capsys, "predict", name, "query.csv")["predictions"] for name in (task, "other.safetensors"))
    assert one == other
    assert len(told(capsys, "predict", task, "other.csv", "--ignore", "id", "kind")["predictions"]) == 8


def test_rows_without_a_label_are_left_out(here, capsys):
    assert told(capsys, "adapt", "run", "query.csv")["classes"] == {"ant": 2, "bee": 1, "cat": 2}
    assert (here / "task.safetensors").exists()


@pytest.mark.parametrize("model", ["nearest-centroid", "cl2n"])
def test_learners_that_need_no_training(here, capsys, model):
    told(capsys, "adapt", model, "support.csv")
    assert told(capsys, "predict", "task.safetensors", "query.csv")["accuracy"] == 1


def test_other_formats_give_the_same_predictions(here, task, capsys):
    rows, names = make_rows(6, 1)
    np.savez("query.npz", features=rows, labels=np.array(names))
    pa.parquet.write_table(pa.table({"vector": rows.tolist()}), "query.parquet")
    found = [told(capsys, "predict", task, name) for name in ("query.csv", "query.npz", "query.parquet")]
    classes = [[(row["class"], row["probability"]) for row in each["predictions"]] for each in found]
    assert classes[0] == classes[1] == classes[2]
    assert (found[1]["labelled"], "labelled" in found[2]) == (6, False)


# Images.


def write_image(path, colour, seed=0):
    noise = np.random.default_rng(seed).integers(0, 40, (20, 18, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.array(colour) + noise).astype(np.uint8)).save(path)
    return path


COLOURS = {"red": (200, 0, 0), "blue": (0, 0, 200)}


@pytest.fixture
def pictures(here):
    """A small network, class folders of images, and a folder of images without classes."""
    random = np.random.default_rng(0)
    trained = jax.tree.map(lambda leaf: leaf + 0.5 * random.random(leaf.shape).astype(np.float32), blank(CONV4))
    save_backbone(here / "network.safetensors", TrainedBackbone(*trained), CONV4, {"config": {"images": "mine"}})
    for name, colour in COLOURS.items():
        for i in range(3):
            write_image(here / "support" / name / f"{i}.png", colour, i)
        write_image(here / "query" / f"{name}.png", colour, 9)
    return here


def test_images_through_a_network(pictures, capsys):
    """The network is remembered; one folder of images is as good as class folders to be predicted."""
    made = told(capsys, "adapt", "nearest-centroid", "support", "--backbone", "network.safetensors")
    assert made["classes"] == {"blue": 3, "red": 3}
    found = told(capsys, "predict", "task.safetensors", "query")["predictions"]
    assert [(row["file"], row["class"]) for row in found] == [("blue.png", "blue"), ("red.png", "red")]
    again = told(capsys, "predict", "task.safetensors", "support")
    assert again["accuracy"] == 1
    assert again["predictions"][0]["file"]


def test_images_in_a_table(pictures, capsys):
    told(capsys, "adapt", "nearest-centroid", "support", "--backbone", "network.safetensors")
    names = sorted(COLOURS)
    images = [{"bytes": (pictures / f"query/{name}.png").read_bytes(), "path": None} for name in names]
    write_dataset(pictures / "table", pa.table({"image": images, "label": names, "id": [3, 4]}), image=datasets.Image())
    result = told(capsys, "predict", "task.safetensors", "table")
    assert result["accuracy"] == 1
    folder = told(capsys, "predict", "task.safetensors", "query")["predictions"]
    assert [row["probability"] for row in result["predictions"]] == [row["probability"] for row in folder]
    assert [row["id"] for row in result["predictions"]] == ["3", "4"]
    broken = pa.table({"image": [images[0], {"bytes": b"nothing", "path": None}]})
    write_dataset(pictures / "broken", broken)
    assert "the image of row 2 cannot be read (not an image)" in fails(capsys, "predict", "task.safetensors", "broken")
    assert "it holds images" in fails(capsys, "split", "table")


def test_images_are_read_at_the_size_that_the_network_was_trained_on(pictures):
    file = load_backbone(pictures / "network.safetensors")
    save_backbone(pictures / "large.safetensors", file.trained, CONV4, {"image_side": 18})
    pixels = np.stack([decode(f"query/{name}.png", 18, 3) for name in sorted(COLOURS)])
    (expected,) = embed_slab(file, pixels, jax.random.key(0), ((4, "rectified"),))
    found = read_examples(Path("query"), "large.safetensors").vectors
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_images_that_cannot_be_used(pictures, capsys):
    adapt = ["adapt", "nearest-centroid", "support", "--backbone", "network.safetensors"]
    assert "support holds images; name the network" in fails(capsys, *adapt[:3])
    assert "nowhere does not exist" in fails(capsys, *adapt[:4], "nowhere")
    assert "is not a network" in fails(capsys, *adapt[:4], "run/model.safetensors")
    assert "4 numbers per example, and run was trained on 8" in fails(capsys, "adapt", "run", *adapt[2:])
    assert "has no labels" in fails(capsys, *adapt[:2], "query", *adapt[3:])
    (pictures / "empty").mkdir()
    assert "empty holds neither class folders nor images" in fails(capsys, *adapt[:2], "empty", *adapt[3:])
    (pictures / "support/red/0.png").write_bytes(b"nothing")
    text = fails(capsys, *adapt)
    assert "1 of 6 images cannot be read" in text
    assert "(not an image)" in text


# Cards.


def test_cards(pictures, task, capsys):
    (run,) = told(capsys, "info", "run")
    assert (run["kind"], run["learner"], run["takes"]) == ("model", "prototypical", "8 numbers per example")
    assert (run["trained on"], run["tasks"]) == ("mine.csv, 2 classes", "3-way 2-shot")
    assert run["validation accuracy"] == "50.00 %"
    assert run["temperature"] == "2.00 at 1, 2.00 at 10 shots"
    assert run["header"]["temperatures"] == [[1, 2.0], [10, 2.0]]
    leaves = jax.tree.leaves(load_model(pictures / "run/model.safetensors").learner)
    assert run["numbers"] == f"{sum(leaf.size for leaf in leaves):,}"
    (card,) = told(capsys, "info", task)
    assert (card["kind"], card["classes"]) == ("task", "ant (3), bee (3), cat (2)")
    assert (card["adapted from"], card["temperature"]) == ("run", "2.00")
    (card,) = told(capsys, "info", "network.safetensors")
    assert (card["kind"], card["takes"]) == ("network", "images of 16 x 16 pixels, 3 channels")
    main(["info", task])
    assert "ant (3), bee (3), cat (2)" in capsys.readouterr().out


def test_a_card_for_each_seed(here, capsys):
    model = make_model("prototypical")
    for seed in (0, 1):
        save_model(here / f"two/model-{seed}.safetensors", model.learner, model.structure, {"seed": seed})
    assert [card["file"] for card in told(capsys, "info", "two")] == ["model-0.safetensors", "model-1.safetensors"]


def test_cards_of_data(here, capsys):
    for name in ("features.npz", "features.safetensors"):
        save_data(make_metaset(), name)
        (card,) = told(capsys, "info", name)
        assert (card["kind"], card["holds"]) == ("features", make_metaset().describe())
    (card,) = told(capsys, "info", "support.csv")
    assert card["holds"] == "8 rows of 8 numbers, 3 classes"
    write_csv("bare.csv", make_rows(4, 0)[0])
    assert told(capsys, "info", "bare.csv")[0]["holds"] == "4 rows of 8 numbers, 0 classes"
    (card,) = told(capsys, "info", "strokes")
    assert card["kind"] == "features"


def test_cards_of_models_in_the_package(here, capsys):
    (card,) = told(capsys, "info", "miniimagenet")
    assert card["takes"].startswith("640 numbers per example")
    (card,) = told(capsys, "info", "sines-and-lines")
    assert card["kind"] == "model"


# Splits.


@pytest.fixture
def table(here):
    """Ten classes of four rows, in a column of another name, and a split by hand."""
    rows = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    kinds = [f"kind{i % 10}" for i in range(40)]
    chosen = [("train", "val", "test", "train")[i % 10 % 4] for i in range(40)]
    return write_csv(here / "mine.csv", rows, kind=kinds, part=chosen, label=["same"] * 40)


def test_split_by_a_column(table, capsys):
    made = told(capsys, "split", "mine.csv", "--label", "kind", "--by", "part", "--way", "2")
    assert made["file"] == "features.safetensors"
    assert made["classes"]["val"] == ["kind1", "kind5", "kind9"]
    assert made["classes"]["test"] == ["kind2", "kind6"]
    assert "only 5 train classes" in made["advice"]
    metaset = load_data("features.safetensors")
    assert (metaset.dim, metaset.counts.tolist()) == (3, [4] * 10)
    assert metaset.splits[1] == "val"


def test_split_at_random(table, capsys):
    flags = ("split", "mine.csv", "--label", "kind", "--overwrite", "--out", "new.npz")
    one, same = (told(capsys, *flags) for _ in range(2))
    other = told(capsys, *flags, "--seed", "3")
    assert one == same
    assert one["classes"] != other["classes"]
    assert [len(own) for own in one["classes"].values()] == [4, 3, 3]
    assert "try way=3" in one["advice"]
    shared = told(capsys, *flags, "--shares", "0.2", "0.4", "0.4")
    assert [len(own) for own in shared["classes"].values()] == [2, 4, 4]
    main([*flags])
    assert "metaleo train --data new.npz" in capsys.readouterr().err


def test_split_again(here, capsys):
    """A file's own split holds, unless another is asked for."""
    save_data(make_metaset((8, 5, 5)), "old.safetensors")
    kept = told(capsys, "split", "old.safetensors", "-o", "kept.safetensors")
    assert sorted(kept["classes"]["val"]) == sorted(f"class{i}" for i in range(8, 13))
    again = told(capsys, "split", "old.safetensors", "--again", "-o", "again.safetensors")
    assert sorted(again["classes"]["val"]) != sorted(kept["classes"]["val"])
    write_csv("named.csv", np.eye(3)[:, :2], label=["a", "b", "c"], split=["val", "test", "train"])
    assert told(capsys, "split", "named.csv", "--by", "split", "-o", "n.npz")["classes"]["val"] == ["a"]


def test_splits_that_make_no_sense(table, capsys):
    split = ["split", "mine.csv", "--label", "kind"]
    (table.parent / "there.npz").touch()
    for flags, expected in (
        (["--out", "there.npz"], "there.npz exists"),
        (["--out", "new.csv"], "must end in .safetensors or .npz"),
        (["--out", "mine.csv/new.npz"], "cannot write"),
        (["--shares", "0.5", "0.5", "0.5"], "--shares are three parts of one"),
        (["--shares", "1.5", "-0.5", "0"], "--shares are three parts of one"),
        (["--shares", "nan", "nan", "nan"], "--shares are three parts of one"),
        (["--shares", "0", "0.5", "0.5"], "leave none to learn from"),
        (["--by", "part", "--again"], "give one of them"),
        (["--by", "nothing"], "has no column of text 'nothing'"),
        (["--by", "kind"], "has no column of text 'kind'"),
        (["--seed", "-1"], "--seed -1 must be from 0 to 4,294,967,295"),
        (["--ignore", "nothing"], "no column 'nothing'"),
    ):
        assert expected in fails(capsys, *split, *flags)
    assert "1 classes cannot be split" in fails(capsys, "split", "mine.csv")
    assert "no column 'x'" in fails(capsys, "split", "mine.csv", "--label", "x")
    assert "nowhere.csv does not exist" in fails(capsys, "split", "nowhere.csv")
    assert not os.path.exists("features.safetensors")


# From a table to a model of one's own.


def test_train_on_a_table(here, capsys):
    """Its model knows its temperatures, and adapts to other rows of the same kind."""
    metaset = make_metaset((6, 4, 4))
    names = np.repeat(metaset.class_names, metaset.counts)
    write_csv("mine.csv", metaset.read(metaset.rows), label=names)
    main(["train", "--data", "mine.csv", "--learner", "prototypical", *SMALL, "--out", "mine"])
    said = capsys.readouterr()
    told_so = " ".join(said.err.split())
    assert "only 6 train classes" in told_so
    assert "12 examples each" in told_so  # rows may be sentences: they are no images
    assert said.out.startswith("mine: best validation accuracy ")
    header = load_model(here / "mine/model.safetensors").header
    assert [shot for shot, _ in header["temperatures"]] == [1, 2, 5]
    assert all(1 / 20 <= value <= 20 for _, value in header["temperatures"])
    assert len(header["classes"]) == 6
    made = told(capsys, "adapt", "mine", "support.csv")
    assert made["temperature"] != 1
    (found,) = told(capsys, "evaluate", "mine", "--tasks", "4", "--shot", "2")["models"]
    main(["evaluate", "mine", "--tasks", "4", "--shot", "2"])
    shown = capsys.readouterr().out
    assert f"{100 * found['accuracy']:.2f} ± {100 * found['accuracy_interval']:.2f} %" in shown
    assert "nearest-centroid" in shown
    assert found["temperature"] == dict(header["temperatures"])[2]
    assert found["calibrated_nll"] != found["nll"]
    assert list(found).index("calibrated_error") < list(found).index("calibration_error")
    assert "temperature" in told(capsys, "info", "mine")[0]


def test_what_predictions_use_stands_first(capsys):
    plain = Evaluation(0.6, 0.01, 1.2, 0.02, 0.45, tasks=10)
    both = dataclasses.replace(plain, temperature=0.5, calibrated_nll=0.9, calibrated_nll_interval=0.02,
                               calibrated_error=0.017)  # fmt: skip
    emit({}, False, *evaluation_table({"both": both, "plain": plain}))
    (first, second) = capsys.readouterr().out.splitlines()[-2:]
    assert first.split()[-10:] == ["0.900", "±", "0.020", "1.7", "%", "1.200", "±", "0.020", "45.0", "%"]
    assert second.split()[-4:] == ["45.0", "%", "–", "–"]
    emit({}, False, *evaluation_table({"plain": plain}))
    assert "before" not in capsys.readouterr().out


def test_a_table_that_cannot_be_trained_on(here, capsys):
    text = fails(capsys, "train", "--data", "support.csv", "--out", "new")
    assert "5-way tasks need 5" in text
    assert fails(capsys, "train", "--data", "query.txt").count("does not exist") == 1
    write_csv("two.csv", make_rows(4, 0)[0], label=["a", "b"] * 2)
    assert "2 classes cannot be split" in fails(capsys, "train", "--data", "two.csv")
    write_csv("none.csv", make_rows(4, 0)[0])
    assert "there is no column `label`; name the one that holds the classes with --label" in fails(
        capsys, "train", "--data", "none.csv"
    )
    assert not os.path.exists("new")


@pytest.fixture
def numbered(here):
    """Classes in a column of another name, and a counter that is no feature."""
    metaset = make_metaset((6, 4, 4), images=16)
    names = np.repeat(metaset.class_names, metaset.counts)
    return write_csv(here / "numbered.csv", metaset.read(metaset.rows), id=range(len(names)), category=names)


def test_columns_are_chosen_for_a_run_once(numbered, capsys):
    """Resuming, testing and comparing read the table as training did, also if it is moved."""
    flags = ["--learner", "prototypical", *SMALL]
    columns = ["--label", "category", "--ignore", "id"]
    config = told(capsys, "train", "--data", "numbered.csv", *columns, *flags, "--out", "mine")["config"]
    assert (config["label"], config["ignore"], config["structure"]["dim"]) == ("category", ["id"], DIM)
    assert told(capsys, "train", "--resume", "--out", "mine", "--steps", "6")["seeds"][0]["step"] == 6
    numbered.rename("moved.csv")
    assert told(capsys, "evaluate", "mine", "--tasks", "2", "--data", "moved.csv")["models"][0]["tasks"] == 2
    learners = ["--learner", "cl2n", "--way", "3", "--shot", "1", "--tasks", "2"]
    main(["compare", "--data", "moved.csv", *columns, *learners, "--out", "versus"])
    settings = json.loads(Path("versus/compare.json").read_text())
    assert (settings["label"], settings["ignore"]) == ("category", ["id"])
    main(["compare", "--data", "moved.csv", *columns, *learners, "--out", "versus"])  # goes on with what is there
    assert load_model("versus/1shot/cl2n/model.safetensors").setting("ignore") == ["id"]
    assert "--ignore id" in Path("versus/compare.md").read_text()


def test_columns_of_something_else_than_a_table(here, capsys):
    assert "sample is no table, so it has no columns to choose with --label or --ignore" in fails(
        capsys, "train", "--ignore", "id", "--out", "new"
    )
    assert "--label means nothing to sines-and-lines" in fails(
        capsys, "train", "--problem", "sines-and-lines", "--label", "id"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("adapt", "nearest-centroid", "numbered.csv", "--label", "category"),
        ("split", "numbered.csv", "--label", "category"),
        ("compare", "--data", "numbered.csv", "--label", "category", "--learner", "cl2n", "--way", "3", "--shot", "1",
         "--tasks", "2"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_counter_among_the_features_is_told_in_one_line(numbered, words):
    with pytest.warns(UserWarning, match="column id") as found:
        main([*words])
    (said,) = [warnings.formatwarning(one.message, one.category, one.filename, one.lineno) for one in found]
    assert "numbered.csv: column id has a different whole number in every row, as an id has; " in said
    assert said.endswith("leave it out with --ignore id\n")
    main([*words, "--ignore", "id", "--overwrite"])  # where a warning would be an error


# What is refused.


def spoiled(rows):
    rows = rows.astype(object)
    rows[1, 2] = "nan"
    return rows


def test_adaptations_that_are_refused(here, task, capsys):
    rows, names = make_rows(8, 0)
    write_csv("narrow.csv", rows[:, :5], label=names)
    write_csv("spoiled.csv", spoiled(rows), label=names)
    write_csv("bare.csv", rows)
    write_csv("one.csv", rows, label=["ant"] * 8)
    write_csv("blank.csv", rows, label=[""] * 8)
    (here / "empty.csv").touch()
    (here / "notes.txt").write_text("hello")
    (here / "notes.safetensors").write_text("hello")
    for words, expected in (
        (["nowhere", "support.csv"], "nowhere does not exist; give a run folder, a model file or one of miniimagenet"),
        (["miniimagnet", "support.csv"], "unknown model 'miniimagnet': did you mean miniimagenet? Known are mini"),
        (["logistic-regresion", "support.csv"], "did you mean logistic-regression?"),
        (["run", "nowhere.csv"], "nowhere.csv does not exist"),
        (["run", "narrow.csv"], "narrow.csv has 5 numbers per example, and run was trained on 8"),
        (["run", "spoiled.csv"], "row 2 has no finite number in column x2"),
        (["run", "bare.csv"], "bare.csv has no labels"),
        (["nearest-centroid", "bare.csv"], "bare.csv has no labels"),
        (["run", "blank.csv"], "blank.csv has no labels"),
        (["run", "one.csv"], "at least 2 classes"),
        (["run", "empty.csv"], "empty.csv cannot be read"),
        (["run", "notes.txt"], "notes.txt is no table of vectors"),
        (["run", "run"], "run holds images"),
        (["notes.safetensors", "support.csv"], "not a file of Metaleo's"),
        ([task, "support.csv"], "is not a model file"),
        (["sines-and-lines", "support.csv"], "predicts numbers"),
        (["run", "support.csv", "--label", "kind"], "there is no column 'kind'; there are label, x0"),
        (["run", "support.csv", "--ignore", "kind"], "there is no column 'kind'"),
        (["run", "support.csv", "--ignore", "x0"], "7 numbers per example"),
        (["run", "support.csv", "-o", "task.csv"], "must end in .safetensors"),
        (["run", "support.csv", "-o", "support.csv/task.safetensors"], "cannot write"),
        (["run", "support.csv", "-o", "/proc/task.safetensors"], "cannot write"),
    ):
        assert expected in fails(capsys, "adapt", *words, *([] if "-o" in words else ["-o", "new.safetensors"]))


def test_predictions_that_are_refused(here, task, capsys):
    rows, _ = make_rows(3, 0)
    write_csv("narrow.csv", rows[:, :5])
    write_csv("spoiled.csv", spoiled(rows))
    cut = (here / task).read_bytes()[:-20]
    (here / "cut.safetensors").write_bytes(cut)
    for words, expected in (
        (["nowhere.safetensors", "query.csv"], "nowhere.safetensors does not exist"),
        ([task, "nowhere.csv"], "nowhere.csv does not exist"),
        (["run/model.safetensors", "query.csv"], "is not a task file; `metaleo adapt` makes one of it"),
        (["run", "query.csv"], "not a file of Metaleo's"),
        (["cut.safetensors", "query.csv"], "truncated"),
        (["query.csv", "query.csv"], "not a file of Metaleo's"),
        ([task, "narrow.csv"], "there is no column of numbers 'x5'"),
        ([task, "spoiled.csv"], "row 2 has no finite number in column x2"),
        ([task, "query.csv", "--label", "kind"], "there is no column 'kind'"),
        ([task, "query.csv", "--unsure-below", "2"], "--unsure-below 2.0 must be from 0 to 1"),
        ([task, "query.csv", "--unsure-below", "nan"], "--unsure-below nan must be from 0 to 1"),
        ([task, "query.csv", "-o", "found.txt"], ".csv or .json"),
        ([task, "query.csv", "-o", "query.csv/found.csv"], "cannot write"),
        ([task, "run"], "run holds images"),
        ([task, "query.csv", "-o", "query.csv"], "query.csv is what predictions are made of"),
    ):
        assert expected in fails(capsys, "predict", *words)


def test_things_that_have_no_card(here, capsys):
    (here / "notes.txt").write_text("hello")
    (here / "empty").mkdir()
    assert "nowhere does not exist" in fails(capsys, "info", "nowhere")
    assert "notes.txt is truncated, or not a file of Metaleo's" in fails(capsys, "info", "notes.txt")
    assert "empty has no model" in fails(capsys, "info", "empty")
    write_text(here / "broken.csv", "label,a\nx,\n")
    assert "broken.csv: no column holds numbers" in fails(capsys, "info", "broken.csv")


def test_columns_in_another_order_give_the_same_predictions(here, task, capsys):
    rows, names = make_rows(6, 1)
    order = [3, 1, 0, 2, *range(4, DIM)]
    with open("mixed.csv", "w", newline="", encoding="utf-8") as file:
        head = ["price", *(f"x{i}" for i in order)]
        csv.writer(file).writerows([head, *([7, *row[order]] for row in rows)])
    write_csv(here / "plain.csv", rows)
    one, other = (told(capsys, "predict", task, name)["predictions"] for name in ("plain.csv", "mixed.csv"))
    assert [row["class"] for row in one] == [row["class"] for row in other] == names
    assert [row["probability"] for row in one] == [row["probability"] for row in other]
    assert [row["price"] for row in other] == ["7"] * 6


def test_columns_of_the_users_keep_what_they_say(here, task, capsys):
    write_csv(here / "odd.csv", make_rows(3, 1)[0], **{"class": ["mine"] * 3})
    (row, *_) = told(capsys, "predict", task, "odd.csv")["predictions"]
    assert row["class (given)"] == "mine"
    assert row["class"] in CENTRES


def test_nothing_else_is_overwritten_by_a_task(here, capsys):
    before = (here / "run/model.safetensors").read_bytes()
    assert "exists; replace it with --overwrite" in fails(
        capsys, "adapt", "run", "support.csv", "-o", "run/model.safetensors"
    )
    assert (here / "run/model.safetensors").read_bytes() == before


def test_probabilities_without_a_temperature_say_so(here, task, capsys):
    assert told(capsys, "predict", task, "query.csv")["calibrated"]
    model = make_model("prototypical")
    save_model(here / "plain/model.safetensors", model.learner, model.structure, {"seed": 0})
    main(["adapt", "plain", "support.csv", "-o", "plain.safetensors"])
    main(["predict", "plain.safetensors", "query.csv"])
    assert "not calibrated" in capsys.readouterr().err


@pytest.mark.slow
def test_a_table_that_has_grown_is_another_table(here, capsys):
    """Its split moves: classes that were learned from would be tested on, or others learned."""
    names = [f"kind {one}" for one in range(20) for _ in range(6)]
    random = np.random.default_rng(0)
    write_csv("grown.csv", random.normal(size=(120, DIM)), label=names)
    flags = [*SMALL, "--query", "2", "--out", "grown"]
    main(["train", "--data", "grown.csv", *flags])
    main(["evaluate", "grown", "--tasks", "2"])
    write_csv("grown.csv", random.normal(size=(126, DIM)), label=[*names, *["another"] * 6])
    capsys.readouterr()
    assert "other training classes" in fails(capsys, "train", "--resume", "--out", "grown", "--steps", "9")
    said = fails(capsys, "evaluate", "grown", "--tasks", "2")
    assert "was trained on class kind" in said
    assert "split in another way since" in said
    assert "was trained on class" in fails(capsys, "evaluate", "grown", "--tasks", "2", "--split", "all")


def test_too_many_examples_for_our_logistic_regression(here, capsys):
    random = np.random.default_rng(0)
    write_csv("large.csv", random.normal(size=(2000, 2)), label=[f"kind {i % 20}" for i in range(2000)])
    assert "scikit-learn's LogisticRegression" in fails(capsys, "adapt", "logistic-regression", "large.csv")
