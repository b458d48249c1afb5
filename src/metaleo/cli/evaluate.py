"""`metaleo evaluate`."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich import box
from rich.table import Table

from metaleo.cli.common import Int, Place, Text, console, flag, json_safe, print_evaluations, progress
from metaleo.errors import BadInput

if TYPE_CHECKING:
    from metaleo.checkpoints import Candidate
    from metaleo.evaluation.evaluate import TaskSuite


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
        from metaleo.checkpoints import load_candidates
        from metaleo.engines import use_engine
        from metaleo.evaluation.evaluate import TaskSuite

        if self.tasks < 1:
            raise BadInput(f"tasks={self.tasks} must be at least 1")
        if self.samples is not None and self.samples < 2:
            raise BadInput(f"samples={self.samples} must be at least 2")
        candidates = load_candidates(self.runs_or_models)
        suite = TaskSuite(candidates, self.data, self.way, self.shot)
        with use_engine(self.engine):
            (self.test_functions if suite.problem else self.test_classes)(candidates, suite)

    def test_classes(self, candidates: "list[Candidate]", suite: "TaskSuite") -> None:
        from metaleo.evaluation.evaluate import score_learner, summarise, write_scores

        if self.samples is not None:
            raise BadInput("--samples is for sines and lines; classifiers are tested with their means")
        split = self.split or "test"
        scores = {}
        for one in candidates:
            episodes: Any = suite.tasks(one, "train+val+test" if split == "all" else split, self.query)
            with progress.bar(one.path.name, self.tasks) as bar:
                scores[one.name] = score_learner(one.learner, episodes, self.seed, self.tasks, bar)
        found = {name: summarise(score) for name, score in scores.items()}
        if self.per_task is not None:
            write_scores(self.per_task, scores)
        print_evaluations(f"{suite.kind}, {self.tasks:,} {split} tasks of {suite.data}, seed {self.seed}", found)
        if self.json:
            result = {
                "data": suite.data, "split": split, "way": suite.way, "shot": suite.shot, "query": self.query,
                "seed": self.seed,
                "models": [{"model": str(one.path), "seed": one.model.header["seed"], **vars(found[one.name])}
                           for one in candidates],
            }  # fmt: skip
            print(json.dumps(json_safe(result), indent=2))

    def test_functions(self, candidates: "list[Candidate]", suite: "TaskSuite") -> None:
        from metaleo.evaluation.regression import evaluate_function_models, write_function_scores

        for name in ("query", "split"):
            if getattr(self, name) is not None:
                suite.refuse_for_problem(name)
        samples = self.samples or 100
        models = {one.name: one.model for one in candidates}
        results, scores = evaluate_function_models(models, suite.shot, self.seed, self.tasks, samples, progress)
        if self.per_task is not None:
            write_function_scores(self.per_task, scores)
        print_functions(f"{suite.kind}, {self.tasks:,} tasks, seed {self.seed}", results)
        if self.json:
            settings = {"problem": suite.problem, "shot": suite.shot, "seed": self.seed, "samples": samples}
            paths = {one.name: str(one.path) for one in candidates}
            rows = [{"name": name, "model": paths.get(name), **result} for name, result in results.items()]
            print(json.dumps(json_safe({**settings, "models": rows}), indent=2))


def print_functions(title: str, results: dict[str, dict[str, Any]]) -> None:
    console.print(f"\n{title} (±: 95 %; cover: 90 % intervals, as they are and calibrated)", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, collapse_padding=True)
    for heading in ("", "MSE", "sines", "lines", "NLL", "CRPS", "cover", "calibr.", "rank\ncorr.", "both\nkinds"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, row in results.items():
        spread = row["spread"] > 1e-6
        table.add_row(
            name,
            f"{row['mse']:.3f} ± {row['mse_interval']:.3f}",
            f"{row['sine_mse']:.3f}",
            f"{row['line_mse']:.3f}",
            f"{row['nll']:.2f}",
            f"{row['crps']:.3f}",
            f"{100 * row['coverage']:.1f} %",
            f"{100 * row['calibrated_coverage']:.1f} %" if spread else "–",
            f"{row['rank_correlation']:.2f}" if spread else "–",
            f"{100 * row['both_families']:.0f} %" if spread and row["sine_shares"] else "–",
        )
    console.print(table)
    for run in sorted({name.rpartition("seed ")[0] for name in results if "seed " in name}):
        errors = [row["mse"] for name, row in results.items() if name.startswith(f"{run}seed ")]
        if len(errors) > 1:
            mean, deviation = statistics.mean(errors), statistics.stdev(errors)
            console.print(
                f"{run}MSE over {len(errors)} seeds: {mean:.3f} ± {deviation:.3f} (mean ± standard deviation)"
            )
