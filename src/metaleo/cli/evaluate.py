"""`metaleo evaluate`."""

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import RenderableType

from metaleo.cli.common import (
    AsTrained,
    DataOf,
    Runs,
    Switch,
    check_new,
    default_is,
    emit,
    evaluation_table,
    make_table,
    progress,
)
from metaleo.errors import BadInput, require_at_least

if TYPE_CHECKING:
    from metaleo.checkpoints import Candidate
    from metaleo.evaluation.evaluate import Evaluation, TaskSuite


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Test trained models on tasks of unseen classes: accuracy ± 95 % interval, NLL, calibration error.

    NLL and calibration error are those of the probabilities that `predict` gives, with the model's temperature; those
    before the temperature stand behind them. In JSON the former are calibrated_nll and calibrated_error, the latter nll
    and calibration_error; a model without a temperature has only the latter.

    The same seed gives the same tasks to every model. With several seeds in a run, each is tested. Models of sines and
    lines are tested on unseen functions: error of the mean of sampled functions, NLL, CRPS, coverage of 90 % intervals,
    beside an oracle that knows the family and the exact posterior mean (docs/results-functions.md).

    Try:
      metaleo evaluate runs/leo-5way-1shot
      metaleo evaluate runs/leo-5way-1shot --tasks 50000 --json
      metaleo evaluate model.safetensors --data other.npz --way 10 --shot 3
      metaleo evaluate runs/leo-sines-and-lines runs/maml-sines-and-lines
    """

    runs_or_models: Runs
    """Run folders or model files; all are tested on the same tasks."""
    tasks: int = 10_000
    """Test tasks (the paper: 50,000)."""
    data: DataOf = None
    """Data to test on; a table is read as in training, with its --label and --ignore."""
    split: Literal["train", "val", "test", "all"] = "test"
    """Classes to test on; all only where the model has seen none of them."""
    way: AsTrained = None
    """Classes per task."""
    shot: AsTrained = None
    """Labelled examples per class."""
    query: Annotated[int | None, default_is("all others")] = None
    """Query examples per class."""
    seed: int = 0
    """Which tasks."""
    per_task: Annotated[Path | None, default_is("none")] = None
    """Also write every task's scores to this CSV file."""
    baselines: Switch = True
    """Also test nearest centroids and logistic regression, on the same tasks, 500 at most."""
    samples: int = 100
    """Functions sampled for each task of sines and lines."""
    engine: str = "auto"
    """What computes: reference, closed-form, or auto, the fastest one that can."""
    overwrite: Switch = False
    """Replace the file in --per-task."""
    json: Switch = False
    """Print the results as JSON."""

    def run(self) -> None:
        from metaleo.checkpoints import load_candidates
        from metaleo.engines import use_engine
        from metaleo.evaluation.evaluate import TaskSuite

        require_at_least(1, tasks=self.tasks)
        require_at_least(2, samples=self.samples)
        if self.per_task is not None:
            check_new(self.per_task, self.overwrite, ".csv")
        candidates = load_candidates(self.runs_or_models)
        suite = TaskSuite(candidates, self.data, self.way, self.shot)
        with use_engine(self.engine):
            (self.test_functions if suite.problem else self.test_classes)(candidates, suite)

    def test_classes(self, candidates: "list[Candidate]", suite: "TaskSuite") -> None:
        from metaleo.evaluation.evaluate import score_learner, summarise, write_scores

        if self.samples != Evaluate.samples:
            raise BadInput("--samples is for sines and lines; classifiers are tested with their means")
        scores, found = {}, {}
        for one in candidates:
            episodes: Any = suite.tasks(one, "train+val+test" if self.split == "all" else self.split, self.query)
            temperature = one.model.temperature(suite.shot) if one.model.header.get("temperatures") else None
            with progress.bar(one.path.name, self.tasks) as bar:
                score = score_learner(one.learner, episodes, self.seed, self.tasks, bar, temperature=temperature)
            scores[one.name], found[one.name] = score, summarise(score, temperature)
        if self.per_task is not None:
            write_scores(self.per_task, scores)
        result = {
            "data": suite.data, "split": self.split, "way": suite.way, "shot": suite.shot, "query": self.query,
            "seed": self.seed,
            "models": [{"model": str(one.path), "seed": one.model.header.get("seed"), **used_first(found[one.name])}
                       for one in candidates],
        }  # fmt: skip
        title = f"{suite.kind}, {self.tasks:,} {self.split} tasks of {suite.data}, seed {self.seed}"
        shown = [title, *evaluation_table(found)]
        if self.baselines:
            beside = self.test_baselines(suite, {name: score.accuracy for name, score in scores.items()})
            result["beside"] = beside
            shown += list(baseline_table(beside, list(scores)))
        emit(result, self.json, *shown)

    def test_baselines(self, suite: "TaskSuite", accuracies: dict[str, Any]) -> list[dict[str, Any]]:
        """What needs no training on the first of the same tasks, and by how much each model is ahead of it there."""
        from metaleo.evaluation.evaluate import BASELINE_TASKS, mean_and_interval, paired_difference, score_learner

        found, count = [], min(self.tasks, BASELINE_TASKS)
        for one in suite.baselines():
            episodes: Any = suite.tasks(one, "train+val+test" if self.split == "all" else self.split, self.query)
            with progress.bar(one.name, count) as bar:
                own = score_learner(one.learner, episodes, self.seed, count, bar).accuracy
            accuracy, interval = mean_and_interval(own)
            ahead = {name: paired_difference(each[:count], own) for name, each in accuracies.items()}
            ahead = {name: dict(zip(("difference", "interval"), pair, strict=True)) for name, pair in ahead.items()}
            found.append({"name": one.name, "tasks": count, "accuracy": accuracy, "accuracy_interval": interval,
                          "ahead": ahead})  # fmt: skip
        return found

    def test_functions(self, candidates: "list[Candidate]", suite: "TaskSuite") -> None:
        from metaleo.evaluation.regression import evaluate_function_models, write_function_scores

        for name in ("query", "split"):
            if getattr(self, name) != getattr(Evaluate, name):
                suite.refuse_for_problem(name)
        models = {one.name: one.model for one in candidates}
        results, scores = evaluate_function_models(models, suite.shot, self.seed, self.tasks, self.samples, progress)
        if self.per_task is not None:
            write_function_scores(self.per_task, scores)
        settings = {"problem": suite.problem, "shot": suite.shot, "seed": self.seed, "samples": self.samples}
        paths = {one.name: str(one.path) for one in candidates}
        rows = [{"name": name, "model": paths.get(name), **result} for name, result in results.items()]
        title = f"{suite.kind}, {self.tasks:,} tasks, seed {self.seed}"
        emit({**settings, "models": rows}, self.json, title, *function_table(results))


def baseline_table(beside: list[dict[str, Any]], names: list[str]) -> Iterator[RenderableType]:
    """Each baseline, and by how much each model, three at most, is ahead of it on the same tasks."""
    if not beside:
        return
    shown = names[:3]
    headings = [f"beside it, on {beside[0]['tasks']:,} of these tasks", "accuracy"]
    headings += [f"ahead: {name}" for name in shown]
    rows = []
    for own in beside:
        ahead = [own["ahead"][name] for name in shown]
        rows.append([own["name"], f"{100 * own['accuracy']:.2f} ± {100 * own['accuracy_interval']:.2f} %",
                     *(f"{100 * one['difference']:+.2f} ± {100 * one['interval']:.2f}" for one in ahead)])  # fmt: skip
    yield make_table(headings, rows)


def used_first(found: "Evaluation") -> dict[str, Any]:
    """The fields of a result, those with the temperature before those without it."""
    fields = vars(found)
    used = [name for name in fields if name == "temperature" or name.startswith("calibrated")]
    first = ["accuracy", "accuracy_interval", *used]
    return {name: fields[name] for name in dict.fromkeys([*first, *fields])}


def function_table(results: dict[str, dict[str, Any]]) -> Iterator[RenderableType]:
    """Errors, likelihood and coverage of each model of functions; over several seeds of a run, also their mean."""
    rows = []
    for name, row in results.items():
        spread = row["spread"] > 1e-6
        rows.append((
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
        ))  # fmt: skip
    yield make_table(
        ("", "MSE", "sines", "lines", "NLL", "CRPS", "cover", "calibr.", "rank\ncorr.", "both\nkinds"), rows
    )
    yield "±: 95 %; cover: of 90 % intervals, as they are and calibrated"
    for run in sorted({name.rpartition("seed ")[0] for name in results if "seed " in name}):
        errors = [row["mse"] for name, row in results.items() if name.startswith(f"{run}seed ")]
        if len(errors) > 1:
            mean, deviation = statistics.mean(errors), statistics.stdev(errors)
            yield f"{run}MSE over {len(errors)} seeds: {mean:.3f} ± {deviation:.3f} (mean ± standard deviation)"
