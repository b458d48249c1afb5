"""Figures with titles, labels and units, as PNG, or as PDF and SVG for papers."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaleo._io.files import atomic_write, check_writable
from metaleo._io.run_log import Record
from metaleo.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito, distinguishable also with colour-blindness."""
FORMATS = (".png", ".pdf", ".svg")


def check_figure(path: Path) -> None:
    """Raise `BadInput` if the path has no suffix of `FORMATS`, or cannot be written to."""
    if path.suffix not in FORMATS:
        raise BadInput(f"`out=` is a figure, its name ends in {', '.join(FORMATS)}; {path.name} does not")
    check_writable(path)


def as_label(name: str) -> str:
    """Escape a name so that Matplotlib shows it in full: `$` starts no formula, `_` hides no entry of a legend."""
    return ("\u200b" if name.startswith("_") else "") + name.replace("$", r"\$")


@contextlib.contextmanager
def drawing(
    path: Path, down: int, across: int, size: tuple[float, float], dpi: int = 200
) -> "Iterator[tuple[Figure, np.ndarray]]":
    """Yield a figure of `size` inches and its grid of panels; on exit, save the figure atomically."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    yield figure, figure.subplots(down, across, squeeze=False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:])


def plot_curves(
    path: Path,
    runs: Mapping[str, Sequence[Record]],
    title: str,
    fields: Sequence[str] = ("query_accuracy", "validation_accuracy"),
    levels: Mapping[str, float] | None = None,
) -> None:
    """Accuracy (without classes, loss) over meta-steps: thin lines for training tasks, thick for validation tasks.

    `levels` are accuracies of what is not trained, on the same validation tasks: dotted lines.
    """
    crowded = len(runs) > 3  # the legend is long: beside the curves, else below them
    loss = not any("query_accuracy" in record for records in runs.values() for record in records)
    with drawing(path, 1, 1, (10 if crowded else 7, 4.2), dpi=150) as (figure, grid):
        axes = grid[0, 0]
        for (name, records), colour in zip(runs.items(), itertools.cycle(COLOURS), strict=False):
            for index, seed in enumerate(sorted({record["seed"] for record in records})):
                own = [record for record in records if record["seed"] == seed]
                for field, style in (
                    ("query_accuracy", {"alpha": 0.35, "linewidth": 1}),
                    ("validation_accuracy", {"marker": "o", "markersize": 3, "linewidth": 1.6}),
                ):
                    if field not in fields:
                        continue
                    held, factor = (field.replace("accuracy", "loss"), 1) if loss else (field, 100)
                    points = [(r["step"], factor * r[held]) for r in own if r.get(held) is not None]
                    what = (
                        "training tasks" + ("" if loss else " (dropout on)")
                        if field == "query_accuracy"
                        else "validation tasks"
                    )
                    shown = as_label(f"{name}, {what}" if len(fields) > 1 else name)
                    label = shown if index == 0 else None
                    axes.plot(*zip(*points, strict=True) if points else ([], []), color=colour, label=label, **style)
        for (name, level), style in zip((levels or {}).items(), itertools.cycle((":", "--", "-.")), strict=False):
            axes.axhline(
                100 * level, color="#555555", linestyle=style, linewidth=1.2, label=f"{name}, validation tasks"
            )
        where = {"query_accuracy": "training", "validation_accuracy": "validation"}
        tasks = f" of {where[fields[0]]} tasks" if len(fields) == 1 else ""
        unit = "loss on query examples (nats)" if loss else f"accuracy on query examples{tasks} (%)"
        axes.set(xlabel="meta-steps", ylabel=unit, title=title)
        if loss:  # it starts in the thousands
            axes.set_yscale("symlog", linthresh=1)
            low, high = axes.get_ylim()
            ticks = [0, *(digit * 10**power for power in range(9) for digit in (1, 2, 3, 5))]
            axes.set_yticks([tick for tick in ticks if low <= tick <= high], minor=False)
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.set_ylim(low, high)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if crowded:
            figure.legend(loc="outside right upper", frameon=False, fontsize="small")
        else:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")


def plot_comparison(path: Path, panels: Mapping[str, Mapping[str, tuple[float, float]]], highlight: str) -> None:
    """Accuracy of each learner with its interval, best on top: one panel per kind of task, one dot per learner."""
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    most = max(len(learners) for learners in panels.values())
    size = (3.6 * across, down * (0.9 + 0.22 * most))
    with drawing(path, down, across, size) as (figure, grid):
        figure.get_layout_engine().set(wspace=0.05)  # type: ignore[union-attr]
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, learners) in zip(grid.flat, panels.items(), strict=False):
            names = sorted(learners, key=lambda name: learners[name][0])
            for height, name in enumerate(names):
                accuracy, interval = (100 * value for value in learners[name])
                colour, marker = (COLOURS[1], "D") if name == highlight else (COLOURS[0], "o")
                axes.errorbar(accuracy, height, xerr=interval, fmt=marker, color=colour, markersize=4, capsize=2)
                axes.annotate(f"{accuracy:.1f}", (1, height), xycoords=("axes fraction", "data"), xytext=(3, 0),
                              textcoords="offset points", va="center_baseline", fontsize=8, color=colour)  # fmt: skip
            if highlight in names:
                axes.axvline(100 * learners[highlight][0], color=COLOURS[1], linewidth=0.8, linestyle=":", zorder=0)
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.tick_params(axis="x", labelsize=8)
            axes.tick_params(axis="y", length=0)
            for label in axes.get_yticklabels():
                if label.get_text() == highlight:
                    label.set(color=COLOURS[1], fontweight="bold")
            axes.set_ylim(-0.6, len(names) - 0.4)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("test accuracy (%), 95 % interval", fontsize=8)
            axes.grid(axis="x", alpha=0.25)
            axes.spines[["top", "right", "left"]].set_visible(False)


def plot_search(
    path: Path,
    trials: Sequence[Mapping[str, Any]],
    space: Mapping[str, tuple[float, float]],
    importances: Mapping[str, float],
    title: str,
) -> None:
    """Validation accuracy over each hyper-parameter, one dot per trial, and the importance of each hyper-parameter."""
    from matplotlib import colormaps
    from matplotlib.ticker import NullFormatter

    across = 4
    down = -(-(len(space) + bool(importances)) // across)
    with drawing(path, down, across, (11, 2.7 * down), dpi=150) as (figure, grid):
        lengths = sorted({trial["steps"] for trial in trials})
        shades = colormaps["viridis_r"]
        for axes, (name, ends) in zip(grid.flat, space.items(), strict=False):
            for index, steps in enumerate(lengths):
                same = [trial for trial in trials if trial["steps"] == steps]
                axes.scatter(
                    [trial["draw"][name] for trial in same],
                    [100 * trial["accuracy"] for trial in same],
                    color=shades(0.1 + 0.9 * index / max(1, len(lengths) - 1)),
                    s=14,
                    label=f"{steps:,} steps",
                )
            best = trials[0]
            axes.plot(best["draw"][name], 100 * best["accuracy"], "o", markersize=9, fillstyle="none", color=COLOURS[1])
            axes.set(xscale="log", xlim=(ends[0] / 1.2, ends[1] * 1.2))
            axes.xaxis.set_minor_formatter(NullFormatter())
            if ends[1] <= 10 * ends[0]:  # at most a decade: set ticks explicitly
                ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0) if ends[0] <= tick <= ends[1]]
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xlabel(name.replace("_", " "), fontsize=9)
        for row in grid:
            row[0].set_ylabel("validation accuracy (%)", fontsize=8)
        for axes in grid.flat:
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in grid.flat[len(space) :]:
            axes.set_visible(False)
        if importances:
            axes = grid.flat[len(space)]
            axes.set_visible(True)
            names = sorted(importances, key=lambda name: importances[name])
            axes.barh(range(len(names)), [importances[name] for name in names], color="#A6CEE3")
            for height, name in enumerate(names):
                axes.text(0.01, height, name.replace("_", " "), va="center", fontsize=8)
            axes.set(yticks=[], ylabel="")
            axes.set_xlabel("importance (share of variance)", fontsize=9)
        figure.suptitle(f"{title}: {len(trials)} trials (the best circled)", fontsize=10)
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False,
                      fontsize=8)  # fmt: skip


def plot_reproduction(
    path: Path, panels: Mapping[str, Mapping[str, tuple[float, float, tuple[float, float] | None]]]
) -> None:
    """Rows of the paper's table: reproduced mean and deviation beside the paper's, one panel per kind of task."""
    most = max(len(rows) for rows in panels.values())
    size = (3.6 * len(panels) + 1.6, 1.3 + 0.36 * most)
    with drawing(path, 1, len(panels), size) as (figure, grid):
        for column, (axes, (title, rows)) in enumerate(zip(grid.flat, panels.items(), strict=True)):
            for height, (mean, deviation, paper) in enumerate(rows.values()):
                style = {"capsize": 2, "markersize": 5, "linestyle": "none"}
                label = "ours" if height == 0 else None
                axes.errorbar(mean, height + 0.12, xerr=deviation, fmt="o", color=COLOURS[0], label=label, **style)
                axes.annotate(f"{mean:.1f}", (mean, height + 0.12), xytext=(0, 4), textcoords="offset points",
                              ha="center", fontsize=7, color=COLOURS[0])  # fmt: skip
                if paper is not None:
                    label = "the paper (its own features)" if height == 0 else None
                    axes.errorbar(paper[0], height - 0.12, xerr=paper[1], fmt="D", color=COLOURS[1], label=label,
                                  fillstyle="none", **style)  # fmt: skip
            axes.set_yticks(range(len(rows)), list(rows) if column == 0 else [""] * len(rows), fontsize=8)
            axes.set_ylim(-0.6, len(rows) - 0.3)
            axes.tick_params(axis="x", labelsize=8)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("test accuracy (%), ± standard deviation over runs", fontsize=8)
            axes.grid(axis="x", alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False,
                      fontsize=8)  # fmt: skip
