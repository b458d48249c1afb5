"""Reproduce the paper's Table 2: every row by the same plan, on the same features and test tasks.

Stage 2: random search on the train classes, selected by accuracy on the validation classes.
Stage 3: fresh runs with the chosen hyper-parameters on train + validation classes, early stopping on validation tasks.
Test: many tasks of the test classes, the same for every row and seed.

OUT/reproduce.json                     the settings
OUT/<shot>shot/<row>/search/           stage 2 (see search/random_search.py)
OUT/<shot>shot/<row>/final/            stage 3, a run folder of all seeds (see training/run.py) with test scores
OUT/report.md, report.json, report.png, curves-<shot>shot.png
"""

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from scipy import stats

import metaleo
from metaleo._io.files import read_json, write_text
from metaleo._io.progress import SILENT, Progress
from metaleo._io.run_log import owned, read_metrics, remove_results
from metaleo._jax.devices import barrier, fits_on_device, is_first_host
from metaleo.checkpoints import load_model
from metaleo.config.presets import resolve_config
from metaleo.config.schema import TrainConfig
from metaleo.data.metaset import SPLITS, MetaSet
from metaleo.errors import BadInput, require_at_least, require_seed, unknown_name
from metaleo.evaluation.evaluate import Score, load_score, save_score, score_learner, summarise
from metaleo.plotting.figures import plot_curves, plot_reproduction
from metaleo.search.random_search import SearchConfig
from metaleo.search.run_search import run_search
from metaleo.tasks import Episodes
from metaleo.tasks.episodes import check_classes, place_rows
from metaleo.training.run import TrainingRun, create_run_folder, train_with_progress

ROWS = {
    "meta-sgd": "Meta-SGD",
    "leo-generator": "Conditional generator only",
    "leo-generator-finetuned": "Conditional generator + fine-tuning",
    "leo-random-prior": "LEO (random prior)",
    "leo-deterministic": "LEO (deterministic)",
    "leo-no-finetuning": "LEO (no fine-tuning)",
    "leo": "LEO",
}
"""Learners in the order of the paper's Table 2, and their names there."""
PAPER: dict[tuple[str, int], tuple[tuple[float, float], ...]] = {
    ("miniimagenet", 1): (
        (54.24, 0.03), (60.33, 0.11), (60.62, 0.31), (61.01, 0.12), (61.48, 0.05), (61.62, 0.15), (61.76, 0.08)
    ),
    ("miniimagenet", 5): (
        (70.86, 0.04), (74.53, 0.11), (76.42, 0.09), (77.27, 0.05), (76.53, 0.24), (77.46, 0.12), (77.59, 0.12)
    ),
    ("tieredimagenet", 1): (
        (62.95, 0.03), (65.17, 0.15), (65.74, 0.28), (65.39, 0.10), (66.18, 0.17), (66.14, 0.17), (66.33, 0.05)
    ),
    ("tieredimagenet", 5): (
        (79.34, 0.06), (78.77, 0.03), (80.65, 0.07), (80.83, 0.13), (82.06, 0.08), (80.89, 0.11), (81.44, 0.09)
    ),
}  # fmt: skip
"""Test accuracy and its standard deviation over five runs, in %: Table 2 of the paper, one value per row."""
CLASSES = {"miniimagenet": (64, 16, 20), "tieredimagenet": (351, 97, 160)}
"""Numbers of train, validation and test classes in the published splits."""
CLAIMS = (
    ("latent steps help: LEO > conditional generator + fine-tuning", "leo", "leo-generator-finetuned"),
    ("fine-tuning a generated start helps: generator + fine-tuning > generator only",
     "leo-generator-finetuned", "leo-generator"),
    ("generating from the data helps: generator only > Meta-SGD", "leo-generator", "meta-sgd"),
    ("LEO > Meta-SGD", "leo", "meta-sgd"),
    ("encoding the data helps: LEO > LEO with a random prior", "leo", "leo-random-prior"),
    ("sampling helps: LEO > deterministic LEO", "leo", "leo-deterministic"),
    ("fine-tuning after latent steps helps: LEO > LEO without", "leo", "leo-no-finetuning"),
)  # fmt: skip
"""Claims of the paper's Table 2, as differences between rows."""


@dataclasses.dataclass(frozen=True)
class ReproductionPlan:
    """Everything that determines the numbers of a report."""

    dataset: str
    data: str
    trials: int = 64
    search_steps: int = 20_000
    halvings: int = 2
    final_steps: int = 20_000
    patience: int = 20
    validate_every: int = 500
    validation_tasks: int = 1000
    seeds: int = 5
    tasks: int = 50_000
    seed: int = 0
    way: int = 5

    def check(self, metaset: MetaSet, shots: tuple[int, ...], rows: tuple[str, ...]) -> None:
        """Raise `BadInput` for any mistake before training starts."""
        unknown = [row for row in rows if row not in ROWS]
        if unknown:
            raise unknown_name("row", unknown[0], ("all", *ROWS))
        counts = ("trials", "search_steps", "final_steps", "seeds")
        require_at_least(1, **{name: getattr(self, name) for name in counts})
        require_at_least(2, tasks=self.tasks)
        require_seed(self.seed, self.seeds)
        found = tuple(metaset.splits.count(split) for split in SPLITS)
        expected = CLASSES.get(self.dataset, found)
        if found != expected:
            raise BadInput(
                f"{self.dataset} has {'/'.join(map(str, expected))} train/val/test classes, "
                f"but {self.data} has {'/'.join(map(str, found))}"
            )
        for shot in shots:
            for split, query in (("train", TrainConfig.query), ("val", None), ("test", None)):
                check_classes(metaset.subset(split), self.way, shot, query)

    def paper(self, shot: int) -> dict[str, tuple[float, float]]:
        """The paper's numbers for this data set (the sample is a part of miniImageNet) and shot, if it has any."""
        dataset = "miniimagenet" if self.dataset == "sample" else self.dataset
        return dict(zip(ROWS, PAPER.get((dataset, shot), ()), strict=False))

    def search_config(self, row: str, shot: int, dim: int) -> SearchConfig:
        config = resolve_config(
            dim,data=self.data, learner=row, way=self.way, shot=shot, steps=self.search_steps, seed=self.seed,
            validate_every=self.validate_every, validation_tasks=self.validation_tasks,
        )  # fmt: skip
        return SearchConfig(config, self.trials, self.halvings, batch=self.trials)


@dataclasses.dataclass(frozen=True)
class RowResult:
    """Result of a row of the table at one shot."""

    row: str
    seeds: list[float]
    """Test accuracy of each seed, in %."""
    tasks: Float[np.ndarray, " task"]
    """Accuracy on each test task, averaged over seeds."""
    nll: float
    calibration_error: float
    validation: list[float]
    steps: list[int]
    chosen: dict[str, float]
    searched: float
    """Validation accuracy of the chosen trial in stage 2, in %."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.seeds)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.seeds) if len(self.seeds) > 1 else math.nan


def reproduce(
    plan: ReproductionPlan,
    metaset: MetaSet,
    shots: tuple[int, ...],
    rows: tuple[str, ...],
    folder: Path,
    command: str,
    progress: Progress = SILENT,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Run all stages of all rows that are not done yet; then write and return the report."""
    plan.check(metaset, shots, rows)
    if overwrite and is_first_host():
        remove_results(folder, "reproduce.json")
    barrier("folder")
    agree(folder, dataclasses.asdict(plan) | {"data": Path(plan.data).name, "checksum": metaset.checksum()})
    results: dict[int, list[RowResult]] = {shot: [] for shot in shots}
    jobs = [(shot, row) for shot in shots for row in ROWS if row in rows]
    for number, (shot, row) in enumerate(jobs, start=1):
        progress.say(f"[{number}/{len(jobs)}] {ROWS[row]}, {plan.way}-way {shot}-shot")
        results[shot].append(make_row(plan, metaset, folder / f"{shot}shot" / row, row, shot, progress))
    report = to_json(plan, results, command)
    if is_first_host():
        write_report(plan, results, report, folder)
    barrier("report")
    return report


def agree(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings; raise `BadInput` if the folder has others. Processes with equal settings may share it."""
    path = folder / "reproduce.json"
    before = read_json(path)
    for name, value in settings.items() if before else ():
        if before.get(name) != value:
            what = f"{name} {before.get(name)}, not {value}"
            raise BadInput(f"{folder} was made with {what}; replace it with overwrite=True, or choose another `out=`")
    if is_first_host() and not before:
        write_text(path, json.dumps(settings, indent=2) + "\n")
    barrier("settings")


def make_row(
    plan: ReproductionPlan, metaset: MetaSet, folder: Path, row: str, shot: int, progress: Progress
) -> RowResult:
    """Run stages 2 and 3 and the test of one row at one shot."""
    search = plan.search_config(row, shot, metaset.dim)
    trials, best = run_search(search, folder / "search", metaset, progress)
    config = dataclasses.replace(
        best,
        train_on="train+val",
        steps=plan.final_steps,
        patience=plan.patience,
        seeds=plan.seeds,
    )
    final = folder / "final"
    with owned(folder):
        if not (final / "config.json").is_file():
            create_run_folder(final, config, overwrite=False)
        barrier("run folder")
        run = TrainingRun(config, final, metaset)
        train_with_progress(run, f"{row}, {plan.seeds} seeds", progress, "run the same command again to go on")
        rows = place_rows(metaset, fits_on_device(metaset.features.size))
        testing = Episodes.over(metaset.subset("test"), plan.way, shot, None, rows)
        scores = [score_seed(plan, final / run.model_name(seed), testing, seed, progress) for seed in run.seeds]
    models = [load_model(final / run.model_name(seed)) for seed in run.seeds]
    reports = [summarise(score) for score in scores]
    return RowResult(
        row,
        [100 * report.accuracy for report in reports],
        np.mean([np.asarray(score.accuracy, np.float64) for score in scores], axis=0),
        statistics.mean(report.nll for report in reports),
        statistics.mean(report.calibration_error for report in reports),
        [100 * model.header["validation_accuracy"] for model in models],
        [model.header["step"] for model in models],
        trials[0]["draw"],
        100 * trials[0]["accuracy"],
    )


def score_seed(plan: ReproductionPlan, model: Path, testing: Episodes, seed: int, progress: Progress) -> Score:
    """Test scores of one model, read from file if they exist."""
    path = model.with_name(f"test-{seed}.npz")
    score = load_score(path, plan.seed, plan.tasks)
    if score is None:
        with progress.bar(f"test {seed}", plan.tasks) as bar:
            score = score_learner(load_model(model).learner, testing, plan.seed, plan.tasks, bar)
        if is_first_host():
            save_score(path, score, plan.seed)
    return score


def difference(a: RowResult, b: RowResult) -> tuple[float, float]:
    """a - b in percentage points of accuracy, and its 95 % interval over tasks (paired) and seeds (independent)."""
    paired = 100 * (a.tasks - b.tasks)
    over_tasks = 1.96 * float(paired.std(ddof=1)) / math.sqrt(len(paired))
    over_seeds = 0.0
    if min(len(a.seeds), len(b.seeds)) > 1:
        error = math.sqrt(a.deviation**2 / len(a.seeds) + b.deviation**2 / len(b.seeds))
        over_seeds = float(stats.t.ppf(0.975, len(a.seeds) + len(b.seeds) - 2)) * error
    return float(paired.mean()), math.hypot(over_tasks, over_seeds)


def verdict(value: float, interval: float) -> str:
    if value > interval:
        return "holds"
    return "does not hold" if value < -interval else "undecided"


def to_json(plan: ReproductionPlan, results: dict[int, list[RowResult]], command: str) -> dict[str, Any]:
    device = jax.devices()[0]
    shots: dict[str, Any] = {}
    for shot, rows in results.items():
        by_name, paper = {result.row: result for result in rows}, plan.paper(shot)
        shots[str(shot)] = {
            "rows": [
                {
                    "row": result.row,
                    "accuracy": round(result.mean, 3),
                    "deviation": None if math.isnan(result.deviation) else round(result.deviation, 3),
                    "seeds": [round(accuracy, 3) for accuracy in result.seeds],
                    "paper": paper.get(result.row),
                    "minus_paper": round(result.mean - paper[result.row][0], 3) if result.row in paper else None,
                    "minus_leo": [round(x, 3) for x in difference(result, by_name["leo"])]
                    if "leo" in by_name and result.row != "leo" else None,
                    "nll": round(result.nll, 4),
                    "calibration_error": round(result.calibration_error, 4),
                    "stage_2_validation": round(result.searched, 2),
                    "stage_3_validation": [round(accuracy, 2) for accuracy in result.validation],
                    "best_steps": result.steps,
                    "chosen": result.chosen,
                }
                for result in rows
            ],
            "claims": [
                {"claim": claim, "difference": round(value, 3), "interval": round(interval, 3),
                 "paper": round(paper[a][0] - paper[b][0], 2) if paper else None, "verdict": verdict(value, interval)}
                for claim, a, b in CLAIMS if a in by_name and b in by_name
                for value, interval in [difference(by_name[a], by_name[b])]
            ],
        }  # fmt: skip
    return {
        "command": command,
        "plan": dataclasses.asdict(plan) | {"data": Path(plan.data).name},
        "machine": {"device": device.device_kind, "devices": jax.device_count(), "backend": jax.default_backend()},
        "versions": {"metaleo": metaleo.__version__, "jax": jax.__version__},
        "shots": shots,
    }


def write_report(
    plan: ReproductionPlan, results: dict[int, list[RowResult]], report: dict[str, Any], folder: Path
) -> None:
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_text(folder / "report.md", to_markdown(plan, report))
    panels = {
        f"{plan.way}-way {shot}-shot": {
            ROWS[result.row]: (result.mean, result.deviation, plan.paper(shot).get(result.row)) for result in rows
        }
        for shot, rows in results.items()
    }
    plot_reproduction(folder / "report.png", panels)
    for shot, rows in results.items():
        curves = {
            ROWS[result.row]: read_metrics(folder / f"{shot}shot" / result.row / "final" / "metrics.jsonl")
            for result in rows
        }
        title = f"Stage 3, {plan.way}-way {shot}-shot, {plan.seeds} seeds"
        plot_curves(folder / f"curves-{shot}shot.png", curves, title, fields=("validation_accuracy",))


def to_markdown(plan: ReproductionPlan, report: dict[str, Any]) -> str:
    """The report as Markdown."""
    machine, versions = report["machine"], report["versions"]
    lines = [
        f"# Table 2 of the paper on {plan.dataset} features\n",
        f"```sh\n{report['command']}\n```\n",
        f"- features: `{Path(plan.data).name}`; machine: {machine['devices']} × {machine['device']} "
        f"({machine['backend']}); metaleo {versions['metaleo']}, jax {versions['jax']}; seed {plan.seed}",
        f"- stage 2, for each row: random search of {plan.trials} trials × {plan.search_steps:,} meta-steps on "
        f"the train classes (the worse half stopped {plan.halvings} times on the way), by accuracy on "
        f"{plan.validation_tasks:,} validation tasks",
        f"- stage 3: {plan.seeds} fresh runs on train + validation classes, at most {plan.final_steps:,} "
        f"meta-steps, the best by validation accuracy; patience {plan.patience} validations",
        f"- test: {plan.tasks:,} tasks of the test classes, all remaining images as queries, the same tasks for "
        "every row and seed",
        "- ours and the paper's: mean ± standard deviation over runs; differences: ± 95 % over tasks (paired) and runs",
    ]
    if plan.dataset == "sample":
        lines.append(
            "- the sample holds 100 of 600 images per class, of this project's features: the paper's numbers are for "
            "orientation"
        )
    for shot, part in report["shots"].items():
        lines += [
            f"\n## {plan.way}-way {shot}-shot\n",
            "| | test accuracy | the paper | difference to the paper | minus LEO | NLL | calibration error |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for row in part["rows"]:
            spread = "" if row["deviation"] is None else f" ± {row['deviation']:.2f}"
            paper = "–" if row["paper"] is None else f"{row['paper'][0]:.2f} ± {row['paper'][1]:.2f}"
            minus_paper = "–" if row["minus_paper"] is None else f"{row['minus_paper']:+.2f}"
            minus_leo = "–" if row["minus_leo"] is None else "{:+.2f} ± {:.2f}".format(*row["minus_leo"])
            cells = [ROWS[row["row"]], f"{row['accuracy']:.2f}{spread}", paper, minus_paper, minus_leo,
                     f"{row['nll']:.3f}", f"{100 * row['calibration_error']:.1f} %"]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        if part["claims"]:
            lines += ["\n| what the paper's table says | here | in the paper | |", "|---|---:|---:|---|"]
            for claim in part["claims"]:
                paper = "–" if claim["paper"] is None else f"{claim['paper']:+.2f}"
                here = f"{claim['difference']:+.2f} ± {claim['interval']:.2f}"
                lines.append(f"| {claim['claim']} | {here} | {paper} | {claim['verdict']} |")
        names = list(dict.fromkeys(name for row in part["rows"] for name in row["chosen"]))
        lines += [
            "\nChosen hyper-parameters, and validation accuracy in stage 2 and stage 3:\n",
            "| | " + " | ".join(name.replace("_", " ") for name in names) + " | stage 2 | stage 3 | best steps |",
            "|---" * (len(names) + 4) + "|",
        ]
        for row in part["rows"]:
            values = [f"{row['chosen'][name]:.3g}" if name in row["chosen"] else "–" for name in names]
            third = f"{statistics.mean(row['stage_3_validation']):.2f}"
            steps = ", ".join(f"{step:,}" for step in row["best_steps"])
            cells = [ROWS[row["row"]], *values, f"{row['stage_2_validation']:.2f}", third, steps]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
