"""`metaleo plot-functions`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import AsTrained, Out, Switch, check_new, emit
from metaleo.errors import BadInput, require_between
from metaleo.tasks import PROBLEMS


@dataclasses.dataclass(frozen=True)
class PlotFunctions:
    """Draw what a model of sines and lines makes of a few points: the paper's Figure 3.

    The truth is black, the points are red circles with dashed lines, sampled functions are dotted. Half of the panels
    are ordinary tasks; the others are ambiguous, found automatically: a sine and a line both explain the points.

    Try:
      metaleo plot-functions runs/leo-sines-and-lines
      metaleo plot-functions runs/leo-sines-and-lines --panels 8 --seed 3 --out figure.png
    """

    run_or_model: Annotated[Path, tyro.conf.Positional]
    """Run folder, or a model file."""
    out: Out = Path("functions.png")
    """The figure (.png, .pdf or .svg)."""
    overwrite: Switch = False
    """Replace the figure in --out."""
    panels: int = 4
    """Tasks to draw."""
    samples: int = 12
    """Sampled functions in each panel."""
    shot: AsTrained = None
    """Points of a task."""
    seed: int = 0
    """Which tasks, and which samples."""
    json: Switch = False
    """Print what is drawn as JSON."""

    def run(self) -> None:
        from metaleo.checkpoints import load_model, model_paths, training_config
        from metaleo.plotting.figures import check_figure
        from metaleo.plotting.functions import choose_tasks, plot_functions

        require_between(1, 24, panels=self.panels)
        require_between(1, 1000, samples=self.samples)
        check_figure(self.out)
        check_new(self.out, self.overwrite)
        path = model_paths(self.run_or_model)[0]
        model = load_model(path)
        config = training_config(path, model)
        if config.data not in PROBLEMS:
            raise BadInput(f"{path} was trained on {config.kind} tasks; only functions can be drawn")
        shown = choose_tasks(
            model, config.shot if self.shot is None else self.shot, self.seed, self.panels, self.samples
        )
        plot_functions(self.out, shown)
        panels = [
            {"title": task.title, "x": task.x.tolist(), "truth": task.truth.tolist(),
             "points": [values.tolist() for values in task.points], "functions": task.functions.tolist()}
            for task in shown
        ]  # fmt: skip
        emit({"model": str(path), "seed": self.seed, "panels": panels}, self.json, f"figure: {self.out}")
