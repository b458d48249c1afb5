"""`metaleo quickstart`: LEO, Meta-SGD and nearest centroids on the same tasks of real, embedded features."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console

from metaleo import data
from metaleo.checkpoint import load_model
from metaleo.cli import Train, print_reports, score_with_progress, train_with_progress
from metaleo.data.rows import place
from metaleo.evaluation import summarise
from metaleo.figures import plot_curves
from metaleo.learners import NearestCentroid
from metaleo.runs import Run, prepare, read_metrics
from metaleo.tasks import Episodes

if TYPE_CHECKING:
    from metaleo.cli import Quickstart


def quickstart(options: "Quickstart", say: Console) -> dict[str, Any]:
    """Train, test, compare; what `--json` prints."""
    metaset = data.load_sample()
    say.print(f"miniImageNet features in this package: {metaset.describe()}")
    testing = Episodes.over(metaset.subset("test"), 5, 1, None, place(metaset))
    learners: dict[str, Any] = {"nearest centroid": NearestCentroid()}
    curves = {}
    for learner, title in (("meta-sgd", "Meta-SGD"), ("leo", "LEO")):
        every = max(1, min(500, options.steps // 4))
        config = Train(
            learner=learner, steps=options.steps, seed=options.seed, validate_every=every, validation_tasks=500
        ).resolve(metaset.dim)
        folder = options.out / learner
        run = Run(config, folder, metaset)
        prepare(folder, config, options.overwrite)
        train_with_progress(run, title)
        learners[title] = load_model(folder / "model.safetensors").learner
        curves[title] = read_metrics(folder / "metrics.jsonl")
    reports = {
        title: summarise(score_with_progress(learner, testing, options.seed, options.tasks, f"testing {title}"))
        for title, learner in learners.items()
    }
    print_reports(
        f"5-way 1-shot, the same {options.tasks:,} tasks of 20 unseen classes ({jax.default_backend()})", reports
    )
    figure = options.out / "learning-curves.png"
    plot_curves(figure, curves, "Meta-training on the embedded sample, 5-way 1-shot")
    say.print(
        f"models and metrics: {options.out}/leo, {options.out}/meta-sgd · figure: {figure}\n"
        "next:\n"
        f"  metaleo evaluate {options.out}/leo --way 10 --shot 5     # the same model, another kind of task\n"
        "  metaleo train --shot 5                                 # a 5-shot LEO\n"
        "  metaleo train --data features.npz                      # your own features; see `metaleo train --help`"
    )
    return {
        "tasks": options.tasks,
        "seed": options.seed,
        "steps": options.steps,
        "results": {title: dataclasses.asdict(report) for title, report in reports.items()},
    }
