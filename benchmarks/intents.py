"""A meta-trained LEO against nearest centroids and scikit-learn's logistic regression on intents of unseen domains.

`python benchmarks/intents.py RUN intents.json` with the folder of a run on `--data intents`. All see the same tasks,
those of `metaleo evaluate --seed 0`. The C of logistic regression is chosen for each kind of task on validation tasks.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
from sklearn.linear_model import LogisticRegression

from metaleo.checkpoints import load_model
from metaleo.data import load_data
from metaleo.evaluation.evaluate import mean_and_interval, score_learner, task_key
from metaleo.experiments.compare import paired_difference
from metaleo.learners import NearestCentroid
from metaleo.tasks import Batch, Episodes
from metaleo.tasks.episodes import place_rows

CHOICES = (1.0, 10.0, 100.0, 1000.0)


def regress(episodes: Episodes, tasks: int, inverse: float, seed: int = 0) -> np.ndarray:
    """The accuracy of logistic regression on each task; `inverse` is its C."""
    draw, accuracies = jax.jit(Episodes.sample), []
    for index in range(tasks):
        task = draw(episodes, jax.random.fold_in(task_key(seed), index))
        model = LogisticRegression(C=inverse, max_iter=1000).fit(*present(task.support))
        accuracies.append(model.score(*present(task.query)))
    return np.array(accuracies)


def present(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels, without the padding (in a query, the examples that are in the support)."""
    mask = np.asarray(batch.mask)
    return np.asarray(batch.inputs)[mask], np.asarray(batch.targets).argmax(1)[mask]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--way", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--shot", type=int, nargs="+", default=[1, 3, 5, 10])
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--validation-tasks", type=int, default=200)
    flags = parser.parse_args()
    intents, model = load_data("intents"), load_model(flags.run / "model.safetensors")
    rows = []
    for way in flags.way:
        for shot in flags.shot:
            validation, test = (
                Episodes.over(intents.subset(split), way, shot, None, place_rows(intents)) for split in ("val", "test")
            )
            validation_scores = {
                choice: float(regress(validation, flags.validation_tasks, choice).mean()) for choice in CHOICES
            }
            best = max(validation_scores, key=lambda choice: validation_scores[choice])
            accuracies = {
                "leo": score_learner(model.learner, test, 0, flags.tasks).accuracy,
                "nearest-centroid": score_learner(NearestCentroid(), test, 0, flags.tasks).accuracy,
                "logistic-regression": regress(test, flags.tasks, best),
            }
            for name, values in accuracies.items():
                accuracy, interval = mean_and_interval(values)
                ahead, ahead_interval = paired_difference(accuracies["leo"], values)
                rows.append({"way": way, "shot": shot, "learner": name, "accuracy": accuracy, "interval": interval,
                             "leo_ahead_by": ahead, "leo_ahead_by_interval": ahead_interval})  # fmt: skip
                print(f"{way}-way {shot}-shot {name}: {accuracy:.2%} ± {interval:.2%}, "
                      f"LEO ahead by {ahead:+.2%} ± {ahead_interval:.2%}", flush=True)  # fmt: skip
            rows[-1] |= {"C": best, "validation_accuracy_by_C": validation_scores}
    settings = {"tasks": flags.tasks, "validation_tasks": flags.validation_tasks, "seed": 0}
    results = {"settings": settings, "run": model.header["config"], "best_step": model.header["step"], "results": rows}
    flags.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
