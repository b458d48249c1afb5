"""Quickstart: LEO, Meta-SGD and nearest centroids on the same tasks, with real features from the package."""

from pathlib import Path

from metaleo._io.progress import SILENT, Progress
from metaleo._io.run_log import read_metrics
from metaleo.checkpoints import load_model
from metaleo.config.presets import resolve_config
from metaleo.data.feature_files import load_data
from metaleo.evaluation.evaluate import Evaluation, score_learner, summarise
from metaleo.learners import Learner, NearestCentroid
from metaleo.plotting.figures import plot_curves
from metaleo.tasks.episodes import Episodes
from metaleo.training.run import TrainingRun, create_run_folder, train_with_progress


def quickstart(
    out: Path, steps: int, tasks: int, seed: int, overwrite: bool = False, progress: Progress = SILENT
) -> dict[str, Evaluation]:
    """Train and test each learner, and return the evaluations. Models, metrics and a figure are saved in `out`."""
    metaset = load_data("sample")
    runs: dict[str, TrainingRun] = {}
    for learner, title in (("meta-sgd", "Meta-SGD"), ("leo", "LEO")):
        every = max(1, min(500, steps // 4))
        config = resolve_config(
            metaset.dim, learner=learner, steps=steps, seed=seed, validate_every=every, validation_tasks=500
        )
        runs[title] = TrainingRun(config, out / learner, metaset)
        create_run_folder(out / learner, config, overwrite)
    progress.say(f"miniImageNet features in this package: {metaset.describe()}")
    learners: dict[str, Learner] = {"nearest centroid": NearestCentroid()}
    for title, run in runs.items():
        train_with_progress(run, title, progress, f"go on with:\n  metaleo train --resume --out {run.folder}")
        learners[title] = load_model(run.folder / "model.safetensors").learner
    testing = Episodes.over(metaset.subset("test"), 5, 1, None)
    found = {}
    for title, learner in learners.items():
        with progress.bar(f"testing {title}", tasks) as bar:
            found[title] = summarise(score_learner(learner, testing, seed, tasks, bar))
    curves = {title: read_metrics(run.folder / "metrics.jsonl") for title, run in runs.items()}
    plot_curves(out / "learning-curves.png", curves, "Meta-training on the embedded sample, 5-way 1-shot")
    return found
