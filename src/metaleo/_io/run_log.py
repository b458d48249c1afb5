"""The folder of a long run: its configuration and metrics log, and a clean stop on signals."""

import contextlib
import json
import math
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import jax

from metaleo._io.files import write_text
from metaleo.errors import BadInput, Interrupted

Record = dict[str, Any]
LOCK = ".lock"
"""The lock of a folder's owner; it stays when the owner has gone."""
TEMPORARY = ".*.tmp"
"""What `atomic_write` calls a file that is not complete yet."""


def claim_run_folder(folder: Path, config: dict[str, Any], overwrite: bool) -> None:
    """Create the folder of a new run, and write its configuration there."""
    check_run_folder(folder, overwrite)  # before a lock is put there
    with owned(folder):
        check_run_folder(folder, overwrite)  # another process may have been faster
        remove_results(folder, CONFIG)
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


CONFIG = "config.json"


def check_run_folder(folder: Path, overwrite: bool) -> None:
    """Raise `BadInput` if a new run cannot have this folder."""
    if not is_free(folder) and not overwrite:
        raise BadInput(f"{folder} exists; continue it with resume=True or replace it with overwrite=True")
    require_ours(folder, CONFIG)


def is_free(folder: Path) -> bool:
    """Whether there is no such folder, or nothing in it but locks and what a kill left half-written."""
    if not folder.is_dir():
        return not folder.exists()
    try:
        return all(path.name == LOCK or path.match(TEMPORARY) for path in folder.iterdir())
    except OSError as error:
        raise BadInput(f"cannot read {folder}: {error.strerror}") from error


def require_ours(folder: Path, marker: str) -> None:
    """Raise `BadInput` if the folder holds something else than results of ours, which have a file `marker`."""
    if not is_free(folder) and not (folder / marker).is_file():
        raise BadInput(f"{folder} holds something else (it has no {marker}), which overwrite=True does not replace")


def remove_results(folder: Path, marker: str) -> None:
    """Remove the results in a folder to make room for new ones, unless another process is at work on a part of them.

    The file `marker` goes last: what a kill leaves in between can be removed by the next attempt.
    """
    require_ours(folder, marker)
    for lock in folder.rglob(LOCK):
        with owned(lock.parent):
            pass
    found = list(folder.iterdir()) if folder.is_dir() else []
    try:
        for path in sorted(found, key=lambda path: path.name == marker):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"cannot replace {folder}: {error.strerror}") from error


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Be the only process, and thread, that writes in a folder, which is created; reading is free.

    The owner may own it again, inside. The system releases the lock when the process ends, however it ends.
    """
    if jax.process_index() != 0:  # the first host writes for all
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / LOCK, is_singleton=True).acquire(timeout=0)
    except filelock.Timeout as error:
        raise BadInput(f"another process is at work in {folder}; wait for it, or choose another `out=`") from error
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}") from error
    with lock:
        for path in folder.glob(TEMPORARY):  # of a process that was killed
            path.unlink(missing_ok=True)
        yield


def finite_or_none(value: Any) -> float | None:
    number = float(value)
    return round(number, 6) if math.isfinite(number) else None


class MetricsLog:
    """Writes metrics.jsonl. On resume, lines after the saved step are dropped, because they will be written again."""

    def __init__(self, path: Path, step: int):
        self.path = path
        if jax.process_index() != 0:
            return
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, records: list[Record]) -> None:
        if jax.process_index() != 0:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in records))
        except OSError as error:
            raise BadInput(f"cannot write {self.path}: {error.strerror}; what was saved before is intact") from error


def read_metrics(path: Path) -> list[Record]:
    """All complete lines of a metrics file; a killed run may have left a partial line at the end."""
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
    return records


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that becomes non-empty when SIGINT or SIGTERM arrives; a second Ctrl-C does not wait for the next save.

    A signal that came too late for the body to look at the list raises `Interrupted` at its end. Outside the main
    thread, where Python handles no signals, none is noted.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, previous[signal.SIGINT])

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    try:
        for number in numbers:
            signal.signal(number, note)
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        raise Interrupted
