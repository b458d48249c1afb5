"""A search trains what it claims, halves it fairly, and ends in the same table however often it is killed."""

import dataclasses
import json
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from helpers.marks import by_default
from helpers.runs import owned_by_another
from helpers.small import DIM, HYPER, make_metaset
from metaleo._io.files import read_header
from metaleo.cli import main
from metaleo.config.presets import resolve_config
from metaleo.config.schema import TrainConfig
from metaleo.data import save_data
from metaleo.engines import all_engines
from metaleo.errors import BadInput, Interrupted
from metaleo.learners.registry import Structure
from metaleo.search.random_search import (
    Search,
    SearchConfig,
    importances,
    rungs,
    space_of,
    split_draw,
    trial_records,
    write_results,
)
from metaleo.search.run_search import worker_name
from metaleo.search.study import Study
from metaleo.tasks.episodes import Episodes, place_rows
from metaleo.training.meta_train import make_optimiser, meta_train

pytestmark = pytest.mark.usefixtures("loose_dtypes")
METASET = make_metaset(images=24)
TRAIN = TrainConfig(
    "features.npz", way=3, query=4, steps=8, meta_batch=2, validate_every=2, validation_tasks=20,
    structure=Structure("meta-sgd", DIM, 3, finetune_steps=2), hyper=HYPER,
)  # fmt: skip
CONFIG = SearchConfig(TRAIN, trials=6, halvings=2, batch=6)


def run_search(folder, config=CONFIG, replicas=4, report=lambda progress: None):
    folder.mkdir(exist_ok=True)
    worker = Search(config, folder, METASET, replicas)
    study = Study(
        f"sqlite:///{folder}/study.db", "x", worker.space, config.settings(),
        slots=config.trials, sampler=config.sampler, seed=0, worker="a", lost_after=60.0,
    )  # fmt: skip
    worker.run(study, report)
    return trial_records(study)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    with jax.numpy_dtype_promotion("standard"):
        return run_search(tmp_path_factory.mktemp("search"))


@pytest.mark.parametrize(
    ("steps", "halvings", "every", "expected"),
    [(8000, 3, 500, [1000, 2000, 4000, 8000]), (8, 0, 2, [8]), (400, 3, 500, [400]), (7, 1, 2, [4, 7])],
)
def test_rungs(steps, halvings, every, expected):
    assert rungs(steps, halvings, every) == expected


def test_the_better_half_goes_on(table):
    steps = sorted((row["steps"] for row in table), reverse=True)
    assert steps == [8, 8, 4, 2, 2, 2]
    for end in ("2", "4"):
        here = [row for row in table if end in row["accuracy_at"]]
        stopped = [row["accuracy_at"][end] for row in here if row["steps"] == int(end)]
        went_on = [row["accuracy_at"][end] for row in here if row["steps"] > int(end)]
        assert len(went_on) >= len(stopped)
        assert min(went_on) >= max(stopped)


@pytest.mark.slow
def test_a_trial_is_an_ordinary_run(table):
    """The best trial again, by itself, with nothing of the search around it."""
    best = table[0]
    structure, hyper = split_draw(TRAIN.structure, TRAIN.hyper, best["draw"])
    rows = place_rows(METASET)
    training = Episodes.over(METASET.subset("train"), 3, 1, 4, rows)
    validation = Episodes.over(METASET.subset("val"), 3, 1, None, rows)
    key = jax.random.fold_in(jax.random.key(0), best["trial"])
    settings = {"steps": 8, "meta_batch": 2, "validate_every": 2, "validation_tasks": 20}

    @jax.jit
    def train(hyper, key):
        optimiser = make_optimiser()
        return meta_train(structure.init, hyper, key, training, validation, optimiser, **settings)

    state, _ = train(jax.tree.map(jnp.float32, hyper), key)
    np.testing.assert_allclose(state.best_score, best["accuracy"], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 6])
def test_replicas_do_not_matter(table, replicas, tmp_path):
    for row, other in zip(run_search(tmp_path, replicas=replicas), table, strict=True):
        assert row["trial"] == other["trial"]
        np.testing.assert_allclose(row["accuracy"], other["accuracy"], atol=1e-3)


@pytest.mark.parametrize("moments", by_default([(2, 1, 3)], [(1,), (2, 1, 3), (3, 3, 1, 1)]), ids=str)
def test_stopped_and_started_again_ends_in_the_same_table(table, moments, tmp_path):
    for moment in moments:
        calls = []

        def die(progress, calls=calls, moment=moment):
            calls.append(progress)
            if len(calls) == moment:
                raise KeyboardInterrupt  # not asked to stop, so nothing more is saved

        with pytest.raises(KeyboardInterrupt):
            run_search(tmp_path, report=die)
    assert run_search(tmp_path) == table


def test_asked_to_stop_saves_and_goes_on_from_there(table, tmp_path):
    reports = []

    def stop(progress):
        reports.append(progress)
        if len(reports) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run_search(tmp_path, report=stop)
    done = reports[-1].done
    again = []
    assert run_search(tmp_path, report=again.append) == table
    assert again[0].done > done
    assert again[-1].done == again[-1].total == 6 * 2 + 3 * 2 + 2 * 4


def test_progress_counts_every_step_once(tmp_path):
    done = []
    run_search(tmp_path, report=lambda progress: done.append(progress.done))
    assert done == sorted(done)
    assert done[-1] == 6 * 2 + 3 * 2 + 2 * 4


@pytest.mark.slow
def test_tpe_goes_by_batches(tmp_path):
    config = dataclasses.replace(CONFIG, sampler="tpe", batch=3, halvings=0)
    rows = run_search(tmp_path, config)
    assert sorted(row["trial"] for row in rows) == list(range(6))
    assert len({row["draw"]["l2"] for row in rows}) == 6


def test_results_and_importances(table, tmp_path):
    best = write_results(CONFIG, tmp_path, table)
    assert TrainConfig.read(tmp_path / "best.json") == best
    assert best.hyper.learning_rate == table[0]["draw"]["learning_rate"]
    assert best.structure.finetune_step_size == table[0]["draw"]["finetune_step_size"]
    rng = np.random.default_rng(0)
    space = space_of("meta-sgd")
    made_up = []
    for _ in range(60):
        draw = {name: float(np.exp(rng.uniform(*np.log(ends)))) for name, ends in space.items()}
        made_up.append({"draw": draw, "accuracy_at": {"2": np.log(draw["keep_prob"]) + 0.01 * rng.normal()}})
    shares = importances(CONFIG, made_up)
    assert max(shares, key=lambda name: shares[name]) == "keep_prob"
    assert shares["keep_prob"] > 0.8
    assert importances(CONFIG, made_up[:2]) == {}


def stop_in_training(folder):
    """A search that leaves a state of six trials in their first rung."""

    def die(progress):
        raise KeyboardInterrupt

    worker = Search(CONFIG, folder, METASET, 4)
    with pytest.raises(KeyboardInterrupt):
        run_search(folder, report=die)
    batch = worker.load() or worker.next_batch(open_study(folder, worker))
    batch.save(worker.path, worker.engine)
    return worker


def open_study(folder, worker):
    return Study(
        f"sqlite:///{folder}/study.db", "x", worker.space, CONFIG.settings(),
        slots=CONFIG.trials, sampler="random", seed=0, worker="a", lost_after=60.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    with jax.numpy_dtype_promotion("standard"):
        return stop_in_training(tmp_path_factory.mktemp("stopped"))


CLAIM = {"number": 0, "slot": 0, "draw": dict.fromkeys(space_of("meta-sgd"), 0.5)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"claims": None}, "claims is missing"),
        ({"alive": None}, "alive is missing"),
        ({"rung": None}, "rung is missing"),
        ({"rung": 3}, "rung=3 is not one of 3"),
        ({"alive": []}, r"alive=\[\] are not places among 6 claims"),
        ({"alive": [0, 6]}, r"alive=\[0, 6\] are not places"),
        ({"alive": [1, 1]}, r"alive=\[1, 1\] are not places"),
        ({"claims": []}, "are not places among 0 claims"),
        ({"claims": [{}]}, "claims.0.number is missing"),
        ({"claims": [CLAIM | {"more": 1}]}, "claims.0.more is unknown"),
        ({"claims": [CLAIM | {"number": "x"}]}, "claims.0.number should be a whole number"),
        ({"claims": [CLAIM | {"slot": -1}]}, "slot=-1 must be at least 0"),
        ({"claims": [CLAIM | {"slot": 6}]}, "slot=6 is not one of 6 trials"),
        ({"claims": [CLAIM | {"draw": {"l2": 0.1}}]}, "it has draws of l2"),
        ({"claims": [CLAIM | {"draw": CLAIM["draw"] | {"l2": 1e300}}]}, "l2=1e\\+300 must be from 0"),
        ({"devices": 10**9}, "devices=1000000000 must be at most 2,048"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_state_is_refused_in_one_line(stopped, change, message):
    whole = stopped.path.read_bytes()
    header = read_header(stopped.path) | change
    header = {name: value for name, value in header.items() if value is not None}
    try:
        safetensors.numpy.save_file(
            safetensors.numpy.load_file(stopped.path), stopped.path, {"metaleo": json.dumps(header)}
        )
        with pytest.raises(BadInput, match=f"population.safetensors is a damaged file .*{message}") as error:
            stopped.load()
        assert "\n" not in str(error.value)
    finally:
        stopped.path.write_bytes(whole)


def test_a_search_goes_on_with_its_engine_and_says_what_is_not_as_it_was(stopped, tmp_path):
    header = read_header(stopped.path)
    assert (header["engine"], header["devices"]) == (stopped.engine.name, jax.device_count())
    arrays, header = safetensors.numpy.load_file(stopped.path), header | {"engine": "reference", "backend": "tpu"}
    safetensors.numpy.save_file(arrays, tmp_path / "population.safetensors", {"metaleo": json.dumps(header)})
    worker = Search(CONFIG, tmp_path, METASET, 4)
    worker.engine = all_engines()["closed-form"]  # as if that could do more here
    with pytest.warns(UserWarning, match="begun with backend tpu and goes on with backend cpu: rounding differs"):
        worker.load()
    assert worker.engine.name == "reference"


def test_a_state_of_another_study_is_refused(stopped, tmp_path):
    (tmp_path / "population.safetensors").write_bytes(stopped.path.read_bytes())
    with pytest.raises(BadInput, match="has trials in training that study x does not have: remove that file"):
        run_search(tmp_path)


SMALL = (
    "--data", "features.npz", "--learner", "meta-sgd", "--way", "3", "--trials", "4", "--steps", "4", "--halvings", "1",
    "--validate-every", "2", "--validation-tasks", "10",
)  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_data(METASET, "features.npz")
    return tmp_path


def test_command(here, capsys):
    main(["search", *SMALL, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    assert (here / "search/search.png").read_bytes().startswith(b"\x89PNG")
    assert not (here / "search/population.safetensors").exists()
    main(["search", *SMALL, "--json"])  # nothing left to do
    assert json.loads(capsys.readouterr().out) == rows
    best = resolve_config(DIM, preset="search/best.json")
    assert best.structure.learner == "meta-sgd"
    assert best.hyper.keep_prob == rows[0]["draw"]["keep_prob"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--learner", "leoo"), "unknown learner 'leoo': did you mean leo. Known are leo, leo-no-finetuning, .* cl2n"),
        (("--learner", "cl2n"), "cl2n has nothing to learn"),
        (("--way", "6"), "6-way tasks need 6 classes; the val split has 5"),
        (("--trials", "0"), "--trials 0 must be at least 1"),
        (("--sampler", "grid"), "unknown --sampler 'grid'; known are random, tpe"),
        (("--learner", "leo-anchored"), "a search cannot vary leo-anchored"),
        (("--halvings", "-1"), "--halvings -1 must be from 0 to 10"),
        (("--storage", "postgresql://me@127.0.0.1:1/x"), "cannot reach the database postgresql://me@127.0.0.1:1/x: "),
    ],
    ids=str,
)
def test_mistakes(here, capsys, change, message):
    with pytest.raises(SystemExit) as end:
        main(["search", *SMALL, *change])
    assert end.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, said[-1]), said
    assert "Traceback" not in "".join(said)


def test_a_study_of_another_space_and_a_busy_folder(here, capsys):
    main(["search", *SMALL])
    capsys.readouterr()
    for change, message in (
        (("--learner", "prototypical", "--study", "meta-sgd-3way-1shot"), "another search space"),
        (("--steps", "8"), "was started with steps 4, not 8"),
    ):
        with pytest.raises(SystemExit):
            main(["search", *SMALL, *change])
        assert message in capsys.readouterr().err.strip().splitlines()[-1]
    before = (here / "search/trials.json").read_bytes()
    for more in ((), ("--overwrite",)):
        with owned_by_another(here / "search"), pytest.raises(SystemExit):
            main(["search", *SMALL, *more])
        assert "another process is at work in search" in capsys.readouterr().err
    assert (here / "search/trials.json").read_bytes() == before


def test_a_search_killed_before_its_study_can_be_replaced(here, capsys):
    (here / "search").mkdir()
    (here / "search/.worker.4711.tmp").write_text("")
    main(["search", *SMALL, "--overwrite", "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 4


@pytest.mark.parametrize("out", ["features.npz/search", "features.npz"])
def test_a_folder_that_cannot_be_written(here, capsys, out):
    with pytest.raises(SystemExit) as end:
        main(["search", *SMALL, "--out", out])
    assert end.value.code == 2
    assert f"cannot write {out}" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_database_that_goes_away(here, capsys, monkeypatch):
    def gone(*_):
        raise SQLAlchemyError("server closed the connection")

    with monkeypatch.context() as patch:
        patch.setattr(Study, "report", gone)
        with pytest.raises(SystemExit) as end:
            main(["search", *SMALL])
    assert end.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "lost the database of the study: server closed the connection; run the same command again" in said
    main(["search", *SMALL, "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 4


@pytest.mark.parametrize("when", ["agree", "beat", "claim", "trials"])
def test_a_disk_that_is_full(here, capsys, monkeypatch, when):
    """Whenever SQLite cannot write; the first line of what Optuna says hides why."""

    def full(*_):
        cause = OperationalError("INSERT", {}, Exception("database or disk is full"))
        raise StorageInternalError("An exception is raised during the commit.") from cause

    with monkeypatch.context() as patch:
        patch.setattr(Study, when, full)
        with pytest.raises(SystemExit) as end:
            main(["search", *SMALL])
    assert end.value.code == 2
    assert "database or disk is full; run the same command again" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_lock_that_cannot_be_created(here, capsys):
    """As on a disk that is full, or for a folder of that name."""
    (here / "search/study.db.lock").mkdir(parents=True)
    with pytest.raises(SystemExit) as end:
        main(["search", *SMALL])
    assert end.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"cannot write search/study.db.lock: .*; run the same command again to go on", said)
    (here / "search/study.db.lock").rmdir()
    main(["search", *SMALL, "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 4


def test_a_worker_keeps_its_name(tmp_path):
    assert worker_name(tmp_path) == worker_name(tmp_path)
    (tmp_path / "worker").write_bytes(b"\xff\x00")  # damaged
    assert worker_name(tmp_path) == worker_name(tmp_path)
