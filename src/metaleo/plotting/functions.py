"""The paper's Figure 3: tasks of sines and lines with sampled functions."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from metaleo.checkpoints import TrainedModel
from metaleo.errors import BadInput
from metaleo.evaluation.regression import Sampled, ambiguous_tasks
from metaleo.plotting.figures import drawing
from metaleo.tasks.sines_and_lines import DOMAIN, Curve, SinesAndLines
from metaleo.tasks.task import Batch, key_apart


class PlottedTask:
    """A task in the figure: the true function, the support points, and sampled functions."""

    def __init__(self, title: str, curve: Curve, support: Batch, functions: np.ndarray, x: np.ndarray):
        self.title, self.x, self.functions = title, x, functions
        self.truth = np.asarray(curve(jnp.asarray(x)))
        self.points = np.asarray(support.inputs[:, 0]), np.asarray(support.targets[:, 0])


def choose_tasks(model: TrainedModel, shot: int, seed: int, panels: int, samples: int) -> list[PlottedTask]:
    """Choose tasks to plot: half are ordinary, alternating sines and lines; half are ambiguous by their posterior."""
    tasks = SinesAndLines(shot, 1)
    stream = jax.random.fold_in(jax.random.key(seed), 5)
    ambiguous = ambiguous_tasks(shot, seed, panels // 2)
    if len(ambiguous) < panels // 2:
        raise BadInput(f"hardly any task of {shot} shots is ambiguous: {len(ambiguous)} found; draw fewer `panels=`")
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
        shown.append(PlottedTask(title, curve, task.support, np.asarray(functions), x))
    return shown


def plot_functions(path: Path, tasks: Sequence[PlottedTask]) -> None:
    """The paper's Figure 3: truth in black, points as red circles on dashed lines, sampled functions dotted."""
    from matplotlib import colormaps

    across = min(4, len(tasks))
    down = -(-len(tasks) // across)
    size = (2.9 * across, 2.75 * down + 0.35)
    with drawing(path, down, across, size) as (figure, grid):
        shades = colormaps["cividis"]
        for number, (axes, task) in enumerate(zip(grid.flat, tasks, strict=False)):
            x, y = task.points
            low, high = min(task.truth.min(), y.min()), max(task.truth.max(), y.max())
            room = 0.35 * (high - low) + 1.0
            for index, function in enumerate(task.functions):
                label = "sampled functions" if index == 0 else None
                colour = shades(0.15 + 0.7 * index / max(1, len(task.functions) - 1))
                axes.plot(task.x, function, linestyle=(0, (1, 1.4)), linewidth=1.1, color=colour, label=label)
            axes.plot(task.x, task.truth, color="black", linewidth=1.6, label="truth")
            axes.vlines(x, low - room, high + room, color="#CC3311", linestyle="--", linewidth=0.6)
            axes.plot(x, y, "o", markersize=6, markerfacecolor="none", markeredgecolor="#CC3311", markeredgewidth=1.4,
                      linestyle="none", label=f"{len(x)} noisy points")  # fmt: skip
            axes.set(xlim=(task.x[0], task.x[-1]), ylim=(low - room, high + room))
            axes.set_title(f"({chr(97 + number)}) {task.title}", fontsize=9)
            axes.set_xlabel("x", fontsize=8, labelpad=1)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in grid.flat[len(tasks) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel("y", fontsize=8)
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False,
                      fontsize=8)  # fmt: skip
