"""`metaleo evaluate`."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from metaleo.cli.common import Int, Place, Text, flag, print_reports, score_with_progress, speakable
from metaleo.errors import BadInput

if TYPE_CHECKING:
    from metaleo.subjects import Bench, Subject


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
    split: Annotated[Literal["train", "val", "test", "all"] | None, flag("{train,val,test,all}")] = None
    """Classes to test on; all only where the model has seen none of them (test)."""
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
    engine: str = "auto"
    """What computes (see `metaleo train --help`)."""
    json: bool = False
    """Print the results as JSON on standard output."""

    def run(self) -> None:
        from metaleo.engines import use_engine
        from metaleo.subjects import Bench, load_subjects

        if self.tasks < 1:
            raise BadInput(f"--tasks must be at least 1, not {self.tasks}")
        if self.samples is not None and self.samples < 2:
            raise BadInput(f"--samples must be at least 2, not {self.samples}")
        subjects = load_subjects(self.runs_or_models)
        bench = Bench(subjects, self.data, self.way, self.shot)
        with use_engine(self.engine):
            (self.test_functions if bench.problem else self.test_classes)(subjects, bench)

    def test_classes(self, subjects: "list[Subject]", bench: "Bench") -> None:
        from metaleo.evaluation import summarise, write_scores

        if self.samples is not None:
            raise BadInput("--samples is for sines and lines; classifiers are tested with their means")
        split = self.split or "test"
        scores = {}
        for one in subjects:
            episodes = bench.tasks(one, "train+val+test" if split == "all" else split, self.query)
            scores[one.name] = score_with_progress(one.learner, episodes, self.seed, self.tasks, one.path.name)
        reports = {name: summarise(score) for name, score in scores.items()}
        if self.per_task is not None:
            write_scores(self.per_task, scores)
        print_reports(f"{bench.kind}, {self.tasks:,} {split} tasks of {bench.data}, seed {self.seed}", reports)
        if self.json:
            result = {
                "data": bench.data, "split": split, "way": bench.way, "shot": bench.shot, "query": self.query,
                "seed": self.seed,
                "models": [{"model": str(one.path), "seed": one.model.header["seed"], **vars(reports[one.name])}
                           for one in subjects],
            }  # fmt: skip
            print(json.dumps(speakable(result), indent=2))

    def test_functions(self, subjects: "list[Subject]", bench: "Bench") -> None:
        from metaleo.sines_and_lines import judge_models, print_functions, write_function_scores

        for name in ("query", "split"):
            if getattr(self, name) is not None:
                bench.refuse_for_functions(name)
        samples = self.samples or 100
        models = {one.name: one.model for one in subjects}
        results, scores = judge_models(models, bench.shot, self.seed, self.tasks, samples)
        if self.per_task is not None:
            write_function_scores(self.per_task, scores)
        print_functions(f"{bench.kind}, {self.tasks:,} tasks, seed {self.seed}", results)
        if self.json:
            settings = {"problem": bench.problem, "shot": bench.shot, "seed": self.seed, "samples": samples}
            places = {one.name: str(one.path) for one in subjects}
            rows = [{"name": name, "model": places.get(name), **result} for name, result in results.items()]
            print(json.dumps(speakable({**settings, "models": rows}), indent=2))
