"""One anchored LEO for all ways and shots, beside learners that users have already: accuracy on unseen classes.

    python benchmarks/matrix.py features.npz matrix.json --seeds 5 --tasks 10000
    python benchmarks/matrix.py sample matrix.json --steps 10 --tasks 20    # a try

For every way and shot, all learners see the same test tasks, with 15 queries per class if there are so many. Anchored
LEO is trained with each seed; each of these models takes an equal share of the tasks. "Ahead" is the mean difference
on the same tasks, ± 1.96 standard errors over tasks; "by seed" lists it for each model. Logistic regression is
scikit-learn's, on rows of length one, with C from 1, 10 and 100 by validation tasks of the same way and shot; as it is
slow, it may see fewer tasks (--regression-tasks). Tasks of twenty ways are a quarter as many as those of five, which
gives them intervals as narrow. The other learners are trained once, on 5-way 5-shot tasks (--learner
names more of them). Everything is chosen on validation classes.
"""

import argparse
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from metaleo._jax.devices import use_all_cores
from metaleo.checkpoints import TrainedModel, load_model
from metaleo.config.presets import resolve_config
from metaleo.config.schema import TrainConfig
from metaleo.data import load_data
from metaleo.data.metaset import MetaSet
from metaleo.evaluation.evaluate import mean_and_interval, paired_difference, score_learner, task_key
from metaleo.experiments.compare import make_untrained
from metaleo.learners.registry import ANCHORED, LEARNERS, UNTRAINED, Structure
from metaleo.tasks.episodes import Episodes, place_rows
from metaleo.training.baselines import present
from metaleo.training.run import TrainingRun, create_run_folder

OTHERS = ("nearest-centroid", "cl2n", "ridge", "prototypical", "matching")
STRENGTHS = (1.0, 10.0, 100.0)
CHOICE_TASKS = 20
QUERY = 15
Cell = tuple[int, int]


def train(learner: str, data: str, metaset: MetaSet, folder: Path, steps: int | None, seed: int) -> TrainedModel:
    if learner in UNTRAINED:
        structure = Structure(learner=learner, dim=metaset.dim)
        config = TrainConfig(data=data, steps=0, structure=structure)
        make_untrained(metaset, folder / "model.safetensors", config)
        return load_model(folder / "model.safetensors")
    given = {} if learner == ANCHORED else {"shot": 5, "steps": 500, "validate_every": 125, "validation_tasks": 100}
    given |= {} if steps is None else {"steps": steps, "validate_every": steps}
    config = resolve_config(metaset.dim, data=data, learner=learner, seed=seed, **given)
    run = TrainingRun(config, folder / "run", metaset)
    create_run_folder(folder / "run", config, overwrite=False)
    state = run.train(lambda records: None)
    anchor = "" if run.anchor_score is None else f", its anchor {run.anchor_score:.2%}"
    reached = f"validation {float(state.best_score[0]):.2%} at step {int(state.best_step[0])}{anchor}"
    print(f"{learner}, seed {seed}: {reached}", flush=True)
    return load_model(folder / "run" / "model.safetensors")


def number(tasks: int, cell: Cell, parts: int) -> int:
    """Tasks of each part of a cell: the fewer, the more ways they have."""
    return max(tasks * 5 // max(cell[0], 5) // parts, 2)


def kind(metaset: MetaSet, cell: Cell) -> tuple[int, int, int] | None:
    """Way, shot and queries of a cell, or None if there are too few classes or examples for it."""
    way, shot = cell
    query = min(QUERY, int(metaset.counts.min()) - shot)
    return None if way > len(metaset.counts) or query < 5 else (way, shot, query)


def score(model: TrainedModel, metaset: MetaSet, unseen: MetaSet, numbers: dict[Cell, int], part: int) -> dict:
    """The accuracy on each task of this part of each cell; `numbers` says how many."""
    placed, found = place_rows(metaset, prepare=model.prepare), {}
    for cell, tasks in numbers.items():
        episodes = Episodes.over(unseen, *(kind(unseen, cell) or ()), placed)
        found[cell] = np.asarray(score_learner(model.learner, episodes, part, tasks).accuracy)
    return found


def regress(episodes: Episodes, part: int, tasks: int, inverse: float) -> np.ndarray:
    """The accuracy of logistic regression on each task of this part; `inverse` is its C."""
    draw, accuracies = jax.jit(Episodes.sample), []
    with threadpool_limits(1):  # more threads only wait for each other in problems as small as these
        for index in range(tasks):
            task = draw(episodes, jax.random.fold_in(task_key(part), index))
            model = LogisticRegression(C=inverse, max_iter=1000).fit(*present(task.support))
            accuracies.append(model.score(*present(task.query)))
    return np.array(accuracies)


def best_regression(metaset: MetaSet, unseen: MetaSet, cell: Cell, parts: int, tasks: int) -> tuple[float, list]:
    """C by validation tasks, and the accuracy on each task of each part."""
    placed, validation = place_rows(metaset), metaset.subset("val")
    most = (min(cell[0], len(validation.counts)), min(cell[1], int(validation.counts.min()) - 5))
    choosing = Episodes.over(validation, *(kind(validation, most) or ()), placed)
    best = max(STRENGTHS, key=lambda one: regress(choosing, parts, CHOICE_TASKS, one).mean())
    testing = Episodes.over(unseen, *(kind(unseen, cell) or ()), placed)
    return best, [regress(testing, part, tasks, best) for part in range(parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--split", default="test", choices=("val", "test"))
    parser.add_argument("--way", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--shot", type=int, nargs="+", default=[1, 5, 10, 20])
    parser.add_argument("--tasks", type=int, default=10_000, help="of five ways; of twenty, a quarter")
    parser.add_argument("--regression-tasks", type=int, help="of logistic regression; by default --tasks")
    parser.add_argument("--steps", type=int, help="of every learner; by default its own")
    parser.add_argument("--seeds", type=int, default=1, help="of leo-anchored")
    parser.add_argument("--learner", nargs="+", default=list(OTHERS), choices=LEARNERS, help="to compare with")
    flags = parser.parse_args()
    use_all_cores()
    metaset = load_data(flags.data)
    unseen = metaset.subset(flags.split)
    cells = [(way, shot) for way in flags.way for shot in flags.shot if kind(unseen, (way, shot))]
    parts, few = range(flags.seeds), flags.regression_tasks or flags.tasks
    numbers = {cell: number(flags.tasks, cell, flags.seeds) for cell in cells}
    found: dict[str, list[dict]] = {}
    for name in (*flags.learner, ANCHORED):
        model = None
        for part in parts:
            if model is None or name == ANCHORED:
                with tempfile.TemporaryDirectory() as folder:
                    model = train(name, flags.data, metaset, Path(folder), flags.steps, part)
            found.setdefault(name, []).append(score(model, metaset, unseen, numbers, part))
    rows = []
    for cell in cells:
        own = [each[cell] for each in found[ANCHORED]]
        slower = number(few, cell, flags.seeds)
        strength, regression = best_regression(metaset, unseen, cell, flags.seeds, slower)
        others = {name: [each[cell] for each in found[name]] for name in flags.learner}
        others["logistic-regression"] = regression
        row = {"way": cell[0], "shot": cell[1]}
        accuracy, interval = mean_and_interval(np.concatenate(own))
        rows.append({**row, "learner": ANCHORED, "accuracy": accuracy, "interval": interval})
        for name, values in others.items():
            pairs = [paired_difference(ours[: len(theirs)], theirs) for ours, theirs in zip(own, values, strict=True)]
            same = np.concatenate([ours[: len(theirs)] for ours, theirs in zip(own, values, strict=True)])
            ahead, ahead_interval = paired_difference(same, np.concatenate(values))
            accuracy, interval = mean_and_interval(np.concatenate(values))
            rows.append({**row, "learner": name, "accuracy": accuracy, "interval": interval, "ahead": ahead,
                         "ahead_interval": ahead_interval, "by_seed": [mean for mean, _ in pairs],
                         "tasks": len(same)})  # fmt: skip
        rows[-1]["C"] = strength
        nearest = min(rows[-len(others) :], key=lambda row: row["ahead"])
        told = f"ahead of {nearest['learner']} by {nearest['ahead']:+.2%} ± {nearest['ahead_interval']:.2%}"
        print(f"{cell[0]}-way {cell[1]}-shot: {np.mean(own):.2%}, {told}, of all others by more", flush=True)
    settings = {"data": Path(flags.data).name, "split": flags.split, "tasks": flags.tasks,
                "steps": flags.steps, "seeds": flags.seeds, "device": jax.devices()[0].device_kind}  # fmt: skip
    flags.out.write_text(json.dumps({"settings": settings, "results": rows}, indent=2) + "\n", encoding="utf-8")
    print(tables(rows))


def tables(rows: list[dict]) -> str:
    """Markdown: accuracies by learner and shot, and in brackets by how much anchored LEO is ahead; a table per way."""
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        shots = list(dict.fromkeys(row["shot"] for row in own))
        lines += ["", f"| {way}-way | " + " | ".join(f"{shot} shot{'s' * (shot > 1)}" for shot in shots) + " |"]
        lines += ["|---" * (1 + len(shots)) + "|"]
        for name in dict.fromkeys(row["learner"] for row in own):
            each = [next(row for row in own if (row["learner"], row["shot"]) == (name, shot)) for shot in shots]
            cells = [name, *(describe(row) for row in each)]
            lines.append("| " + " | ".join(f"**{cell}**" if name == ANCHORED else cell for cell in cells) + " |")
    return "\n".join(lines)


def describe(row: dict) -> str:
    accuracy = f"{100 * row['accuracy']:.1f}"
    if "ahead" not in row:
        return accuracy
    return f"{accuracy} ({100 * row['ahead']:+.1f} ± {100 * row['ahead_interval']:.1f})".replace("-", "−")


if __name__ == "__main__":
    main()
