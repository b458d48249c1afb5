"""A study ends with exactly the trials that were asked for, whoever dies on the way."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import optuna
import psycopg
import pytest
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from helpers.small import make_metaset
from metaleo.config.presets import PRESETS
from metaleo.data import save_data
from metaleo.errors import BadInput
from metaleo.search import study as study_module
from metaleo.search.random_search import PAPER_SPACE, space_of
from metaleo.search.study import Study


def open_study(folder, worker="a", *, slots=6, space=PAPER_SPACE, sampler="random", lost_after=60.0, **settings):
    return Study(
        f"sqlite:///{folder}/study.db", "test", space, {"steps": 10} | settings,
        slots=slots, sampler=sampler, seed=0, worker=worker, lost_after=lost_after,
    )  # fmt: skip


def end(study, claims):
    for claim in claims:
        study.report({claim.number: 0.5}, 10)
        study.tell(claim.number, TrialState.COMPLETE, 0.5)


def slots(study):
    """The slot of every trial that counts as done; a slot must not be there twice."""
    done = [t for t in study.study.get_trials() if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    return sorted(trial.user_attrs["slot"] for trial in done)


def test_ranges_hold_the_values_of_the_paper_and_of_its_code():
    for name, preset in PRESETS.items():
        if name.startswith(("paper", "official")):
            for field, (low, high) in PAPER_SPACE.items():
                assert low <= getattr(preset.hyper, field) <= high, (name, field)


def test_draws_are_log_uniform_and_belong_to_their_slot(tmp_path):
    study = open_study(tmp_path, slots=50, space={"l2": (1e-8, 1e-2)})
    draws = np.log10([claim.draw["l2"] for claim in study.claim(50)])
    assert -8 <= draws.min() < -7.4
    assert -2.6 < draws.max() <= -2
    assert abs(np.mean(draws) + 5) < 4 * np.sqrt(3 / 50)
    other = tmp_path / "other"
    other.mkdir()
    again = open_study(other, "b", slots=3, space={"l2": (1e-8, 1e-2)}).claim(3)
    np.testing.assert_allclose(np.log10([claim.draw["l2"] for claim in again]), draws[:3])


def test_a_worker_that_comes_back_has_its_trials(tmp_path):
    before = open_study(tmp_path).claim(4)
    study = open_study(tmp_path)
    assert study.claim(6)[:4] == before
    end(study, study.claim(6))
    assert study.finished()
    assert slots(study) == list(range(6))


def test_two_workers_share_without_doubling(tmp_path):
    studies = [open_study(tmp_path, worker, slots=20) for worker in "ab"]
    claims = {}

    def work(study):
        claims[study.worker] = study.claim(20)
        end(study, claims[study.worker])

    threads = [threading.Thread(target=work, args=(study,)) for study in studies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claims["a"]) + len(claims["b"]) == 20
    assert slots(studies[0]) == list(range(20))
    assert all(study.finished() for study in studies)


@pytest.fixture
def wait(monkeypatch):
    """Let a minute and a half pass at once; workers count as lost after one."""
    ahead = [0.0]
    monkeypatch.setattr(study_module, "now", lambda: time.time() + ahead[0])
    return lambda: ahead.append(ahead.pop() + 90)


def test_trials_of_a_lost_worker_are_taken_over_with_their_draws(tmp_path, wait):
    lost = open_study(tmp_path, "a").claim(3)
    study = open_study(tmp_path, "b")
    assert len(study.claim(6)) == 3
    wait()
    taken = study.claim(6)
    assert sorted(claim.slot for claim in taken) == list(range(6))
    by_slot = {claim.slot: claim.draw for claim in taken}
    for claim in lost:
        assert by_slot[claim.slot] == claim.draw
    end(study, taken)
    late = open_study(tmp_path, "a")  # the lost one was only slow
    end(late, lost)
    assert late.claim(6) == []
    assert slots(study) == list(range(6))


def test_a_living_worker_is_left_alone(tmp_path, wait):
    busy, study = open_study(tmp_path, "a"), open_study(tmp_path, "b")
    claims = busy.claim(3)
    with busy.heartbeat():
        wait()
        busy.beat()
        assert len(study.claim(6)) == 3
        assert not study.finished()
    end(busy, claims)
    assert len(slots(study)) == 3


def test_a_heartbeat_goes_on_by_itself(tmp_path):
    study = open_study(tmp_path, lost_after=0.1)
    with study.heartbeat():
        first = study.study.user_attrs["worker a"]
        while study.study.user_attrs["worker a"] == first:
            time.sleep(0.01)


def test_a_trial_that_was_lost_between_asking_and_marking_is_not_lost(tmp_path, wait):
    study = open_study(tmp_path)
    study.offer(2)
    study.study.ask()  # killed here: nobody's trial, without a draw
    wait()
    claims = study.claim(6)
    assert sorted(claim.slot for claim in claims) == list(range(6))
    assert all(set(claim.draw) == set(PAPER_SPACE) for claim in claims)


def test_the_same_slot_offered_twice_is_run_once(tmp_path):
    """Two workers may find the same lost trial at the same moment."""
    study = open_study(tmp_path)
    for _ in range(2):
        study.study.enqueue_trial({}, user_attrs={"slot": 0})
    claims = study.claim(10)
    assert sorted(claim.slot for claim in claims) == list(range(6))


def test_trials_that_another_worker_took_first_are_asked_for_again(tmp_path, monkeypatch):
    """Optuna then makes a trial of its own, which belongs to no slot."""
    study = open_study(tmp_path)
    other = open_study(tmp_path, "b")
    other.offer(3)
    offer, calls = study.offer, []

    def late(want):
        waiting = offer(want)
        if not calls:
            calls.append([other.ask() for _ in range(3)])  # between the offer and the asking
        return waiting

    monkeypatch.setattr(study, "offer", late)
    claims = study.claim(6)
    assert sorted(claim.slot for claim in claims) == [3, 4, 5]
    end(study, claims)
    end(other, other.claim(6))
    assert slots(study) == list(range(6))
    assert study.finished()


@pytest.mark.slow
def test_tpe_learns_from_what_is_done(tmp_path):
    study = open_study(tmp_path, slots=60, space={"l2": (1e-8, 1e-2)}, sampler="tpe")
    while claims := study.claim(10):
        for claim in claims:
            study.report({claim.number: -abs(np.log10(claim.draw["l2"]) + 4)}, 10)
            study.tell(claim.number, TrialState.COMPLETE, -abs(np.log10(claim.draw["l2"]) + 4))
    draws = [np.log10(trial.params["l2"]) for trial in study.trials()]
    assert np.mean(np.abs(np.array(draws[30:]) + 4)) < 0.5 * np.mean(np.abs(np.array(draws[:16]) + 4))


def test_other_settings_are_refused(tmp_path):
    open_study(tmp_path)
    with pytest.raises(BadInput, match=r"another search space.*kl 1e-06-2"):
        open_study(tmp_path, space=space_of("meta-sgd"))
    with pytest.raises(BadInput, match="started with steps 10, not 20"):
        open_study(tmp_path, steps=20)


def test_databases_that_cannot_be_had(tmp_path):
    def at(url):
        return Study(url, "x", PAPER_SPACE, {}, slots=1, sampler="random", seed=0, worker="a", lost_after=1.0)

    with pytest.raises(BadInput, match=r"cannot reach the database sqlite.*unable to open"):
        at(f"sqlite:///{tmp_path}/nowhere/study.db")
    with pytest.raises(BadInput, match="not a database URL"):
        at("nonsense")
    with pytest.raises(BadInput, match=r"cannot reach the database postgresql://me:\*\*\*@127.0.0.1:1/x"):
        at("postgresql://me:secret@127.0.0.1:1/x")
    optuna.create_study(storage=f"sqlite:///{tmp_path}/own.db", study_name="x").ask()
    with pytest.raises(BadInput, match="not one of Metaleo's"):
        at(f"sqlite:///{tmp_path}/own.db")


@pytest.fixture
def postgres():
    """A PostgreSQL server of its own, on a local port."""
    programs = sorted([p for p in ("/usr/lib/postgresql",) if os.path.isdir(p)])
    found = [os.path.join(p, v, "bin") for p in programs for v in sorted(os.listdir(p))]
    if not found:
        pytest.skip("PostgreSQL is not installed")
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    folder = Path(tempfile.mkdtemp())  # pytest's own are for one user only
    if as_user:
        shutil.chown(folder, "postgres")
    cluster, port = folder / "data", 20_000 + os.getpid() % 20_000

    def call(program, *arguments):
        subprocess.run([*as_user, f"{found[-1]}/{program}", *arguments], check=True, capture_output=True, cwd="/")

    call("initdb", "-D", str(cluster), "-A", "trust", "-U", "metaleo")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    call("pg_ctl", "-D", str(cluster), "-w", "-o", options, "-l", str(folder / "log"), "start")
    try:
        yield f"postgresql://metaleo@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "-D", str(cluster), "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.mark.slow
def test_two_machines_one_study_and_one_dies(postgres, tmp_path):
    save_data(make_metaset(images=24), tmp_path / "features.npz")
    command = [
        sys.executable, "-m", "metaleo.cli", "search", "--data", str(tmp_path / "features.npz"), "--way", "3",
        "--learner", "meta-sgd", "--trials", "12", "--batch", "4", "--steps", "400", "--validate-every", "50",
        "--validation-tasks", "20", "--storage", postgres, "--lost-after", "3", "--halvings", "1",
    ]  # fmt: skip
    workers = [
        subprocess.Popen([*command, "--out", str(tmp_path / name)], stderr=subprocess.PIPE, text=True) for name in "ab"
    ]
    doomed, survivor = workers

    def running(worker):
        """How many trials this worker has, asked in plain SQL: Optuna would make the tables itself."""
        query = """SELECT count(*) FROM trials JOIN trial_user_attributes a USING (trial_id)
                   WHERE trials.state = 'RUNNING' AND a.key = 'worker' AND a.value_json = %s"""
        with psycopg.connect(postgres) as connection:
            try:
                return connection.execute(query, [f'"{worker}"']).fetchone()[0]
            except psycopg.errors.UndefinedTable:
                return 0

    deadline, name = time.time() + 120, ""
    while time.time() < deadline and not (name and running(name)):
        time.sleep(0.2)
        if (tmp_path / "a" / "worker").is_file():
            name = (tmp_path / "a" / "worker").read_text()
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate()
    assert running(name), "the worker must die in the middle"
    _, said = survivor.communicate(timeout=240)
    assert survivor.returncode == 0, said
    storage = RDBStorage(postgres)
    trials = optuna.load_study(study_name="meta-sgd-3way-1shot", storage=storage).get_trials()
    storage.engine.dispose()
    done = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert sorted(t.user_attrs["slot"] for t in done) == list(range(12))
    assert len({tuple(t.params.values()) for t in done}) == 12
    assert any(t.state == TrialState.FAIL for t in trials)
