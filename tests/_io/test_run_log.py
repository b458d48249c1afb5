"""Run folders: one owner at a time, and whatever a kill leaves can be used again. Stop signals are never lost."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from helpers.small import message
from metaleo._io.run_log import claim_run_folder, owned, remove_results, stop_signals
from metaleo.errors import BadInput, Interrupted

OWNER = """
import sys
from pathlib import Path
from metaleo._io.run_log import owned
with owned(Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that owns tmp_path / "run"."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        yield process
        process.kill()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_before_the_first_rename_leaves_a_folder_that_can_be_used(tmp_path, overwrite):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".config.json.4711.tmp").write_text('{"dat')
    claim_run_folder(folder, {"data": "sample"}, overwrite)
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize("removed", range(4))
def test_a_kill_while_results_are_removed_leaves_a_folder_that_can_be_overwritten(tmp_path, monkeypatch, removed):
    folder = tmp_path / "run"
    claim_run_folder(folder, {"steps": 1}, overwrite=False)
    for name in ("a", "metrics.jsonl", "state.safetensors"):
        (folder / name).write_text("results")
    left = list(range(removed))

    def kill_at_last(path, missing_ok=False):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        os.remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill_at_last)
        with pytest.raises(KeyboardInterrupt):
            remove_results(folder, "config.json")
    claim_run_folder(folder, {"steps": 2}, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.json"]


def test_an_owner_removes_what_was_left_half_written(tmp_path):
    """Also one that goes on with what is there."""
    (tmp_path / "state.safetensors").write_text("results")
    (tmp_path / ".state.safetensors.0123456789abcdef.tmp").write_text("half")
    with owned(tmp_path):
        assert not list(tmp_path.glob(".*.tmp"))
    assert (tmp_path / "state.safetensors").is_file()


def test_what_is_not_ours_is_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(BadInput):
            claim_run_folder(tmp_path, {}, overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_one_owner_at_a_time(tmp_path, owner):
    folder = tmp_path / "run"
    assert "another process is at work in" in message(lambda: claim_run_folder(folder, {}, overwrite=False))
    (folder / "config.json").write_text("{}")
    assert "another process is at work in" in message(lambda: claim_run_folder(folder, {}, overwrite=True))
    assert (folder / "config.json").read_text() == "{}"
    (tmp_path / "reproduce.json").write_text("{}")
    assert "another process is at work in" in message(lambda: remove_results(tmp_path, "reproduce.json"))
    assert (folder / "config.json").is_file()
    owner.kill()  # and with it goes the lock
    owner.wait()
    with owned(folder), owned(folder):  # the owner may own it again
        pass


def test_two_threads_are_two_owners(tmp_path):
    said = []
    with owned(tmp_path):
        thread = threading.Thread(target=lambda: said.append(message(lambda: claim_run_folder(tmp_path, {}, False))))
        thread.start()
        thread.join()
    assert "another process is at work" in said[0]


def test_a_signal_that_comes_too_late_for_the_last_look_still_counts():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted), stop_signals():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_no_signals_are_handled():
    seen = []

    def work():
        with stop_signals() as asked_to_stop:
            seen.append(asked_to_stop)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[]]
