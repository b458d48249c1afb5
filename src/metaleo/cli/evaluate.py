"""`metaleo evaluate`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from metaleo.cli.common import Int, Place, Text, print_reports, score_with_progress
from metaleo.config import TrainConfig
from metaleo.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Test a trained model on tasks of unseen classes: accuracy ± 95 % interval, NLL, calibration error.

    The same seed gives the same tasks to every model. With several seeds in a run, each is tested.

    Try:
      metaleo evaluate runs/leo-5way-1shot
      metaleo evaluate runs/leo-5way-1shot --tasks 50000 --json
      metaleo evaluate model.safetensors --data other.npz --way 10 --shot 3
    """

    run_or_model: Annotated[Path, tyro.conf.Positional]
    """Run folder, or a model file."""
    tasks: int = 10_000
    """Test tasks (the paper: 50,000)."""
    data: Text = None
    """Features to test on (those that the model was trained with)."""
    split: Literal["train", "val", "test"] = "test"
    """Classes to test on."""
    way: Int = None
    """Classes per task (as in training)."""
    shot: Int = None
    """Labelled examples per class (as in training)."""
    query: Int = None
    """Query examples per class (all the rest)."""
    seed: int = 0
    """Which tasks."""
    per_task: Place = None
    """Also write every task's accuracy and NLL to this CSV file."""
    json: bool = False
    """Print the results as JSON on standard output."""

    def run(self) -> None:
        from metaleo import data, runs
        from metaleo.checkpoint import load_model
        from metaleo.data.rows import place
        from metaleo.evaluation import summarise, write_scores
        from metaleo.tasks import Episodes

        if self.tasks < 1:
            raise BadInput(f"--tasks must be at least 1, not {self.tasks}")
        paths = runs.model_paths(self.run_or_model)
        models = [load_model(path) for path in paths]
        trained = TrainConfig.from_json(models[0].header["config"])
        source = self.data or trained.data
        metaset = data.load(source)
        if metaset.dim != models[0].structure.dim:
            raise BadInput(
                f"{source} has {metaset.dim} numbers per example, but "
                f"{paths[0]} was trained on {models[0].structure.dim}"
            )
        way = trained.way if self.way is None else self.way
        shot = trained.shot if self.shot is None else self.shot
        rows = place(metaset, normalised=models[0].structure.tail is None)
        episodes = Episodes.over(metaset.subset(self.split), way, shot, self.query, rows)
        scores = {}
        for path, model in zip(paths, models, strict=True):
            scores[model.header["seed"]] = score_with_progress(
                model.learner, episodes, self.seed, self.tasks, path.name
            )
        reports = {seed: summarise(score) for seed, score in scores.items()}
        if self.per_task is not None:
            write_scores(self.per_task, scores)
        title = f"{way}-way {shot}-shot, {self.tasks:,} {self.split} tasks of {source}, seed {self.seed}"
        print_reports(title, {f"seed {seed}": report for seed, report in reports.items()})
        if self.json:
            result = {
                "data": source, "split": self.split, "way": way, "shot": shot, "query": self.query, "seed": self.seed,
                "models": [{"model": str(path), "seed": seed, **vars(report)}
                           for path, (seed, report) in zip(paths, reports.items(), strict=True)],
            }  # fmt: skip
            print(json.dumps(result, indent=2))
