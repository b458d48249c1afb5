"""One anchored LEO for all ways and shots, beside learners that users have already: accuracy on unseen classes.

    python benchmarks/matrix.py features.npz matrix.json --seeds 5 --tasks 10000
    python benchmarks/matrix.py sample matrix.json --steps 10 --tasks 20    # a try

For every way and shot, all learners are tested on the same tasks of test classes, with 15 queries per class; ± is 1.96
standard errors of the difference to leo-anchored over tasks. Logistic regression is scikit-learn's, on rows of length
one, with C from 1, 10 and 100 by validation tasks of the same way and shot. Ridge regression, prototypical and matching
nets are trained on 5-way 5-shot tasks. Everything is chosen on validation classes.
"""

import argparse
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from intents import regress

from metaleo.checkpoints import load_model
from metaleo.config.presets import resolve_config
from metaleo.config.schema import TrainConfig
from metaleo.data import load_data
from metaleo.data.metaset import MetaSet
from metaleo.evaluation.evaluate import score_learner
from metaleo.experiments.compare import make_untrained, paired_difference
from metaleo.learners.registry import ANCHORED, Structure
from metaleo.tasks.episodes import Episodes, place_rows
from metaleo.training.run import TrainingRun, create_run_folder

UNTRAINED = ("nearest-centroid", "cl2n")
TRAINED = ("ridge", "prototypical", "matching")
STRENGTHS = (1.0, 10.0, 100.0)
CHOICE_TASKS = 20
QUERY = 15


def train(learner: str, data: str, metaset: MetaSet, folder: Path, steps: int | None, seed: int) -> Path:
    """The model file of a learner."""
    if learner in UNTRAINED:
        structure = Structure(learner=learner, dim=metaset.dim)
        config = TrainConfig(data=data, steps=0, structure=structure)
        folder.mkdir(parents=True)
        make_untrained(metaset, folder / "model.safetensors", config)
        return folder / "model.safetensors"
    given = {} if learner == ANCHORED else {"shot": 5, "steps": 2000, "validate_every": 250}
    given |= {} if steps is None else {"steps": steps, "validate_every": steps}
    config = resolve_config(metaset.dim, data=data, learner=learner, seed=seed, validation_tasks=500, **given)
    run = TrainingRun(config, folder, metaset)
    create_run_folder(folder, config, overwrite=False)
    state = run.train(lambda records: None)
    anchor = "" if run.anchor_score is None else f", its anchor {run.anchor_score:.2%}"
    print(
        f"{learner}: validation {float(state.best_score[0]):.2%} at step {int(state.best_step[0])}{anchor}", flush=True
    )
    return folder / "model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--split", default="test", choices=("val", "test"))
    parser.add_argument("--way", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--shot", type=int, nargs="+", default=[1, 5, 10, 20])
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--steps", type=int, help="of every learner; by default its own")
    parser.add_argument("--seeds", type=int, default=1, help="of leo-anchored; tasks differ too")
    flags = parser.parse_args()
    metaset = load_data(flags.data)
    unseen = metaset.subset(flags.split)
    rows = []
    for seed in range(flags.seeds):
        accuracies: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        for name in (ANCHORED, *UNTRAINED, *TRAINED):
            with tempfile.TemporaryDirectory() as folder:
                model = load_model(train(name, flags.data, metaset, Path(folder) / "run", flags.steps, seed))
            placed = place_rows(metaset, prepare=model.prepare)
            for way in flags.way:
                for shot in flags.shot:
                    if way > len(unseen.counts) or shot + QUERY > unseen.counts.min():
                        continue
                    episodes = Episodes.over(unseen, way, shot, QUERY, placed)
                    scores = score_learner(model.learner, episodes, seed, flags.tasks).accuracy
                    accuracies.setdefault((way, shot), {})[name] = np.asarray(scores)
        placed = place_rows(metaset)
        for (way, shot), own in accuracies.items():
            kind = min(way, len(metaset.subset("val").counts)), shot, QUERY, placed
            validation, testing = Episodes.over(metaset.subset("val"), *kind), Episodes.over(unseen, way, *kind[1:])
            tried = [regress(validation, CHOICE_TASKS, one, seed).mean() for one in STRENGTHS]
            strength = STRENGTHS[int(np.argmax(tried))]
            own[f"logistic-regression, C = {strength:g}"] = regress(testing, flags.tasks, strength, seed)
            for name, values in own.items():
                ahead, interval = paired_difference(own[ANCHORED], values)
                rows.append({"seed": seed, "way": way, "shot": shot, "learner": name, "accuracy": float(values.mean()),
                             "behind_by": ahead, "interval": interval})  # fmt: skip
            best = max((float(values.mean()), name) for name, values in own.items() if name != ANCHORED)
            ahead, interval = paired_difference(own[ANCHORED], own[best[1]])
            mean, kind = own[ANCHORED].mean(), f"seed {seed}, {way}-way {shot}-shot"
            print(f"{kind}: {mean:.2%}, {best[1]} {best[0]:.2%}: {ahead:+.2%} ± {interval:.2%}", flush=True)
    settings = {"data": Path(flags.data).name, "split": flags.split, "tasks": flags.tasks, "steps": flags.steps,
                "seeds": flags.seeds, "device": jax.devices()[0].device_kind}  # fmt: skip
    flags.out.write_text(json.dumps({"settings": settings, "results": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
