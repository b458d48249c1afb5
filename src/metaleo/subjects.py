"""Trained models to be looked at, and the tasks to look at them with: the same ones for all of them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from metaleo import data, runs
from metaleo.checkpoint import Model, load_model
from metaleo.config import PROBLEMS, TrainConfig
from metaleo.data.rows import Rows, place
from metaleo.errors import BadInput
from metaleo.learners import Learner
from metaleo.predictive import QUERY
from metaleo.tasks import Episodes, Tasks

NAMES = {
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
"""Learners, where there is little room."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A trained model, what tells it from the others, and the run or model that was asked for."""

    name: str
    place: Path
    path: Path
    model: Model
    config: TrainConfig

    @property
    def learner(self) -> Learner:
        return self.model.learner


def load_subjects(places: Sequence[Path], every_seed: bool = True) -> list[Subject]:
    """The models of these runs: all seeds, or the first of each."""
    if not places:
        raise BadInput("give a run folder or a model file")
    found: dict[Path, Path] = {}
    for one in places:
        for path in runs.model_paths(one)[: None if every_seed else 1]:
            found.setdefault(path, one)
    models = {path: load_model(path) for path in found}
    configs = [TrainConfig.from_json(model.header["config"]) for model in models.values()]
    seeds = [f"seed {model.header['seed']}" for model in models.values()]
    folders = [place.parent.resolve().name if place.is_file() else place.name for place in found.values()]
    each = [f"{folder} {seed}" for folder, seed in zip(folders, seeds, strict=True)]
    learners = [NAMES.get(config.structure.learner, config.structure.learner) for config in configs]
    only = len(set(found.values())) == 1
    ways = [seeds if only else [], each] if every_seed else [learners, folders, each]  # the first that tells them apart
    names = next((way for way in ways if len(set(way)) == len(models)), [str(path) for path in models])
    return [
        Subject(name, found[path], path, model, config)
        for name, (path, model), config in zip(names, models.items(), configs, strict=True)
    ]


class Bench:
    """What the subjects agree on, unless it is given: data or problem, way and shot; and tasks of it."""

    def __init__(
        self, subjects: Sequence[Subject], data_name: str | None = None, way: int | None = None, shot: int | None = None
    ):
        asked = {"data": data_name, "way": way, "shot": shot}
        if len({one.config.data if one.config.data in PROBLEMS else "" for one in subjects}) > 1:
            raise BadInput("models of different problems cannot be tested on the same tasks")
        config = subjects[0].config
        self.problem = config.data if config.data in PROBLEMS else None
        for name, value in asked.items():
            if value is None and len({getattr(one.config, name) for one in subjects}) > 1:
                raise BadInput(f"the runs were trained with different --{name}; say with which to test")
            if value is not None and name != "shot":
                self.refuse_for_functions(name)
        self.data = data_name or config.data
        self.way = config.way if way is None else way
        self.shot = config.shot if shot is None else shot
        self.metaset = None if self.problem else data.load(self.data)
        self._rows: dict[bool, Rows] = {}

    def refuse_for_functions(self, flag: str) -> None:
        if self.problem:
            raise BadInput(f"--{flag} means nothing to {self.problem}")

    def refuse_trained(self, subject: Subject, split: str) -> None:
        """Nobody is tested on classes of the same file that it was trained on, even if the file has changed."""
        assert self.metaset is not None
        trained = set(subject.model.header.get("classes", ())) & set(self.metaset.subset(split).class_names)
        if trained and self.data == subject.config.data:
            raise BadInput(
                f"{subject.path} was trained on class {min(trained)} of {self.data}"
                + ("" if "train" in split else ": its classes have been split in another way since")
            )

    @property
    def kind(self) -> str:
        """Of task, in words."""
        return f"{self.shot}-shot {self.problem}" if self.problem else f"{self.way}-way {self.shot}-shot"

    def tasks(self, subject: Subject, split: str = "test", query: int | None = None) -> Tasks:
        """Tasks as this subject takes them; `query` examples per class, or all the rest."""
        if self.metaset is None:
            return PROBLEMS[self.data](self.shot, QUERY if query is None else query)
        structure, path = subject.model.structure, subject.path
        if self.metaset.dim != structure.dim:
            raise BadInput(
                f"{self.data} has {self.metaset.dim} numbers per example, but {path} was trained on {structure.dim}"
            )
        if structure.codes == "task" and self.way != structure.way:
            raise BadInput(f"{path} has one code for all {structure.way} classes; --way cannot be {self.way}")
        if "test" in split:
            self.refuse_trained(subject, split)
        if structure.normalised not in self._rows:
            self._rows[structure.normalised] = place(self.metaset, normalised=structure.normalised)
        return Episodes.over(self.metaset.subset(split), self.way, self.shot, query, self._rows[structure.normalised])
