"""Files that are either the old one or the new one, never half of each."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from metaleo.errors import BadInput


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; it takes `path`'s place once it is whole and on the disk.

    A failure (a full disk, say) leaves `path` as it was, and nothing beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # the latter is what safetensors makes of a full disk
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot write {path}: {why}; what was saved before is intact") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Refuse, before any work, a place that cannot be written to; folders on the way there are made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds, nothing if there is none."""
    with contextlib.suppress(OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}
    return {}
