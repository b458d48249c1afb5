"""Files that are replaced atomically and read without executing their contents: text, JSON, CSV, trees of arrays."""

import contextlib
import csv
import json
import os
import tempfile
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
from metaleo.errors import BadInput

HEADER = "metaleo"
FORMAT = 1


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` to write to; it replaces `path` once it is complete and on the disk.

    A failure, such as a full disk, leaves `path` unchanged and removes the temporary file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # safetensors raises the latter on a full disk
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot write {path}: {why}; what was saved before is intact") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


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
    with contextlib.suppress(OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
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
    try:
        with safetensors.safe_open(path, framework="np") as archive:
            header = json.loads((archive.metadata() or {})[HEADER])
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist") from error
    except (OSError, safetensors.SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise BadInput(f"{path} is truncated, or not a file of Metaleo's") from error
    if header.get("format") != FORMAT:
        raise BadInput(f"{path} has format {header.get('format')}; this version of Metaleo reads {FORMAT}")
    return header


def load_tree(path: Path, like: PyTree, old_names: Mapping[str, str] | None = None) -> PyTree:
    """A tree with the structure of `like` and the leaves in the file, which may use the older names in `old_names`."""
    read_header(path)
    arrays = safetensors.numpy.load_file(path)
    for new, old in (old_names or {}).items():
        if new not in arrays and old in arrays:
            arrays[new] = arrays.pop(old)
    names, (expected, structure) = leaf_names(like), jax.tree.flatten(like)
    for name, leaf in zip(names, expected, strict=True):
        if name not in arrays or arrays[name].shape != leaf.shape:
            found = list(arrays[name].shape) if name in arrays else "nothing"
            raise BadInput(f"{path} does not fit: {name} should be {list(leaf.shape)}, the file has {found}")
    return jax.tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in names])


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file; NumPy floats get six decimals."""
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([f"{cell:.6f}" if isinstance(cell, np.floating) else cell for cell in row] for row in rows)
