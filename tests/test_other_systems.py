"""Windows and macOS lack some of what Linux has: the main commands do without it."""

import subprocess
import sys

import pytest

from helpers.commands import SMALL
from helpers.small import make_metaset
from metaleo._jax import devices
from metaleo.data import save_data
from metaleo.serve.reader import limit_memory

HIDDEN = """
import os, signal, subprocess, sys
import equinox, jax, matplotlib.pyplot, optax, pyarrow.csv, rich.progress, scipy.stats, sklearn, tyro  # built for Linux

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it fails
for name in ("sysconf", "geteuid", "getuid", "sched_getaffinity", "fork", "fchmod", "uname"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM", "pthread_kill"):
    delattr(signal, name)

from metaleo.cli import main
for command in COMMANDS:
    main(command)
"""


@pytest.mark.slow
def test_the_main_commands_without_what_only_unix_has(tmp_path):
    save_data(make_metaset(), tmp_path / "features.npz")
    header = "label," + ",".join(f"x{i}" for i in range(8))
    rows = [f"{'ab'[i % 2]}," + ",".join(str((i + j) % 5) for j in range(8)) for i in range(6)]
    (tmp_path / "support.csv").write_text("\n".join([header, *rows]))
    commands = [
        ["train", "--data", "features.npz", "--learner", "prototypical", *SMALL, "--out", "run"],
        ["train", "--resume", "--out", "run", "--steps", "6"],
        ["evaluate", "run", "--tasks", "4", "--no-baselines"],
        ["adapt", "run", "support.csv", "--out", "task.safetensors"],
        ["predict", "task.safetensors", "support.csv", "--out", "predictions.csv"],
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore:flock not supported", "-c", f"COMMANDS = {commands!r}\n{HIDDEN}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "predictions.csv").is_file()


@pytest.mark.parametrize("problem", [AttributeError, ValueError, OSError])
def test_memory_that_the_system_does_not_tell(monkeypatch, problem):
    """On macOS `os.sysconf` may not know the number of pages."""

    def unknown(name):
        raise problem(name)

    monkeypatch.setattr("os.sysconf", unknown)
    assert devices.memory_bytes() > 0


def test_without_owners_of_files_no_compiled_program_is_kept(monkeypatch):
    """What is in the cache is executed, so that nobody else may write there."""
    monkeypatch.delattr("os.geteuid")
    assert devices.private_cache_folder("compiled") is None


def test_the_reader_of_uploads_starts_where_memory_cannot_be_limited(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    limit_memory(1)
