"""Trees of arrays as files: safetensors with a JSON header, read without running anything, replaced atomically."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import PyTree

import metaleo
from metaleo.errors import BadInput
from metaleo.files import replacing

HEADER = "metaleo"
FORMAT = 1


def leaf_names(tree: PyTree) -> list[str]:
    """`encoder.weight` and so on: the path to each leaf."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def save_tree(path: Path, tree: PyTree, header: dict[str, Any]) -> None:
    """The leaves of a tree by name, and a header in JSON."""
    arrays = {name: np.asarray(leaf) for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}
    versions = {"metaleo": metaleo.__version__, "jax": jax.__version__}
    text = json.dumps({"format": FORMAT, **header, "versions": versions})
    with replacing(path) as temporary:
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


def load_tree(path: Path, like: PyTree) -> PyTree:
    """A tree of the same structure as `like`, with the leaves in the file."""
    read_header(path)
    arrays = safetensors.numpy.load_file(path)
    names, (expected, structure) = leaf_names(like), jax.tree.flatten(like)
    for name, leaf in zip(names, expected, strict=True):
        if name not in arrays or arrays[name].shape != leaf.shape:
            found = list(arrays[name].shape) if name in arrays else "nothing"
            raise BadInput(f"{path} does not fit: {name} should be {list(leaf.shape)}, the file has {found}")
    return jax.tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in names])
