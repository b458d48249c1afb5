"""What each part of anchored LEO adds: the default, and the same with one part changed, on the same unseen tasks.

    python benchmarks/ablations.py features.npz ablations.json --seeds 5 --tasks 10000
    python benchmarks/ablations.py sample ablations.json --steps 2 --tasks 20 --variant "anchor: ridge"    # a try

All variants are trained with the same seeds. A cell holds the mean accuracy over seeds and tasks, and by how much it
differs from that of the default, ± 1.96 standard errors over tasks; each seed takes an equal share of them. "its
anchor" is the default before its first step.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matrix import describe, kind, number, score

from metaleo._jax.devices import use_all_cores
from metaleo.checkpoints import TrainedModel, load_model
from metaleo.config.presets import resolve_config
from metaleo.data import load_data
from metaleo.data.metaset import MetaSet
from metaleo.evaluation.evaluate import mean_and_interval, paired_difference
from metaleo.learners.leo import LEO
from metaleo.learners.registry import ANCHORED
from metaleo.training.run import TrainingRun, create_run_folder

DEFAULT, ANCHOR = "default", "its anchor"
ONE_SIZE = {"ways": None, "shots": None, "way": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "anchor: ridge": {"anchor": "ridge"},
    "anchor: centroid": {"anchor": "centroid"},
    "no latent steps": {"latent_steps": 0},
    "three steps of fine-tuning": {"finetune_steps": 3},
    "5-way 1-shot tasks only": {**ONE_SIZE, "shot": 1},
    "5-way 5-shot tasks only": {**ONE_SIZE, "shot": 5},
}
CELLS = ((5, 1), (5, 5), (5, 20), (20, 5))


def train(data: str, metaset: MetaSet, seeds: int, steps: int | None, changes: dict[str, Any]) -> list[TrainedModel]:
    """A model for each seed, and after them the first one's anchor by itself."""
    given = {"seeds": seeds, **changes} | ({} if steps is None else {"steps": steps, "validate_every": steps})
    config = resolve_config(metaset.dim, data=data, learner=ANCHORED, **given)
    with tempfile.TemporaryDirectory() as folder:
        run = TrainingRun(config, Path(folder) / "run", metaset)
        create_run_folder(run.folder, config, overwrite=False)
        started = jax.tree.map(lambda leaf: leaf[0], run.begin(None).learner)
        state = run.train(lambda records: None)
        print(f"  best steps {state.best_step.tolist()}, validation {np.round(100 * state.best_score, 2)}", flush=True)
        models = [load_model(run.folder / run.model_name(seed)) for seed in run.seeds]
    assert isinstance(started, LEO)
    return [*models, models[0]._replace(learner=started)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--split", default="test", choices=("val", "test"))
    parser.add_argument("--tasks", type=int, default=10_000, help="of five ways; of twenty, a quarter")
    parser.add_argument("--steps", type=int, help="by default those of leo-anchored")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variant", nargs="*", default=list(VARIANTS), choices=VARIANTS, help="beside the default")
    flags = parser.parse_args()
    use_all_cores()
    metaset = load_data(flags.data)
    unseen = metaset.subset(flags.split)
    numbers = {cell: number(flags.tasks, cell, flags.seeds) for cell in CELLS if kind(unseen, cell)}
    found: dict[str, list[dict]] = {}
    for name in dict.fromkeys((DEFAULT, *flags.variant)):
        print(name, flush=True)
        *models, anchor = train(flags.data, metaset, flags.seeds, flags.steps, VARIANTS[name])
        found[name] = [score(model, metaset, unseen, numbers, part) for part, model in enumerate(models)]
        if name == DEFAULT:
            found[ANCHOR] = [score(anchor, metaset, unseen, numbers, part) for part in range(flags.seeds)]
    rows = []
    for way, shot in numbers:
        usual = np.concatenate([each[way, shot] for each in found[DEFAULT]])
        for name, each_seed in found.items():
            own = np.concatenate([each[way, shot] for each in each_seed])
            accuracy, interval = mean_and_interval(own)
            ahead, ahead_interval = paired_difference(own, usual)
            rows.append({"way": way, "shot": shot, "variant": name, "accuracy": accuracy, "interval": interval}
                        | ({} if name == DEFAULT else {"ahead": ahead, "ahead_interval": ahead_interval}))  # fmt: skip
    settings = {"data": Path(flags.data).name, "split": flags.split, "tasks": flags.tasks, "steps": flags.steps,
                "seeds": flags.seeds, "device": jax.devices()[0].device_kind}  # fmt: skip
    flags.out.write_text(json.dumps({"settings": settings, "results": rows}, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


def table(rows: list[dict]) -> str:
    """Markdown: a line for each variant."""
    cells = list(dict.fromkeys((row["way"], row["shot"]) for row in rows))
    lines = ["| variant | " + " | ".join(f"{way}-way {shot}-shot" for way, shot in cells) + " |"]
    lines += ["|---" * (1 + len(cells)) + "|"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        lines.append(f"| {name} | " + " | ".join(describe(row) for row in own) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
