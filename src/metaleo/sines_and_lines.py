"""Sines and lines, for people: models beside references in one table, and the paper's Figure 3."""

import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

from metaleo.checkpoint import Model
from metaleo.cli.common import progress_bar, say
from metaleo.errors import BadInput
from metaleo.evaluation import write_rows
from metaleo.predictive import (
    Bayes,
    FunctionScore,
    Oracle,
    Predictor,
    Sampled,
    ambiguous_tasks,
    calibrate_scale,
    evaluate_functions,
    examine_ambiguous,
    summarise_functions,
)
from metaleo.tasks.functions import DOMAIN, Curve, SinesAndLines
from metaleo.tasks.task import Batch, key_apart


def judge_models(
    models: dict[str, Model], shot: int, seed: int, tasks: int, samples: int
) -> tuple[dict[str, dict[str, Any]], dict[str, FunctionScore]]:
    """A report for each model and reference, on the same tasks; and the scores behind them."""
    predictors: dict[str, Predictor] = {name: Sampled(model.learner, samples) for name, model in models.items()}
    predictors |= {"oracle": Oracle(), "exact posterior": Bayes(samples)}
    ambiguous = ambiguous_tasks(shot, seed)
    results, all_scores = {}, {}
    for name, predictor in predictors.items():
        with progress_bar() as progress:
            sampled = not isinstance(predictor, Oracle)
            bar = progress.add_task(name, total=tasks, note="calibrating …" if sampled else "")
            scale = calibrate_scale(predictor, shot, seed) if sampled else 1.0
            progress.update(bar, note="")
            scores = evaluate_functions(
                predictor,
                shot,
                seed,
                tasks,
                scale,
                lambda done, bar=bar, shown=progress: shown.update(bar, completed=done),
            )
            results[name] = vars(summarise_functions(scores, scale))
            all_scores[name] = scores
            if sampled:
                progress.update(bar, note="ambiguous tasks …")
                found = examine_ambiguous(predictor, shot, ambiguous)
                results[name] |= {"both_families": found.both, "sine_shares": found.sine_shares,
                                  "sine_posteriors": found.posteriors}  # fmt: skip
                progress.update(bar, note="")
    return results, all_scores


def print_functions(title: str, results: dict[str, dict[str, Any]]) -> None:
    say.print(f"\n{title} (±: 95 %; cover: 90 % intervals, as they are and calibrated)", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, collapse_padding=True)
    for heading in ("", "MSE", "sines", "lines", "NLL", "CRPS", "cover", "calibr.", "rank\ncorr.", "both\nkinds"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, row in results.items():
        spread = row["spread"] > 1e-6
        table.add_row(
            name,
            f"{row['mse']:.3f} ± {row['mse_interval']:.3f}",
            f"{row['sine_mse']:.3f}",
            f"{row['line_mse']:.3f}",
            f"{row['nll']:.2f}",
            f"{row['crps']:.3f}",
            f"{100 * row['coverage']:.1f} %",
            f"{100 * row['calibrated_coverage']:.1f} %" if spread else "–",
            f"{row['rank_correlation']:.2f}" if spread else "–",
            f"{100 * row['both_families']:.0f} %" if spread and row["sine_shares"] else "–",
        )
    say.print(table)
    for run in sorted({name.rpartition("seed ")[0] for name in results if "seed " in name}):
        errors = [row["mse"] for name, row in results.items() if name.startswith(f"{run}seed ")]
        if len(errors) > 1:
            mean, deviation = statistics.mean(errors), statistics.stdev(errors)
            say.print(f"{run}MSE over {len(errors)} seeds: {mean:.3f} ± {deviation:.3f} (mean ± standard deviation)")


def write_function_scores(path: Path, scores: dict[str, FunctionScore]) -> None:
    """A row per model and task."""
    rows = (
        (name, task, "sine" if is_sine else "line", *numbers)
        for name, own in scores.items()
        for task, (is_sine, *numbers) in enumerate(
            zip(own.is_sine, own.mse, own.nll, own.crps, own.coverage, own.calibrated, strict=True)
        )
    )
    write_rows(path, ("model", "task", "family", "mse", "nll", "crps", "coverage", "calibrated_coverage"), rows)


class Shown:
    """A task in the figure: the truth, the points, and sampled functions."""

    def __init__(self, title: str, curve: Curve, support: Batch, functions: np.ndarray, x: np.ndarray):
        self.title, self.x, self.functions = title, x, functions
        self.truth = np.asarray(curve(jnp.asarray(x)))
        self.points = np.asarray(support.inputs[:, 0]), np.asarray(support.targets[:, 0])


def choose_tasks(model: Model, shot: int, seed: int, panels: int, samples: int) -> list[Shown]:
    """Half of the panels ordinary tasks, sines and lines in turn, and half ambiguous ones, found by their posterior."""
    tasks = SinesAndLines(shot, 1)
    stream = jax.random.fold_in(jax.random.key(seed), 5)
    ambiguous = ambiguous_tasks(shot, seed, panels // 2)
    if len(ambiguous) < panels // 2:
        raise BadInput(f"hardly any task of {shot} shots is ambiguous: {len(ambiguous)} found; draw fewer --panels")
    ordinary, index = [], 0
    while len(ordinary) < panels - len(ambiguous):
        key = jax.random.fold_in(stream, index)
        index += 1
        if bool(tasks.draw(key)[0].is_sine) == (len(ordinary) % 2 == 0):
            ordinary.append(key)
    x = np.linspace(*DOMAIN, 201)
    predictor = Sampled(model.learner, samples)
    shown = []
    for key in (*ordinary, *ambiguous):
        curve, task = tasks.draw(key)
        functions = predictor.predict(curve, task.support, key_apart(key), jnp.asarray(x, jnp.float32))
        family = "a sine" if curve.is_sine else "a line"
        title = f"ambiguous ({family})" if len(shown) >= len(ordinary) else family
        shown.append(Shown(title, curve, task.support, np.asarray(functions), x))
    return shown
