"""Figures of the analyses: Figures 4 and 5 of the paper, and uncertainty against errors."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from metaleo.analysis.codes import Codes, principal_paths
from metaleo.analysis.coverage import KINDS, Coverage
from metaleo.analysis.curvature import POINTS, Spectra
from metaleo.analysis.uncertainty import BINS, LEVELS, SHARES, Answers, Functions, accuracy_as_kept, reliability
from metaleo.plotting.figures import COLOURS, as_label, drawing

BEFORE, AFTER, GREY = COLOURS[0], COLOURS[1], "#BBBBBB"
RAINBOW = (
    "#882E72", "#1965B0", "#7BAFDE", "#4EB265", "#A9C77D", "#D8C400", "#EE8026", "#DC050C", "#72190E", "#D1BBD7",
    "#AE76A3", "#5289C7", "#90C987", "#F6C141", "#E8601C", "#42150A", "#994F88", "#437DBF", "#F1932D", "#A5170E",
)  # fmt: skip
"""Paul Tol's discrete rainbow with light colours darkened, ordered so that neighbours differ; it has more colours than
other palettes."""
SMALL = 7


def plain(axes: Any, grid: str = "both") -> None:
    axes.tick_params(labelsize=SMALL)
    axes.grid(axis=grid, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def plot_codes(path: Path, codes: Codes, placed: Float[np.ndarray, "side code 2"], highlight: int) -> None:
    """Figure 4: one t-SNE of all codes in three panels.

    For functions, the second panel already shows both families, so the third shows the paths of codes instead.
    """
    present = np.unique(codes.labels)
    functions = codes.rows.shape[1] == 0
    legend_rows = -(-len(present) // 6)
    size = float(np.clip(1.2 * (10_000 / placed[0].size) ** 0.5, 1.2, 9))  # fewer points are drawn larger
    with drawing(path, 1, 3, (7.2, 2.75 + 0.17 * legend_rows), dpi=250) as (figure, grid):
        both, by_class, one = grid[0]
        scatter(both, placed, size)
        for colour, label in ((BEFORE, "before"), (AFTER, "after")):
            both.scatter([], [], s=size, color=colour, linewidths=0, label=label)
        both.set_title("(a) before and after adaptation", fontsize=8)
        for number, label in enumerate(present):
            member = codes.labels == label
            points = placed[:, member].reshape(-1, 2)
            colour = (BEFORE, AFTER)[number] if functions else RAINBOW[number % len(RAINBOW)]
            name = as_label(codes.names[label] + "s" * functions)
            by_class.scatter(*points.T, s=size, color=colour, linewidths=0, label=name, rasterized=True)
        by_class.set_title("(b) by family" if functions else "(b) by class", fontsize=8)
        if functions:
            draw_paths(one, codes)
        else:
            member = codes.labels == highlight
            one.scatter(*placed[:, ~member].reshape(-1, 2).T, s=0.7 * size, color=GREY, linewidths=0, rasterized=True)
            scatter(one, placed[:, member], 2 * size)
            one.set_title(f"(c) {as_label(codes.names[highlight])}", fontsize=8)
        for axes in (both, by_class) if functions else grid[0]:
            axes.set(xticks=[], yticks=[], aspect="equal", adjustable="datalim")
            axes.set_xlabel("t-SNE, dimension 1", fontsize=SMALL)
        both.set_ylabel("t-SNE, dimension 2", fontsize=SMALL)
        style = {
            "frameon": False,
            "fontsize": SMALL,
            "markerscale": 4 / size**0.5,
            "handletextpad": 0.1,
            "columnspacing": 0.9,
        }
        both.legend(loc="upper left", borderpad=0, **style)
        if functions:
            by_class.legend(loc="upper left", borderpad=0, **style)
        else:
            figure.legend(*by_class.get_legend_handles_labels(), loc="outside lower center", ncols=6, **style)


def scatter(axes: Any, placed: Float[np.ndarray, "side code 2"], size: float) -> None:
    """Draw points before and after adaptation in random order, so that neither side hides the other."""
    colours = np.repeat([BEFORE, AFTER], placed.shape[1])
    order = np.random.default_rng(0).permutation(len(colours))
    axes.scatter(*placed.reshape(-1, 2)[order].T, s=size, c=colours[order], linewidths=0, rasterized=True)


def draw_paths(axes: Any, codes: Codes, most: int = 60) -> None:
    """Draw the paths of up to `most` codes of each label, on the first two principal components."""
    paths, shares = principal_paths(codes)
    for label, colour in zip(np.unique(codes.labels), (BEFORE, AFTER), strict=False):
        for path in paths[codes.labels == label][:most]:
            axes.plot(*path.T, color=colour, linewidth=0.6, alpha=0.6)
            axes.plot(*path[-1], "o", color=colour, markersize=1.8, markeredgewidth=0)
    axes.set_title("(c) latent paths, dots at their ends", fontsize=8)
    axes.set_xlabel(f"component 1 ({100 * shares[0]:.0f} % of variance)", fontsize=SMALL)
    axes.set_ylabel(f"component 2 ({100 * shares[1]:.0f} %)", fontsize=SMALL)
    plain(axes)


def boxes(axes: Any, rows: Sequence[tuple[str, Float[np.ndarray, "..."], str]]) -> None:
    """Horizontal box plots, the first on top: quartiles, median, whiskers from the 5th to the 95th percentile."""
    for height, (_, values, colour) in enumerate(reversed(rows)):
        flat = np.asarray(values, np.float64).ravel()
        flat = flat[np.isfinite(flat)]
        if not (flat > 0).any():  # nothing that a logarithmic axis can show
            continue
        quantiles = np.quantile(flat, (0.05, 0.25, 0.5, 0.75, 0.95))
        low, first, median, third, high = np.maximum(quantiles, flat[flat > 0].min())
        shown = {"med": median, "q1": first, "q3": third, "whislo": low, "whishi": high, "fliers": []}
        axes.bxp(
            [shown], positions=[height], widths=0.55, orientation="horizontal", showfliers=False, patch_artist=True,
            boxprops={"facecolor": colour, "alpha": 0.45, "edgecolor": colour}, capprops={"color": colour},
            medianprops={"color": "black", "linewidth": 1.2}, whiskerprops={"color": colour},
        )  # fmt: skip
        axes.annotate(f"{median:#.2g}", (1, height), xycoords=("axes fraction", "data"), xytext=(3, 0),
                      textcoords="offset points", va="center_baseline", fontsize=SMALL)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    plain(axes, "x")
    axes.tick_params(axis="y", length=0)
    axes.annotate("median", (1, 1), xycoords="axes fraction", xytext=(3, 2), textcoords="offset points", fontsize=SMALL)


SPACES = {"z": ("in z", BEFORE), "theta": ("in θ", AFTER)}


def plot_curvature(path: Path, spectra: Mapping[str, Spectra]) -> None:
    """Figure 5(a): the eigenvalues of all tasks, before and after adaptation."""
    count = sum(len(found.values) for found in spectra.values())
    with drawing(path, 1, 2, (7.2, 1.0 + 0.27 * count)) as (_, grid):
        for axes, point, title in zip(grid[0], POINTS, ("(a) before adaptation", "(b) after adaptation"), strict=True):
            rows = [
                (f"{as_label(name)}, {SPACES[space][0]}", found.values[space][point], SPACES[space][1])
                for name, found in spectra.items() for space in SPACES if space in found.values
            ]  # fmt: skip
            boxes(axes, rows)
            axes.set_title(title, fontsize=8)
            axes.set_xlabel("absolute eigenvalue of the Hessian (nats / unit²)", fontsize=SMALL)
        ends = [end for axes in grid[0] for end in axes.get_xlim()]
        for axes in grid[0]:
            axes.set_xlim(min(ends), max(ends))
        grid[0, 1].set_yticklabels([])


def plot_coverage(path: Path, coverages: Mapping[str, Coverage]) -> None:
    """Figures 5(b) and 5(c): singular values of the decoders, and lengths of steps."""
    kinds = dict(zip(KINDS, (BEFORE, AFTER, COLOURS[2]), strict=True))
    rows = [
        (f"{as_label(name)}, {KINDS[kind]}", found.steps[kind], kinds[kind])
        for name, found in coverages.items() for kind in kinds if kind in found.steps
    ]  # fmt: skip
    decoders = {name: found.singular_values for name, found in coverages.items() if found.singular_values is not None}
    with drawing(path, 1, 1 + bool(decoders), (7.2 if decoders else 4.8, max(2.2, 0.8 + 0.27 * len(rows)))) as (
        _,
        grid,
    ):
        if decoders:
            axes = grid[0, 0]
            for (name, values), colour, style in zip(
                decoders.items(), itertools.cycle(COLOURS), itertools.cycle(("-", "--", ":", "-.")), strict=False
            ):
                each = values.reshape(-1, values.shape[-1])
                numbers = np.arange(1, each.shape[1] + 1)
                axes.plot(numbers, np.median(each, 0), style, color=colour, linewidth=1.3, label=as_label(name))
                if len(each) > 1:
                    axes.fill_between(numbers, *np.quantile(each, (0.05, 0.95), axis=0), color=colour, alpha=0.2)
            axes.axhline(1, color="black", linewidth=0.6, zorder=0)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(max(min(low, 0.3), 1e-3), max(high, 12))  # cut off values that are only rounding error
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("number of the singular value", fontsize=SMALL)
            axes.set_ylabel("singular value of the decoder\n(length in θ per length in z)", fontsize=SMALL)
            axes.set_title("(a) what the decoder does to lengths", fontsize=8)
            axes.legend(frameon=False, fontsize=SMALL)
            plain(axes)
        axes = grid[0, -1]
        boxes(axes, rows)
        axes.set_title("(b) lengths of steps" if decoders else "lengths of steps", fontsize=8)
        axes.set_xlabel("length of a step (Euclidean)", fontsize=SMALL)


def plot_uncertainty(path: Path, asked: Mapping[str, Mapping[str, Answers]]) -> None:
    """Reliability diagram, accuracy without the least certain answers, and entropy of right and of wrong answers."""
    ways = {"means": "", "samples": ", sampled"}
    rows = [(as_label(name) + ways[way], answers) for name, found in asked.items() for way, answers in found.items()]
    with drawing(path, 1, 3, (7.2, 2.55 + 0.14 * -(-len(rows) // 3))) as (figure, grid):
        diagram, kept, doubt = grid[0]
        diagram.plot([0, 100], [0, 100], color="black", linewidth=0.6)
        styles = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 3)))
        for index, (name, answers) in enumerate(rows):
            colour, style, marker = COLOURS[index % len(COLOURS)], styles[index % len(styles)], "osD^vP"[index % 6]
            look = {"color": colour, "linestyle": style, "linewidth": 1.2, "label": name}
            table = reliability(answers)
            total = sum(row["count"] for row in table)
            seen = [row for row in table if row["count"] > total / 10_000]  # leave out bins with too few answers
            diagram.plot([100 * row["confidence"] for row in seen], [100 * row["accuracy"] for row in seen],
                         marker=marker, markersize=3, **look)  # fmt: skip
            kept.plot(100 * SHARES, 100 * accuracy_as_kept(answers, answers.entropy), **look)
            edges = np.linspace(0, max(float(answers.entropy[answers.present].max()), 1e-3), 4 * BINS + 1)
            right, wrong = answers.present & answers.correct, answers.present & ~answers.correct
            for member, width in ((right, 0.8), (wrong, 1.8)):
                if member.any():
                    heights, _ = np.histogram(answers.entropy[member], edges, density=True)
                    doubt.plot((edges[1:] + edges[:-1]) / 2, heights, color=colour, linestyle=style, linewidth=width)
        diagram.set(xlim=(0, 100), ylim=(0, 100), aspect="equal")
        diagram.set_xlabel("confidence (%)", fontsize=SMALL)
        diagram.set_ylabel("right answers (%)", fontsize=SMALL)
        diagram.set_title("(a) reliability", fontsize=8)
        kept.set_xlabel("least certain answers left out (%)", fontsize=SMALL)
        kept.set_ylabel("accuracy of the others (%)", fontsize=SMALL)
        kept.set_title("(b) leaving out by entropy", fontsize=8)
        doubt.set_xlabel("entropy of an answer (nats)", fontsize=SMALL)
        doubt.set_ylabel("density", fontsize=SMALL)
        doubt.set_title("(c) right (thin) and wrong (thick)", fontsize=8)
        for axes in grid[0]:
            plain(axes)
        figure.legend(*kept.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False,
                      fontsize=SMALL)  # fmt: skip


def plot_function_uncertainty(path: Path, asked: Mapping[str, Functions]) -> None:
    """Coverage of predictive intervals by level, and error by spread."""
    with drawing(path, 1, 2, (6.0, 2.9)) as (figure, grid):
        coverage, error = grid[0]
        coverage.plot([0, 100], [0, 100], color="black", linewidth=0.6)
        for (name, found), colour, marker in zip(
            asked.items(), itertools.cycle(COLOURS), itertools.cycle("osD^vP*"), strict=False
        ):
            coverage.plot(100 * LEVELS, 100 * found.coverage.mean(0), marker + "-", color=colour, markersize=3,
                          linewidth=1.2, label=as_label(name))  # fmt: skip
            spread, squares = found.spread.ravel(), found.error.ravel()
            parts = np.array_split(np.argsort(spread, kind="stable"), 10)
            error.plot([spread[part].mean() for part in parts], [np.sqrt(squares[part].mean()) for part in parts],
                       marker + "-", color=colour, markersize=3, linewidth=1.2)  # fmt: skip
        ends = error.get_xlim()
        error.plot([0, ends[1]], [0, ends[1]], color="black", linewidth=0.6, zorder=0)
        error.set(xlim=(0, ends[1]))
        error.set_ylim(bottom=0)
        coverage.set(xlim=(0, 100), ylim=(0, 100))
        coverage.set_xlabel("level of the interval (%)", fontsize=SMALL)
        coverage.set_ylabel("targets inside (%)", fontsize=SMALL)
        coverage.set_title("(a) coverage of predictive intervals", fontsize=8)
        error.set_xlabel("spread of sampled functions (units of y)", fontsize=SMALL)
        error.set_ylabel("root mean squared error (units of y)", fontsize=SMALL)
        error.set_title("(b) error where functions differ", fontsize=8)
        for axes in grid[0]:
            plain(axes)
        figure.legend(*coverage.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False,
                      fontsize=SMALL)  # fmt: skip
