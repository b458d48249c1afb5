"""Model files: a trained learner with its structure and metadata; headers of task files, which are made of them."""

import dataclasses
import difflib
import functools
import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from metaleo._io.files import damaged, load_tree, read_header, save_tree
from metaleo.config.schema import TrainConfig
from metaleo.errors import BadInput, unknown_name
from metaleo.learners.base import Learner
from metaleo.learners.registry import UNTRAINED, UNTRAINED_TEMPERATURES, Structure
from metaleo.tasks.episodes import Prepare, as_they_are
from metaleo.tasks.task import normalise

BUILTIN_MODELS = ("miniimagenet", "miniimagenet-leo", "intents", "omniglot", "sines-and-lines")
"""Names of the trained models in this package."""
SHORT_NAMES = {
    "leo": "LEO",
    "leo-no-finetuning": "LEO, no fine-tuning",
    "leo-deterministic": "LEO, deterministic",
    "leo-random-prior": "LEO, random prior",
    "leo-generator-finetuned": "generator + fine-tuning",
    "leo-generator": "generator",
    "meta-sgd": "Meta-SGD",
    "maml": "MAML",
    "fomaml": "first-order MAML",
    "reptile": "Reptile",
}
"""Short names of learners, for tables and figures."""


class TrainedModel(NamedTuple):
    """A trained learner with its structure and metadata.

    Attributes:
        learner: The learner, with its learned parameters.
        structure: The kind of learner and its sizes.
        header: Metadata from its file: configuration, validation score, classes, temperatures.

    Examples:
        >>> from metaleo import load_model
        >>> load_model("miniimagenet").setting("shot")
        1
    """

    learner: Learner
    structure: Structure
    header: dict[str, Any]

    @property
    def prepare(self) -> Prepare:
        """What is done to vectors before the learner sees them."""
        return self.learner.preparation if self.structure.normalised else as_they_are

    def setting(self, name: str) -> Any:
        """A field of the configuration that the model was trained with."""
        try:
            return self.header["config"][name]
        except KeyError as error:
            raise BadInput(f"the model file does not say with which {name} it was trained") from error

    def temperature(self, shot: float | int) -> float:
        """The temperature that divides the logits, for `shot` examples per class on average.

        Interpolated linearly between the learned shots, in the logarithm of both; 1 for a model without temperatures.
        """
        known = self.header.get("temperatures") or [[1, 1.0]]
        shots, values = np.log(np.asarray(known, np.float64)).T
        return float(np.exp(np.interp(np.log(shot), shots, values)))


def save_model(path: Path, learner: Learner, structure: Structure, header: dict[str, Any]) -> None:
    """Write a model file; `header` is its metadata, stored as JSON."""
    rows = "none" if not structure.normalised else "l2" if learner.preparation is normalise else "whitened"
    save_tree(path, learner, {"kind": "model", "structure": vars(structure), "normalise": rows, **header})


def load_model(model: str | Path) -> TrainedModel:
    """Read a trained model.

    Args:
        model: A model file, a run folder (of several seeds, the first), or the name of a model in this package.

    Returns:
        The learner with its structure and header.

    Examples:
        >>> from metaleo import load_model
        >>> model = load_model("miniimagenet")
        >>> model.structure.learner, model.structure.dim
        ('leo-anchored', 640)
    """
    path = model_paths(Path(model))[0]
    header, structure = read_model_header(path)
    return TrainedModel(load_tree(path, structure.blank()), structure, header)


def read_model_header(path: Path) -> tuple[dict[str, Any], Structure]:
    """The header of a model file, and the structure in it."""
    header = read_header(path)
    if header.get("kind") != "model":
        raise BadInput(f"{path} is not a model file")
    with damaged(path, "model file"):
        structure = Structure.from_json(header.get("structure"))
        structure.blank()  # raises if the parts do not fit together
        if "config" in header:
            TrainConfig.from_json(header["config"])
    return header, structure


def read_task_header(path: Path) -> tuple[dict[str, Any], Structure]:
    """The header of a task file, and the structure in it."""
    header = read_header(path)
    if header.get("kind") != "task":
        hint = "; `metaleo adapt` makes one of it" if header.get("kind") == "model" else ""
        raise BadInput(f"{path} is not a task file{hint}")
    with damaged(path, "task file"):
        missing = [name for name in ("classes", "temperature", "about") if name not in header]
        missing += [f"about.{name}" for name in ("rows", "examples") if name not in header.get("about", {})]
        if missing:
            raise BadInput(f"{missing[0]} is missing")
        structure, classes = Structure.from_json(header.get("structure")), header["classes"]
        if len(classes) < 2 or len(classes) != len(header["about"]["examples"]):
            raise BadInput(f"{len(header['about']['examples'])} counts do not go with {len(classes)} classes")
    return header, structure


@functools.lru_cache(maxsize=8)
def load_cached(path: Path, _modified: int) -> TrainedModel:
    """`load_model` with a cache that is valid until the file is modified."""
    return load_model(path)


def find_model(model: str | Path, dim: int | None = None) -> TrainedModel:
    """A classifier: a model file, a run folder (its first seed), or a model of this package by name.

    The name may also be that of a learner that needs no training, for rows of `dim` numbers.
    """
    if str(model) in UNTRAINED:
        if dim is None:
            raise BadInput(f"{model} is for rows of any length, but of which one is not known yet")
        structure = Structure(learner=str(model), dim=dim)
        header = {"kind": "model", "temperatures": UNTRAINED_TEMPERATURES[str(model)]}
        return TrainedModel(structure.init(jax.random.key(0)), structure, header)
    path = model_paths(Path(model), (*BUILTIN_MODELS, *UNTRAINED))[0]
    found = load_cached(path, path.stat().st_mtime_ns)
    if found.structure.noise is not None:
        raise BadInput(f"{model} predicts numbers; a model of classes is needed")
    return found


def training_config(path: Path, model: TrainedModel) -> TrainConfig:
    """The configuration that the model in this file was trained with; raises `BadInput` if the file has none."""
    if "config" not in model.header:
        raise BadInput(f"{path} does not say with which configuration it was trained")
    return TrainConfig.from_json(model.header["config"])


def builtin_model_path(name: str) -> Path:
    """The path of a model in this package."""
    if name not in BUILTIN_MODELS:
        raise BadInput(f"no model {name!r} in this package; it has {', '.join(BUILTIN_MODELS)}")
    return Path(str(importlib.resources.files("metaleo") / "assets" / "models" / f"{name}.safetensors"))


def model_paths(run: Path, names: Sequence[str] = BUILTIN_MODELS) -> list[Path]:
    """The model files of a path: the file itself, those of a run folder by seed, or a model of this package by name.

    `names` are those that a mistyped one may have meant.
    """
    if run.is_file():
        return [run]
    if str(run) in BUILTIN_MODELS and not run.exists():
        return [builtin_model_path(str(run))]
    if not run.is_dir():
        if difflib.get_close_matches(str(run), names):
            raise unknown_name("model", str(run), names)
        raise BadInput(f"{run} does not exist; give a run folder, a model file or one of {', '.join(names)}")
    found = sorted(run.glob("model*.safetensors"), key=lambda path: (len(path.name), path.name))
    if not found:
        raise BadInput(f"{run} has no model yet: a run saves its first one at its first validation")
    return found


# Several models that are tested together


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A trained model that is tested together with others."""

    name: str
    """Distinguishes it from the other candidates."""
    source: Path
    """The run folder or model that was requested."""
    path: Path
    """Its model file."""
    model: TrainedModel

    @property
    def learner(self) -> Learner:
        return self.model.learner

    @property
    def config(self) -> TrainConfig:
        """The configuration that it was trained with."""
        return training_config(self.path, self.model)


def load_candidates(sources: Sequence[Path], every_seed: bool = True) -> list[Candidate]:
    """Load the models of these runs: all seeds, or only the first of each."""
    if not sources:
        raise BadInput("give a run folder or a model file")
    found: dict[Path, Path] = {}
    for one in sources:
        for path in model_paths(one)[: None if every_seed else 1]:
            found.setdefault(path, one)
    models = {path: load_model(path) for path in found}
    seeds = [f"seed {model.header.get('seed')}" for model in models.values()]
    folders = [source.parent.resolve().name if source.is_file() else source.name for source in found.values()]
    each = [f"{folder} {seed}" for folder, seed in zip(folders, seeds, strict=True)]
    learners = [SHORT_NAMES.get(m.structure.learner, m.structure.learner) for m in models.values()]
    only = len(set(found.values())) == 1
    ways = [seeds if only else [], each] if every_seed else [learners, folders, each]  # the first without duplicates
    names = next((way for way in ways if len(set(way)) == len(models)), [str(path) for path in models])
    return [
        Candidate(name, found[path], path, model) for name, (path, model) in zip(names, models.items(), strict=True)
    ]
