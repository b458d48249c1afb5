"""Quickstart: LEO, anchored LEO, Meta-SGD and two classifiers without training, on the same tasks of real features."""

from pathlib import Path

from metaleo._io.progress import SILENT, Progress
from metaleo._io.run_log import read_metrics
from metaleo.checkpoints import load_model
from metaleo.config.presets import resolve_config
from metaleo.data.feature_files import load_data
from metaleo.evaluation.calibration import calibrate_model
from metaleo.evaluation.evaluate import Evaluation, score_learner, summarise
from metaleo.learners import Learner, LogisticRegression, NearestCentroid
from metaleo.learners.registry import ANCHORED, UNTRAINED_TEMPERATURES
from metaleo.plotting.figures import plot_curves
from metaleo.tasks.episodes import Episodes, Rows, place_rows
from metaleo.training.run import TrainingRun, create_run_folder, train_with_progress

TRAINED = {"meta-sgd": "Meta-SGD", "leo": "LEO", ANCHORED: "anchored LEO"}
SHORTER = 20
"""Steps of LEO for one of anchored LEO, which starts near its end."""
VALIDATION_TASKS = 200


def quickstart(
    out: Path, steps: int, tasks: int, seed: int, overwrite: bool = False, progress: Progress = SILENT
) -> dict[str, Evaluation]:
    """Train and test each learner, and return the evaluations. Models, metrics and a figure are saved in `out`."""
    metaset = load_data("sample")
    runs: dict[str, TrainingRun] = {}
    for learner, title in TRAINED.items():
        own = max(1, steps // SHORTER) if learner == ANCHORED else steps
        config = resolve_config(
            metaset.dim, learner=learner, ways=None, shots=None, steps=own, seed=seed,
            validate_every=max(1, min(500, own // 3)), validation_tasks=VALIDATION_TASKS,
        )  # fmt: skip
        runs[title] = TrainingRun(config, out / learner, metaset)
        create_run_folder(out / learner, config, overwrite)
    progress.say(f"miniImageNet features in this package: {metaset.describe()}")
    plain = place_rows(metaset)
    learners: dict[str, tuple[Learner, Rows]] = {
        "nearest centroid": (NearestCentroid(), plain),
        "logistic regression": (LogisticRegression(), plain),
    }
    names = {"nearest centroid": "nearest-centroid", "logistic regression": "logistic-regression"}
    temperatures = {title: UNTRAINED_TEMPERATURES[name][0][1] for title, name in names.items()}
    for title, run in runs.items():
        train_with_progress(run, title, progress, f"go on with:\n  metaleo train --resume --out {run.folder}")
        model = run.folder / "model.safetensors"
        temperatures[title] = calibrate_model(model, run.calibration, (1,))[0][1]
        learners[title] = load_model(model).learner, run.calibration.rows
    found = {}
    for title, (learner, rows) in learners.items():
        testing = Episodes.over(metaset.subset("test"), 5, 1, None, rows)
        with progress.bar(f"testing {title}", tasks) as bar:
            score = score_learner(learner, testing, seed, tasks, bar, temperature=temperatures[title])
        found[title] = summarise(score, temperatures[title])
    curves = {title: read_metrics(run.folder / "metrics.jsonl") for title, run in runs.items()}
    plot_curves(out / "learning-curves.png", curves, "Meta-training on the embedded sample, 5-way 1-shot")
    return found
