"""The folder of a long run: its configuration and metrics log, and a clean stop on signals."""

import contextlib
import json
import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from metaleo._io.files import write_text
from metaleo.errors import BadInput

Record = dict[str, Any]


def claim_run_folder(folder: Path, config: dict[str, Any], overwrite: bool) -> None:
    """Create the folder of a new run, and write its configuration there."""
    config_path = folder / "config.json"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not overwrite:
            raise BadInput(f"{folder} exists; continue it with resume=True or replace it with overwrite=True")
        remove_results(folder, config_path.name)
    write_text(config_path, json.dumps(config, indent=2) + "\n")


def remove_results(folder: Path, marker: str) -> None:
    """Remove a folder of results to make room for new ones; a folder without the file `marker` holds something else."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / marker).is_file():
            raise BadInput(f"{folder} holds something else (it has no {marker}), which overwrite=True does not replace")
        shutil.rmtree(folder)


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
    """A list that becomes non-empty when SIGINT or SIGTERM arrives; a second Ctrl-C raises KeyboardInterrupt."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
