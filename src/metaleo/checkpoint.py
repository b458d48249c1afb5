"""Model files: a learner, what it is, and what is known of it."""

from pathlib import Path
from typing import Any, NamedTuple

from metaleo.config import Structure
from metaleo.errors import BadInput
from metaleo.learners.learner import Learner
from metaleo.trees import load_tree, read_header, save_tree


class Model(NamedTuple):
    """A trained learner with what is known of it: its structure, configuration and validation accuracy."""

    learner: Learner
    structure: Structure
    header: dict[str, Any]


def save_model(path: Path, learner: Learner, structure: Structure, header: dict[str, Any]) -> None:
    rows = "l2" if structure.tail is None else "none"
    save_tree(path, learner, {"kind": "model", "structure": vars(structure), "normalise": rows, **header})


def load_model(path: Path) -> Model:
    header = read_header(path)
    if header.get("kind") != "model":
        raise BadInput(f"{path} is not a model file")
    try:
        structure = Structure.from_json(header["structure"])
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path} holds a model of an unknown structure: {error}") from error
    return Model(load_tree(path, structure.blank()), structure, header)
