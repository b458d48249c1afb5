"""The command line as a user meets it: results, and one clear line for every mistake."""

import functools
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from helpers.commands import SMALL, fails, told
from helpers.marks import by_default
from helpers.runs import make_run, owned_by_another
from helpers.small import DIM, make_metaset, make_structure
from metaleo import cli, data
from metaleo._io.files import save_tree, write_text
from metaleo.checkpoints import load_model
from metaleo.cli import CLASSES, main
from metaleo.cli.parsing import as_flags, parse
from metaleo.cli.train import Train
from metaleo.config.presets import PRESETS, resolve_config
from metaleo.evaluation import regression as sines_and_lines

pytestmark = pytest.mark.usefixtures("loose_dtypes")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A fresh folder with a small feature file in it."""
    monkeypatch.chdir(tmp_path)
    data.save_data(make_metaset(), "features.npz")
    return tmp_path


def test_train_then_evaluate(here, capsys):
    main(["train", "--data", "features.npz", "--learner", "meta-sgd", *SMALL, "--seeds", "2", "--out", "run", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [seed["step"] for seed in result["seeds"]] == [4, 4]
    names = {path.name for path in (here / "run").iterdir()}
    assert names == {"config.json", "metrics.jsonl", "state.safetensors", "model-0.safetensors",
                     "model-1.safetensors", "curves.png", ".lock"}  # fmt: skip
    assert (here / "run/curves.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((here / "run/config.json").read_text())
    assert config == result["config"]
    assert config["structure"]["latent"] == 4

    evaluate = ["evaluate", "run", "--tasks", "30", "--json"]
    main([*evaluate, "--per-task", "scores.csv"])
    first = json.loads(capsys.readouterr().out)
    evaluate.append("--no-baselines")
    main(evaluate)
    again = json.loads(capsys.readouterr().out)
    assert again["models"] == first["models"]
    rows = (here / "scores.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 30
    accuracies = [float(row.split(",")[2]) for row in rows[1:31]]
    assert np.isclose(np.mean(accuracies), first["models"][0]["accuracy"], atol=1e-5)

    main(["evaluate", "run/model-1.safetensors", "--tasks", "10", "--way", "4", "--shot", "2", "--split", "val",
          "--no-baselines", "--json"])  # fmt: skip
    other = json.loads(capsys.readouterr().out)
    assert (other["way"], other["shot"], len(other["models"])) == (4, 2, 1)


@pytest.mark.parametrize("learner", ["maml", "fomaml", "meta-sgd"])
def test_other_learners_start_from_their_own_presets(learner):
    config = parse("train", ["--learner", learner]).resolve(DIM)
    assert config.structure.learner == learner
    assert config.structure.finetune_step_size >= 1
    assert config.structure.init(jax.random.key(0)).start.shape == (5, DIM)


def test_presets_and_overrides_are_resolved():
    train = ["--preset", "official-mini-5shot"]
    config = parse("train", [*train, "--kl", "0.5", "--way", "7", "--latent", "32"]).resolve(DIM)
    assert config == resolve_config(DIM, preset="official-mini-5shot", kl=0.5, way=7, latent=32)
    assert (config.shot, config.way, config.clip) == (5, 7, "per-tensor")
    assert (config.structure.official, config.structure.latent, config.structure.dim) == (True, 32, DIM)
    assert config.hyper.kl == 0.5
    assert config.hyper.learning_rate == 4.102361e-4
    assert parse("train", ["--learner", "leo", "--shot", "5"]).resolve(DIM).hyper == PRESETS["metaleo-mini-5shot"].hyper
    usual = parse("train", ["--shot", "5"]).resolve(DIM)  # what is right for data never seen before
    assert (usual.structure.learner, usual.ways, usual.shots) == ("leo-anchored", (2, 20), (5, 5))
    assert parse("train", [*train, "--no-official"]).resolve(DIM).structure.official is False


@pytest.mark.parametrize("preset", PRESETS)
def test_help_shows_the_values_of_the_preset(preset, capsys, monkeypatch):
    """Real defaults, of every flag that the preset decides."""
    monkeypatch.setenv("COLUMNS", "100")
    problem = ["--problem", "sines-and-lines"] if preset.startswith("sines") else []
    with pytest.raises(SystemExit) as end:
        main(["train", "--preset", preset, *problem, "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    own = PRESETS[preset]
    values = {"shot": own.shot, "clip": own.clip, "latent": own.structure.latent, "kl": own.hyper.kl, **own.training}
    values |= {name[:-1]: "..".join(map(str, values.pop(name))) for name in ("ways", "shots") if name in values}
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        assert re.search(rf" {flag}[ ,][^(]*(\([^d][^(]*)*\(default: {re.escape(str(value))}\)", text), flag


FUNCTIONS = (
    "--problem", "sines-and-lines", "--query", "3", "--steps", "2", "--meta-batch", "2", "--validate-every", "2",
    "--validation-tasks", "4", "--latent", "4", "--latent-steps", "1", "--hidden", "3",
)  # fmt: skip


@pytest.mark.slow
def test_functions_from_training_to_figure(here, capsys, monkeypatch):
    find, calibrate = sines_and_lines.ambiguous_tasks, sines_and_lines.calibrate_scale
    monkeypatch.setattr(sines_and_lines, "ambiguous_tasks", lambda shot, seed, count=2: find(shot, seed, count))
    monkeypatch.setattr(sines_and_lines, "calibrate_scale", functools.partial(calibrate, num_tasks=4))
    main(["train", *FUNCTIONS, "--width", "4", "--out", "leo", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["config"]["data"] == "sines-and-lines"
    assert np.isfinite(result["seeds"][0]["validation_loss"])
    assert (here / "leo/curves.png").read_bytes().startswith(b"\x89PNG")
    main(["train", *FUNCTIONS, "--learner", "meta-sgd", "--out", "sgd"])
    capsys.readouterr()

    evaluate = ["evaluate", "leo", "sgd", "--tasks", "6", "--samples", "4", "--json"]
    main([*evaluate, "--per-task", "scores.csv"])
    out = capsys.readouterr()
    first = json.loads(out.out)
    assert "oracle" in out.err
    assert [row["name"] for row in first["models"]] == ["leo seed 0", "sgd seed 0", "oracle", "exact posterior"]
    main(evaluate)
    assert json.loads(capsys.readouterr().out) == first
    leo, sgd, oracle, _ = first["models"]
    assert leo["spread"] > 0
    assert sgd["spread"] == oracle["spread"] == 0
    assert oracle["mse"] < min(leo["mse"], sgd["mse"])
    rows = [row.split(",") for row in (here / "scores.csv").read_text().splitlines()]
    assert len(rows) == 1 + 4 * 6
    assert np.isclose(np.mean([float(row[3]) for row in rows[1:7]]), leo["mse"], atol=1e-4)

    main(["plot-functions", "leo", "--panels", "3", "--samples", "2", "--out", "figure.png", "--json"])
    drawn = json.loads(capsys.readouterr().out)
    assert (here / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert [panel["title"].startswith("ambiguous") for panel in drawn["panels"]] == [False, False, True]
    assert np.shape(drawn["panels"][0]["functions"]) == (2, 201)


def test_bad_input_around_functions(here, capsys):
    assert "unknown problem 'cosines'; known are sines-and-lines" in fails(capsys, "train", "--problem", "cosines")
    assert "--data means nothing to sines-and-lines" in fails(capsys, "train", *FUNCTIONS, "--data", "features.npz")
    assert "ridge has no network to choose" in fails(capsys, "train", *FUNCTIONS, "--learner", "ridge")
    assert "--shot 0 must be at least 1" in fails(capsys, "train", *FUNCTIONS, "--shot", "0")
    assert "preset is for tasks of classes" in fails(capsys, "train", *FUNCTIONS, "--preset", "paper-mini-1shot")
    functions_for_classes = ("train", "--data", "features.npz", "--preset", "sines-and-lines")
    assert "preset is for tasks of functions" in fails(capsys, *functions_for_classes)
    assert "a code per class needs classes" in fails(capsys, "train", *FUNCTIONS, "--codes", "class")
    assert "--way means nothing to sines-and-lines" in fails(capsys, "train", *FUNCTIONS, "--way", "3")
    assert "--way means nothing to sines-and-lines" in fails(capsys, "evaluate", "sines-and-lines", "--way", "3")
    assert "--split means nothing" in fails(capsys, "evaluate", "sines-and-lines", "--split", "val")
    assert "--shot 0 must be at least 1" in fails(capsys, "plot-functions", "sines-and-lines", "--shot", "0")
    assert "--samples 1 must be at least 2" in fails(capsys, "evaluate", "sines-and-lines", "--samples", "1")
    assert "ends in .png" in fails(capsys, "plot-functions", "sines-and-lines", "--out", "figure.jpg")
    assert "--panels 0 must be from 1 to 24" in fails(capsys, "plot-functions", "sines-and-lines", "--panels", "0")
    assert "nowhere does not exist" in fails(capsys, "plot-functions", "nowhere")
    make_run(here / "run", make_structure("meta-sgd"))
    assert "only functions can be drawn" in fails(capsys, "plot-functions", "run")
    assert "different problems" in fails(capsys, "evaluate", "run", "sines-and-lines")
    assert "--samples is for sines and lines" in fails(capsys, "evaluate", "run", "--samples", "5")
    make_run(here / "two", make_structure("meta-sgd"), shot=3)
    assert "trained with different shot" in fails(capsys, "evaluate", "run", "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    [
        ("mlp", "--codes", "task"),
        ("mlp", "--layers", "2"),
        ("gru", "--channels", "4"),
    ],
)
def test_other_networks_train_and_are_tested(here, capsys, network):
    flags = ("--network", *network, "--hidden", "3", "--from-start", "--max-grad-norm", "10")
    main(["train", "--data", "features.npz", *SMALL, *flags, "--out", "run"])
    capsys.readouterr()
    if "task" in network:
        said = fails(capsys, "evaluate", "run", "--way", "4")
        assert "one code for all 3 classes; --way 4 is not possible" in said
    main(["evaluate", "run", "--tasks", "6", "--json"])
    assert 0 <= json.loads(capsys.readouterr().out)["models"][0]["accuracy"] <= 1


def test_string_labels_and_unbalanced_classes_work(here, capsys):
    random = np.random.default_rng(0)
    labels = np.array([animal for i, animal in enumerate(ANIMALS) for _ in range(6 + i)])
    split = np.array([("train", "val", "test")[ANIMALS.index(label) % 3] for label in labels])
    features = random.normal(size=(len(labels), DIM))
    order = random.permutation(len(labels))
    np.savez("animals.npz", features=features[order], labels=labels[order], split=split[order])
    main(["train", "--data", "animals.npz", *SMALL, "--learner", "fomaml", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["run"] == "runs/fomaml-3way-1shot"
    assert 0 <= result["seeds"][0]["validation_accuracy"] <= 1


ANIMALS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis"]


def test_engines_are_chosen_and_recorded(here, capsys):
    train = ("train", "--data", "features.npz", *SMALL)
    for flags, recorded in (((), "closed-form"), (("--engine", "reference"), "reference")):
        main([*train, *flags, "--out", recorded])
        assert json.loads((here / recorded / "config.json").read_text())["engine"] == recorded
        assert load_model(here / recorded / "model.safetensors").header["engine"] == recorded
    capsys.readouterr()
    evaluate = ("evaluate", "reference", "--tasks", "20", "--no-baselines")
    by_engine = [told(capsys, *evaluate, "--engine", name)["models"][0]["nll"] for name in ("auto", "reference")]
    assert by_engine[0] == pytest.approx(by_engine[1], rel=1e-5)
    assert "unknown engine 'warp'; known are auto, " in fails(capsys, *train, "--engine", "warp")
    assert "unknown engine 'warp'; known are auto, " in fails(capsys, "evaluate", "reference", "--engine", "warp")
    config = json.loads((here / "reference/config.json").read_text())
    (here / "reference/config.json").write_text(json.dumps({**config, "engine": "of another machine"}))
    with pytest.warns(UserWarning, match="begun with the engine of another machine, which is not installed here"):
        main(["train", "--resume", "--out", "reference", "--steps", "6"])


@pytest.mark.slow
def test_quickstart_in_small(here, capsys, monkeypatch):
    monkeypatch.setattr("metaleo.experiments.quickstart.load_data", lambda name: make_metaset(images=20))
    main(["quickstart", "--steps", "4", "--tasks", "20", "--json"])
    results = json.loads(capsys.readouterr().out)["results"]
    assert set(results) == {"nearest centroid", "logistic regression", "Meta-SGD", "LEO", "anchored LEO"}
    assert all(result["tasks"] == 20 for result in results.values())
    assert (here / "metaleo-quickstart/learning-curves.png").exists()
    assert "--overwrite" in fails(capsys, "quickstart", "--steps", "4")


def test_work_goes_on_with_the_devices_it_was_begun_on(here, monkeypatch):
    save_tree(here / "run/state.safetensors", np.zeros(1), {"backend": "cpu", "devices": 3})
    write_text(here / "run/config.json", "{}")
    asked = []
    monkeypatch.setattr("metaleo._jax.devices.use_all_cores", asked.append)
    for name in ("train", "search", "reproduce", "compare", "evaluate"):
        cli.run(name, SimpleNamespace(out=here / "run", overwrite=False, run=lambda: None))
    cli.run("train", SimpleNamespace(out=here / "run", overwrite=True, run=lambda: None))
    assert asked == [3, 3, 3, 3, None, None]


@pytest.mark.parametrize("command", ["train", "evaluate", "quickstart", "list"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"Try:\n  metaleo {command}" in capsys.readouterr().out


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("metaleo ")


# Mistakes


def test_missing_file(here, capsys):
    assert "nowhere.npz does not exist" in fails(capsys, "train", "--data", "nowhere.npz")


def test_truncated_file(here, capsys):
    whole = (here / "features.npz").read_bytes()
    (here / "half.npz").write_bytes(whole[: len(whole) // 2])
    assert "half.npz is truncated or not a .npz file" in fails(capsys, "train", "--data", "half.npz")


def test_not_a_feature_file(here, capsys):
    np.savez("weights.npz", weights=np.zeros(3))
    assert "not a feature file: it holds weights" in fails(capsys, "train", "--data", "weights.npz")


def test_nan_features(here, capsys):
    features = np.random.default_rng(0).normal(size=(9, 4, DIM))
    features[2, 1, 3] = np.nan
    np.savez("bad.npz", features=features, split=np.repeat(["train", "val", "test"], 3))
    assert "NaN or Inf in 1 of 36 rows: 9" in fails(capsys, "train", "--data", "bad.npz")


def test_wrong_feature_size(here, capsys):
    make_run(here / "run", make_structure("meta-sgd"))
    np.savez("wide.npz", features=np.ones((9, 4, DIM + 1)))
    capsys.readouterr()
    said = fails(capsys, "evaluate", "run", "--data", "wide.npz")
    assert f"wide.npz has {DIM + 1} numbers per example" in said
    assert f"trained on {DIM}" in said
    assert "--way 0 must be at least 2" in fails(capsys, "evaluate", "run", "--way", "0")
    assert "--shot 0 must be at least 1" in fails(capsys, "evaluate", "run", "--shot", "0")


def test_too_few_classes(here, capsys):
    said = fails(capsys, "train", "--data", "features.npz", *SMALL, "--way", "6")
    assert "6-way tasks need 6 train and 6 val classes" in said
    assert not (here / "runs").exists()  # refused before anything was written


def test_too_few_images(here, capsys):
    said = fails(capsys, "train", "--data", "features.npz", *SMALL, "--shot", "9")
    assert "9 shots and 4 queries need 13 examples per class" in said
    assert "class0 has 12" in said


def test_no_training_classes(here, capsys):
    np.savez("all-test.npz", features=np.ones((6, 9, DIM)), split=np.full(6, "test"))
    assert "no train classes" in fails(capsys, "train", "--data", "all-test.npz", *SMALL)


def test_existing_run(here, capsys):
    arguments = ["train", "--data", "features.npz", *SMALL, "--learner", "meta-sgd", "--out", "run"]
    main(arguments)
    before = (here / "run/state.safetensors").read_bytes()
    capsys.readouterr()
    assert "--resume or replace it with --overwrite" in fails(capsys, *arguments)
    assert (here / "run/state.safetensors").read_bytes() == before
    main([*arguments, "--overwrite"])
    main(["train", "--resume", "--out", "run"])


def test_a_run_that_another_process_trains(here, capsys):
    """It can be read meanwhile, but not trained, continued or replaced."""
    make_run(here / "run", make_structure("meta-sgd"), data=str(here / "features.npz"), query=4, steps=2)
    with owned_by_another(here / "run"):
        main(["evaluate", "run", "--tasks", "2"])
        (here / "run/model.safetensors").unlink()  # it does not say of which classes it is
        before = {path: path.read_bytes() for path in (here / "run").glob("*.*")}
        capsys.readouterr()
        for flags in (["--resume"], ["--resume", "--steps", "8"], ["--data", "features.npz", *SMALL, "--overwrite"]):
            assert "another process is at work in run" in fails(capsys, "train", *flags, "--out", "run")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("command", [
    ["train", "--data", "features.npz", *SMALL], ["evaluate", "run"], ["report", "run"], ["analyse", "codes", "run"],
    ["plot-functions", "run", "--out", "f.png"], ["search", "--data", "features.npz"], ["reproduce", "sample"],
    ["compare"], ["quickstart"], ["split", "features.npz", "--out", "g.npz"], ["pretrain", "--images", "nowhere"],
    ["embed", "net", "--out", "f.safetensors"],
], ids=lambda words: words[0])  # fmt: skip
def test_seeds_that_keys_cannot_tell_apart(here, capsys, command):
    for seed in (2**32, 2**63, -1):
        said = fails(capsys, *command, "--seed", str(seed))
        assert said == f"metaleo: --seed {seed} must be from 0 to 4,294,967,295"
    assert [path.name for path in here.iterdir()] == ["features.npz"]


def test_the_last_of_several_seeds_must_fit_too(here, capsys):
    flags = ["--data", "features.npz", *SMALL, "--learner", "meta-sgd", "--out", "run"]
    said = fails(capsys, "train", *flags, "--seed", str(2**32 - 1), "--seeds", "2")
    assert "--seed 4294967295 must be from 0 to 4,294,967,294" in said
    main(["train", *flags, "--seed", str(2**32 - 1)])


CTRL_C = {
    "import": "sys.meta_path.insert(0, Finder())",
    "command": "Info.run = lambda self: stop()",
    "callback": "Info.run = lambda self: jax.block_until_ready(jax.jit(callback)())",
    "dropped": "Info.run = lambda self: (gc.callbacks.append(in_collector), gc.collect(), wait())",
}


@pytest.mark.parametrize("moment", by_default(["import", "dropped"], CTRL_C))
def test_ctrl_c_at_any_moment(tmp_path, moment):
    """Code 130 and one line, also if what Ctrl-C raised was dropped, became another error, or shutting down crashes."""
    (tmp_path / "program.py").write_text(f"""
import atexit, gc, os, signal, sys, time

atexit.register(os.abort)  # as XLA may that still computes

def stop():
    signal.raise_signal(signal.SIGINT)

def wait():
    for _ in range(1000):
        time.sleep(0.01)

def in_collector(*_):
    gc.callbacks.clear()
    stop()

class Finder:
    def find_spec(self, name, path=None, target=None):
        stop() if name == "tyro" else None

if {moment!r} != "import":
    import jax, numpy as np
    from metaleo.cli.info import Info

    def callback():
        answer = jax.ShapeDtypeStruct((), np.float32)
        return jax.pure_callback(lambda: stop() or np.float32(1), answer)

from metaleo.cli import main
{CTRL_C[moment]}
main()
""")
    done = subprocess.run(
        [sys.executable, "program.py", "info", "file"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (130, "metaleo: stopped\n")


def test_unknown_names(here, capsys):
    assert "paper-mini-1shot" in fails(capsys, "train", "--preset", "paper")
    assert "meta-sgd" in fails(capsys, "train", "--learner", "mamml")
    assert "nothing to learn" in fails(capsys, "train", "--learner", "nearest-centroid")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--steps", "0", "--steps 0 must be at least 1"), ("--shot", "0", "--shot 0 must be at least 1"),
        ("--way", "1", "--way 1 must be at least 2"), ("--keep-prob", "0", "--keep-prob 0.0 must be a probability"),
        ("--keep-prob", "1.5", "--keep-prob 1.5 must be a probability"),
        ("--learning-rate", "-1", "--learning-rate -1.0 must be a finite"),
        ("--kl", "nan", "--kl nan must be a finite"), ("--seeds", "0", "--seeds 0 must be"),
        ("--latent", "0", "--latent 0 must be"),
    ],
)  # fmt: skip
def test_senseless_numbers(here, capsys, flag, value, said):
    assert said in fails(capsys, "train", "--data", "features.npz", *SMALL, flag, value)


def test_nothing_to_evaluate(here, capsys):
    assert "nowhere does not exist" in fails(capsys, "evaluate", "nowhere")
    (here / "empty").mkdir()
    assert "no model yet" in fails(capsys, "evaluate", "empty")
    assert "truncated, or not a file of Metaleo" in fails(capsys, "evaluate", "features.npz")


@pytest.mark.slow
def test_full_disk_while_saving(here):
    """A limit on file sizes stands in for a full disk: one line, code 2, and the last good state still there."""
    train = [sys.executable, "-m", "metaleo.cli", "train", "--data", "features.npz", *SMALL, "--learner", "meta-sgd",
             "--out", "run"]  # fmt: skip
    subprocess.run(train, check=True, capture_output=True)
    before = (here / "run/state.safetensors").read_bytes()
    resumed = [sys.executable, "-m", "metaleo.cli", "train", "--resume", "--out", "run", "--steps", "8"]
    small_files_only = ["bash", "-c", f'ulimit -f {len(before) // 2048}; exec "$@"', "bash"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*small_files_only, *resumed], capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr
    assert "what was saved before is intact" in done.stderr
    assert "Traceback" not in done.stderr
    assert (here / "run/state.safetensors").read_bytes() == before
    assert not list((here / "run").glob(".*.tmp"))
    subprocess.run(resumed, check=True, capture_output=True)


def test_pickle_that_runs_code(here, capsys):
    class Bomb:
        def __reduce__(self):
            return os.system, ("touch exploded",)

    (here / "embeddings").mkdir()
    for split in ("train", "val", "test"):
        (here / "embeddings" / f"{split}_embeddings.pkl").write_bytes(pickle.dumps(Bomb()))
    assert "not a pickle of embeddings that can be trusted" in fails(capsys, "train", "--data", "embeddings")
    assert not (here / "exploded").exists()


@pytest.mark.slow
def test_warnings_are_one_line(tmp_path):
    """Such as that of an engine that is not installed: the run goes on."""
    data.save_data(make_metaset(), tmp_path / "features.npz")
    place = str(tmp_path / "features.npz")
    make_run(tmp_path / "run", make_structure("meta-sgd"), engine="warp", data=place, query=4, steps=2)
    for model in (tmp_path / "run").glob("model*"):
        model.unlink()
    run = subprocess.run(
        [sys.executable, "-m", "metaleo.cli", "train", "--resume", "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    line = "metaleo: run was begun with the engine warp, which is not installed here"
    assert run.stderr.splitlines().count(line) == 1
    assert "UserWarning" not in run.stderr


def test_errors_of_the_library_speak_python_and_commands_speak_flags():
    """A word in backticks that is no argument stays, even if a flag has its name."""
    command = Train(out=Path("run"))
    said = "keep_prob=0.0 and max_way=3: choose another `out=`, or resume=True; the column `shot`, `steps=` and way=-1"
    assert as_flags(said, command) == (
        "--keep-prob 0.0 and max_way=3: choose another --out, or --resume; the column `shot`, --steps and --way -1"
    )


def test_help_fits_a_screen_and_names_every_command(capsys):
    main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    main([])
    assert capsys.readouterr().out.splitlines() == lines
    named = {line[12:].split()[0] for line in lines[2:]}
    assert named == set(CLASSES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("trian",), "metaleo: unknown command 'trian': did you mean train? "),
        (("train", "--stepz", "5"), "metaleo: unknown flag --stepz; did you mean --steps?"),
        (("analyse", "codes", "x", "--taskz=4"), "metaleo: unknown flag --taskz=4; did you mean --tasks?"),
        (("train", "--zzz"), "metaleo: unknown flag --zzz; see metaleo train --help"),
        (("train", "extra"), "metaleo: unexpected argument 'extra'; see metaleo train --help"),
        (("train", "--official", "False"), "metaleo: unexpected argument 'False'; a switch takes no value; see"),
        (("train", "--shot", "x"), "metaleo: --shot takes a whole number or a range such as 2..20, not 'x'"),
        (("train", "--shot", "5.."), "metaleo: --shot takes a whole number or a range such as 2..20, not '5..'"),
        (("train", "--learner", "leo-anchored", "--shot", "5..1"), "metaleo: --shot 5..1 must go from fewest to most"),
        (
            ("train", "--learner", "leo", "--way", "2..5"),
            "metaleo: leo cannot learn from tasks of many ways; leo-anchored can",
        ),
        (("train", "--learner", "meta-sgd", "--anchor", "ridge"), "metaleo: meta-sgd has no anchor"),
        (("train", "--learner", "leo-anchored", "--anchor", "x"), "metaleo: unknown --anchor 'x'; known are centroid"),
        (("train", "--kl", "x"), "metaleo: --kl takes a number, not 'x'"),
        (("evaluate", "x", "--way", "x"), "metaleo: --way takes a whole number, not 'x'"),
        (("train", "--shot"), "metaleo: --shot takes a value; see metaleo train --help"),
        (("train", "--learner", "leoo"), "metaleo: unknown learner 'leoo': did you mean leo? Known are "),
        (("train", "--preset", "paper-1shot"), "metaleo: unknown preset 'paper-1shot': did you mean paper-"),
        (("train", "--engine", "closedform"), "metaleo: unknown engine 'closedform': did you mean closed-form?"),
        (
            ("train", "--network", "mpl"),
            "metaleo: unknown --network 'mpl': did you mean mlp? Known are ",
        ),
        (("pretrain", "--recipe", "bst"), "metaleo: unknown recipe 'bst': did you mean best? "),
        (("pretrain", "--backbone", "conv4"), "metaleo: unknown backbone 'conv4': did you mean conv-4? "),
        (("evaluate", "miniimagnet"), "metaleo: unknown model 'miniimagnet': did you mean miniimagenet?"),
        (("evaluate", "x", "--split", "tset"), "metaleo: unknown --split 'tset': did you mean test? Known are all, "),
        (("adapt",), "metaleo: MODEL and SUPPORT must be given; see metaleo adapt --help"),
        (("pack", "photos"), "metaleo: --out must be given; see metaleo pack --help"),
        (
            ("analyse", "code"),
            "metaleo: Expected one of {codes, curvature, coverage, uncertainty}; see",
        ),
        (("list", "recipe"), "metaleo: unknown kind 'recipe': did you mean recipes? "),
        (("split", "x", "--shares", "1", "2"), "metaleo: --shares takes 3 values; see metaleo split --help"),
        (("split", "x", "--shares", "a", "b", "c"), "metaleo: --shares cannot be 'a', 'b', 'c'; see metaleo split"),
        (("compare", "--learners", "leo"), "metaleo: unknown flag --learners; did you mean --learner?"),
    ],
)
def test_a_typo_is_answered_in_one_line(capsys, arguments, said):
    assert fails(capsys, *arguments).startswith(said)


def test_names_are_listed(capsys):
    main(["list"])
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in (*PRESETS, "meta-sgd", "intents", "wrn-28-10", "closed-form"))
    assert list(told(capsys, "list", "models")) == ["models"]
