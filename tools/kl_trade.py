"""What the weight of the KL term trades, on sines and lines: `python tools/kl_trade.py OUT.json OUT.png`.

Trains LEO with several weights side by side and tests each on the same tasks: minutes on a GPU; with `--steps`,
`--tasks` and `--weights` shorter. `--plot-only` draws an existing JSON file again.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from metaleo._io.files import write_text
from metaleo.config.presets import PRESETS
from metaleo.evaluation.regression import (
    AMBIGUOUS_TASKS,
    CALIBRATION_TASKS,
    Sampled,
    ambiguous_tasks,
    calibrate_scale,
    evaluate_functions,
    examine_ambiguous,
    summarise_functions,
)
from metaleo.tasks.sines_and_lines import SinesAndLines
from metaleo.training.meta_train import make_optimiser, meta_train

WEIGHTS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def train(weights: list[float], steps: int, tasks: int, seed: int):
    """A learner for each weight, from the same key."""
    preset = PRESETS["sines-and-lines"]
    problem = SinesAndLines(preset.shot, preset.training["query"])

    def run(weight):
        hyper = dataclasses.replace(preset.hyper, kl=weight)
        state, _ = meta_train(
            preset.structure.init, hyper, jax.random.key(seed), problem, problem, make_optimiser(),
            steps=steps, meta_batch=preset.training["meta_batch"], validate_every=steps // 10,
            validation_tasks=min(1000, tasks), decay=True,
        )  # fmt: skip
        return state.learner

    return jax.jit(jax.vmap(run))(jnp.array(weights))


def test(learner, seed: int, tasks: int) -> dict:
    predictor = Sampled(learner, 100)
    scale = calibrate_scale(predictor, 5, seed, min(CALIBRATION_TASKS, tasks))
    report = summarise_functions(evaluate_functions(predictor, 5, seed, tasks, scale), scale)
    ambiguous = ambiguous_tasks(5, seed, min(AMBIGUOUS_TASKS, tasks))
    return {**vars(report), "both_families": examine_ambiguous(predictor, 5, ambiguous).both}


def plot(rows: list[dict], path: Path) -> None:
    figure, grid = plt.subplots(1, 3, figsize=(9.6, 2.9), dpi=200, layout="constrained")
    places = [max(row["kl"], 0.003) for row in rows]  # zero has no place on a logarithmic axis
    panels = {
        "mse": ("MSE of the mean function", 1),
        "coverage": ("targets in 90 % intervals (%)", 100),
        "both_families": ("ambiguous tasks with\nsamples in both families (%)", 100),
    }
    for axes, (field, (label, factor)) in zip(grid, panels.items(), strict=True):
        errors = [row["mse_interval"] for row in rows] if field == "mse" else None
        values = [factor * row[field] for row in rows]
        axes.errorbar(places, values, errors, color="#0072B2", marker="o", markersize=4, capsize=2)
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{row['kl']:g}" for row in rows], fontsize=8)
        axes.minorticks_off()
        axes.tick_params(axis="y", labelsize=8)
        axes.set_xlabel("weight β of the KL term", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylim(0, None)
    grid[1].axhline(90, color="black", linewidth=0.8, linestyle=":")
    grid[2].set_ylim(0, 100)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=4000, help="test tasks; of any other kind no more than these")
    parser.add_argument("--weights", type=float, nargs="+", default=WEIGHTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot-only", action="store_true")
    options = parser.parse_args()
    if not options.plot_only:
        began = time.monotonic()
        learners = train(options.weights, options.steps, options.tasks, options.seed)
        rows = []
        for index, weight in enumerate(options.weights):
            learner = jax.tree.map(lambda leaf, i=index: leaf[i], learners)
            rows.append({"kl": weight, **test(learner, options.seed, options.tasks)})
            seconds = time.monotonic() - began
            print(
                f"β {weight:g}: MSE {rows[-1]['mse']:.3f}, coverage {rows[-1]['coverage']:.3f}, {seconds:.0f} s",
                flush=True,
            )
        settings = {"steps": options.steps, "tasks": options.tasks, "seed": options.seed}
        held = {**settings, "device": jax.devices()[0].device_kind, "rows": rows}
        write_text(options.json, json.dumps(held, indent=2) + "\n")
    plot(json.loads(options.json.read_text())["rows"], options.png)


if __name__ == "__main__":
    main()
