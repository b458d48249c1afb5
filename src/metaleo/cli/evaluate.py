"""`metaleo evaluate`."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from metaleo.cli.common import Int, Place, Text, flag, print_reports, score_with_progress
from metaleo.config import PROBLEMS, TrainConfig
from metaleo.errors import BadInput

if TYPE_CHECKING:
    from metaleo.checkpoint import Model

UNSPEAKABLE = (float("inf"), -float("inf"))
"""Numbers that JSON does not know, besides NaN."""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Test trained models on tasks of unseen classes: accuracy ± 95 % interval, NLL, calibration error.

    The same seed gives the same tasks to every model. With several seeds in a run, each is tested. Models of sines and
    lines are tested on unseen functions: error of the mean of sampled functions, NLL, CRPS, coverage of 90 % intervals,
    beside an oracle that knows the family and the exact posterior mean (docs/regression.md).

    Try:
      metaleo evaluate runs/leo-5way-1shot
      metaleo evaluate runs/leo-5way-1shot --tasks 50000 --json
      metaleo evaluate model.safetensors --data other.npz --way 10 --shot 3
      metaleo evaluate runs/leo-sines-and-lines runs/maml-sines-and-lines
    """

    runs_or_models: Annotated[tuple[Path, ...], tyro.conf.Positional, flag("RUN")]
    """Run folders or model files; all are tested on the same tasks."""
    tasks: int = 10_000
    """Test tasks (the paper: 50,000)."""
    data: Text = None
    """Features to test on (those that the model was trained with)."""
    split: Annotated[Literal["train", "val", "test"] | None, flag("{train,val,test}")] = None
    """Classes to test on (test)."""
    way: Int = None
    """Classes per task (as in training)."""
    shot: Int = None
    """Labelled examples per class (as in training)."""
    query: Int = None
    """Query examples per class (all the rest)."""
    seed: int = 0
    """Which tasks."""
    per_task: Place = None
    """Also write every task's scores to this CSV file."""
    samples: Int = None
    """Functions sampled for each task of sines and lines (100)."""
    json: bool = False
    """Print the results as JSON on standard output."""

    def run(self) -> None:
        from metaleo import runs
        from metaleo.checkpoint import load_model

        if self.tasks < 1:
            raise BadInput(f"--tasks must be at least 1, not {self.tasks}")
        if self.samples is not None and self.samples < 2:
            raise BadInput(f"--samples must be at least 2, not {self.samples}")
        if not self.runs_or_models:
            raise BadInput("give a run folder or a model file")
        folders = {path: one for one in self.runs_or_models for path in runs.model_paths(one)}
        models = {path: load_model(path) for path in folders}
        names = name_models(folders, models)
        trained = {path: TrainConfig.from_json(model.header["config"]) for path, model in models.items()}
        if len({config.data if config.data in PROBLEMS else "" for config in trained.values()}) > 1:
            raise BadInput("models of different problems cannot be tested on the same tasks")
        for name in ("data", "way", "shot"):
            values = {getattr(config, name) for config in trained.values()}
            if len(values) > 1 and getattr(self, name) is None:
                raise BadInput(f"the runs were trained with different --{name}; say with which to test")
        config = next(iter(trained.values()))
        (self.test_functions if config.data in PROBLEMS else self.test_classes)(names, models, config)

    def test_classes(self, names: list[str], models: "dict[Path, Model]", trained: TrainConfig) -> None:
        from metaleo import data
        from metaleo.data.rows import place
        from metaleo.evaluation import summarise, write_scores
        from metaleo.tasks import Episodes

        if self.samples is not None:
            raise BadInput("--samples is for sines and lines; classifiers are tested with their means")
        source, split = self.data or trained.data, self.split or "test"
        metaset = data.load(source)
        way = trained.way if self.way is None else self.way
        shot = trained.shot if self.shot is None else self.shot
        rows = {}
        scores = {}
        for name, (path, model) in zip(names, models.items(), strict=True):
            if metaset.dim != model.structure.dim:
                raise BadInput(
                    f"{source} has {metaset.dim} numbers per example, but {path} was trained on {model.structure.dim}"
                )
            if model.structure.codes == "task" and way != model.structure.way:
                raise BadInput(f"{path} has one code for all {model.structure.way} classes; --way cannot be {way}")
            normalised = model.structure.normalised
            if normalised not in rows:
                rows[normalised] = place(metaset, normalised=normalised)
            episodes = Episodes.over(metaset.subset(split), way, shot, self.query, rows[normalised])
            scores[name] = score_with_progress(model.learner, episodes, self.seed, self.tasks, path.name)
        reports = {name: summarise(score) for name, score in scores.items()}
        if self.per_task is not None:
            write_scores(self.per_task, scores)
        title = f"{way}-way {shot}-shot, {self.tasks:,} {split} tasks of {source}, seed {self.seed}"
        print_reports(title, reports)
        if self.json:
            result = {
                "data": source, "split": split, "way": way, "shot": shot, "query": self.query, "seed": self.seed,
                "models": [{"model": str(path), "seed": model.header["seed"], **vars(report)}
                           for (path, model), report in zip(models.items(), reports.values(), strict=True)],
            }  # fmt: skip
            print(json.dumps(result, indent=2))

    def test_functions(self, names: list[str], models: "dict[Path, Model]", trained: TrainConfig) -> None:
        from metaleo.sines_and_lines import judge_models, print_functions, write_function_scores

        for name in ("data", "way", "query", "split"):
            if getattr(self, name) is not None:
                raise BadInput(f"--{name} means nothing to {trained.data}")
        shot = trained.shot if self.shot is None else self.shot
        samples = self.samples or 100
        named = dict(zip(names, models.values(), strict=True))
        results, scores = judge_models(named, shot, self.seed, self.tasks, samples)
        if self.per_task is not None:
            write_function_scores(self.per_task, scores)
        print_functions(f"{shot}-shot {trained.data}, {self.tasks:,} tasks, seed {self.seed}", results)
        if self.json:
            settings = {"problem": trained.data, "shot": shot, "seed": self.seed, "samples": samples}
            places = {name: str(path) for name, path in zip(named, models, strict=True)}
            rows = [
                {"name": name, "model": places.get(name)}
                | {field: None if value in UNSPEAKABLE or value != value else value for field, value in result.items()}
                for name, result in results.items()
            ]
            print(json.dumps({**settings, "models": rows}, indent=2))


def name_models(folders: dict[Path, Path], models: "dict[Path, Model]") -> list[str]:
    """What tells the models apart: their seeds, and where there are several runs what they were asked for by."""
    seeds = [f"seed {model.header['seed']}" for model in models.values()]
    if len(set(folders.values())) == 1:
        return seeds
    names = [f"{folder.name} {seed}" for folder, seed in zip(folders.values(), seeds, strict=True)]
    return names if len(set(names)) == len(names) else [str(path) for path in models]
