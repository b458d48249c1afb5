"""Model files: a learner, what it is, and what is known of it."""

import importlib.resources
from pathlib import Path
from typing import Any, NamedTuple

from metaleo.config import Structure
from metaleo.errors import BadInput
from metaleo.learners.learner import Learner
from metaleo.trees import load_tree, read_header, save_tree

MODELS = ("miniimagenet", "intents", "omniglot", "sines-and-lines")
"""Trained models inside this package, by name."""


class Model(NamedTuple):
    """A trained learner with what is known of it: its structure, configuration and validation merit."""

    learner: Learner
    structure: Structure
    header: dict[str, Any]


def save_model(path: Path, learner: Learner, structure: Structure, header: dict[str, Any]) -> None:
    rows = "l2" if structure.normalised else "none"
    save_tree(path, learner, {"kind": "model", "structure": vars(structure), "normalise": rows, **header})


def embedded_model(name: str) -> Path:
    """Where the model of this name is."""
    if name not in MODELS:
        raise BadInput(f"no model {name!r} in this package; it has {', '.join(MODELS)}")
    return Path(str(importlib.resources.files("metaleo") / "models" / f"{name}.safetensors"))


def load_model(path: Path) -> Model:
    header = read_header(path)
    if header.get("kind") != "model":
        raise BadInput(f"{path} is not a model file")
    try:
        structure = Structure.from_json(header["structure"])
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path} holds a model of an unknown structure: {error}") from error
    return Model(load_tree(path, structure.blank()), structure, header)
