"""`metaleo quickstart`: LEO, Meta-SGD and nearest centroids on the same tasks of real, embedded features."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console

from metaleo import data
from metaleo.checkpoint import load_model
from metaleo.cli.common import print_reports, score_with_progress, train_with_progress
from metaleo.cli.train import Train
from metaleo.data.rows import place
from metaleo.evaluation import summarise
from metaleo.figures import plot_curves
from metaleo.journal import read_metrics
from metaleo.learners import NearestCentroid
from metaleo.runs import Run, prepare
from metaleo.tasks import Episodes

if TYPE_CHECKING:
    from metaleo.cli.quickstart import Quickstart


def quickstart(options: "Quickstart", say: Console) -> dict[str, Any]:
    """Train, test, compare; what `--json` prints."""
    metaset = data.load_sample()
    testing = Episodes.over(metaset.subset("test"), 5, 1, None, place(metaset))
    runs: dict[str, Run] = {}
    for learner, title in (("meta-sgd", "Meta-SGD"), ("leo", "LEO")):
        every = max(1, min(500, options.steps // 4))
        flags = Train(
            learner=learner,
            steps=options.steps,
            seed=options.seed,
            validate_every=every,
            validation_tasks=500,
        )
        config = flags.resolve(metaset.dim)
        runs[title] = Run(config, options.out / learner, metaset)
        prepare(options.out / learner, config, options.overwrite)
    say.print(f"miniImageNet features in this package: {metaset.describe()}")
    learners: dict[str, Any] = {"nearest centroid": NearestCentroid()}
    for title, run in runs.items():
        train_with_progress(run, title)
        learners[title] = load_model(run.folder / "model.safetensors").learner
    curves = {title: read_metrics(run.folder / "metrics.jsonl") for title, run in runs.items()}
    reports = {
        title: summarise(score_with_progress(learner, testing, options.seed, options.tasks, f"testing {title}"))
        for title, learner in learners.items()
    }
    print_reports(
        f"5-way 1-shot, the same {options.tasks:,} tasks of 20 unseen classes ({jax.default_backend()})",
        reports,
    )
    figure = options.out / "learning-curves.png"
    plot_curves(figure, curves, "Meta-training on the embedded sample, 5-way 1-shot")
    say.print(
        f"models and metrics: {options.out}/leo, {options.out}/meta-sgd\nfigure: {figure}\n\nnext:\n"
        f"  metaleo evaluate {options.out}/leo --way 10 --shot 5   # another kind of task\n"
        "  metaleo train --shot 5                # a 5-shot LEO\n"
        "  metaleo train --data features.npz     # your own features (metaleo train --help)",
        soft_wrap=True,
    )
    return {
        "tasks": options.tasks,
        "seed": options.seed,
        "steps": options.steps,
        "results": {title: dataclasses.asdict(report) for title, report in reports.items()},
    }
