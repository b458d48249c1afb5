"""Files that are replaced atomically and read without executing their contents: text, JSON, CSV, trees of arrays."""

import contextlib
import csv
import json
import os
import re
import reprlib
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import PyTree
from safetensors import SafetensorError

import metaleo
from metaleo._io.json_values import Header, from_json, parse_json
from metaleo.errors import BadInput, one_line

HEADER = "metaleo"
FORMAT = 1
STALE = 3600.0
"""Seconds after which the temporary file of a killed process may be removed."""
WINDOWS = os.name == "nt"


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` to write to; it replaces `path` once it is complete and on the disk.

    A failure, such as a full disk, leaves `path` unchanged and removes the temporary file; one that a killed process
    left behind is removed when the same file is written again, after `STALE` seconds.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path)
        open(temporary, "xb").close()  # ours, for the name cannot be guessed, and readable to whom the umask says
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        replace(temporary, path)
    except (OSError, SafetensorError) as error:  # safetensors raises the latter on a full disk
        why = getattr(error, "strerror", None) or error
        if WINDOWS and isinstance(error, PermissionError):
            why = f"{why} (another program has it open, or its data are in use here)"
        raise BadInput(f"cannot write {path}: {why}; what was saved before is intact") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_stale(path: Path) -> None:
    """Remove temporary files of this one that have not been written to for `STALE` seconds."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.(\d+|[0-9a-f]{{16}})\.tmp")  # version 0.1 put the process's number
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if ours.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > STALE:
                os.unlink(entry.path)


def replace(temporary: Path, path: Path) -> None:
    """Rename; Windows refuses while a file is open or mapped, which is often over soon."""
    for pause in (0.1, 0.4, 1.6) if WINDOWS else ():
        try:
            os.replace(temporary, path)
        except PermissionError:
            time.sleep(pause)
        else:
            return
    os.replace(temporary, path)


def check_writable(path: Path) -> None:
    """Raise `BadInput`, before any work, if `path` cannot be written; missing parent folders are created."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file; empty if it is missing or invalid."""
    with contextlib.suppress(OSError, BadInput):
        values = parse_json(path.read_bytes())
        return values if isinstance(values, dict) else {}
    return {}


def leaf_names(tree: PyTree) -> list[str]:
    """The path to each leaf, such as `encoder.weight`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def save_tree(path: Path, tree: PyTree, header: dict[str, Any]) -> None:
    """Save the leaves of a tree by name, with a header in JSON."""
    arrays = {name: np.asarray(leaf) for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}
    versions = {"metaleo": metaleo.__version__, "jax": jax.__version__}
    text = json.dumps({"format": FORMAT, **header, "versions": versions})
    with atomic_write(path) as temporary:
        safetensors.numpy.save_file(arrays, temporary, {HEADER: text})


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file that `save_tree` wrote; the fields that `Header` names have its types."""
    try:
        with safetensors.safe_open(path, framework="np") as archive:
            text = (archive.metadata() or {})[HEADER]
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist") from error
    except (OSError, SafetensorError, KeyError) as error:
        raise BadInput(f"{path} is truncated, or not a file of Metaleo's") from error
    with damaged(path, "file"):
        header = parse_json(text)
        if not isinstance(header, dict):
            raise BadInput("its header is not an object")
    if header.get("format") != FORMAT:
        raise BadInput(
            f"{path} has format {reprlib.repr(header.get('format'))}; this version of Metaleo reads {FORMAT}"
        )
    kind = header.get("kind")
    with damaged(path, f"{kind} file" if kind in ("model", "task", "network") else "file"):
        from_json(Header, header)
    return header


@contextlib.contextmanager
def damaged(path: Path, kind: str) -> Iterator[None]:
    """Where the parts of a file are checked: say which file it is whose part is wrong."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{path} is a damaged {kind} ({error})") from error


def load_tree(path: Path, like: PyTree, old_names: Mapping[str, str] | None = None) -> PyTree:
    """A tree with the structure of `like` and the leaves in the file, which may use the older names in `old_names`."""
    read_header(path)
    try:
        arrays = safetensors.numpy.load_file(path)
    except Exception as error:  # types of numbers that NumPy does not have raise anything
        raise BadInput(f"{path} is a damaged file ({one_line(error)})") from error
    for new, old in (old_names or {}).items():
        if new not in arrays and old in arrays:
            arrays[new] = arrays.pop(old)
    names, (expected, structure) = leaf_names(like), jax.tree.flatten(like)
    for name, leaf in zip(names, expected, strict=True):
        if name not in arrays or arrays[name].shape != leaf.shape:
            found = list(arrays[name].shape) if name in arrays else "nothing"
            raise BadInput(f"{path} does not fit: {name} should be {list(leaf.shape)}, the file has {found}")
        if not same_numbers(arrays[name].dtype, leaf.dtype):
            raise BadInput(f"{path} does not fit: {name} should be {leaf.dtype}, the file has {arrays[name].dtype}")
    return jax.tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in names])


def stored_names(path: Path) -> frozenset[str]:
    """The names of the leaves in a file that `save_tree` wrote."""
    read_header(path)
    with safetensors.safe_open(path, framework="np") as archive:
        return frozenset(archive.keys())


def same_numbers(found: np.dtype, expected: np.dtype) -> bool:
    """Whether it is the same type, up to single or double precision: that depends on a setting of JAX."""
    return found == expected or (found.kind == expected.kind and found.itemsize >= 4)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file; NumPy floats get six decimals."""
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([f"{cell:.6f}" if isinstance(cell, np.floating) else cell for cell in row] for row in rows)
