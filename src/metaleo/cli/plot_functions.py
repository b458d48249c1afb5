"""`metaleo plot-functions`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import Int, console
from metaleo.config.schema import TrainConfig
from metaleo.errors import BadInput
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
    out: Path = Path("functions.png")
    """The figure (.png, .pdf or .svg)."""
    panels: int = 4
    """Tasks to draw."""
    samples: int = 12
    """Sampled functions in each panel."""
    shot: Int = None
    """Points of a task (as in training)."""
    seed: int = 0
    """Which tasks, and which samples."""
    json: bool = False
    """Print what is drawn as JSON on standard output."""

    def run(self) -> None:
        from metaleo.checkpoints import load_model, model_paths
        from metaleo.plotting.figures import check_figure
        from metaleo.plotting.functions import choose_tasks, plot_functions

        for name, least, most in (("panels", 1, 24), ("samples", 1, 1000)):
            if not least <= getattr(self, name) <= most:
                raise BadInput(f"--{name} must be between {least} and {most}, not {getattr(self, name)}")
        check_figure(self.out)
        path = model_paths(self.run_or_model)[0]
        model = load_model(path)
        config = TrainConfig.from_json(model.header["config"])
        if config.data not in PROBLEMS:
            raise BadInput(f"{path} was trained on {config.kind} tasks; only functions can be drawn")
        shown = choose_tasks(
            model, config.shot if self.shot is None else self.shot, self.seed, self.panels, self.samples
        )
        plot_functions(self.out, shown)
        console.print(f"figure: {self.out}", markup=False, soft_wrap=True)
        if self.json:
            panels = [
                {"title": task.title, "x": task.x.tolist(), "truth": task.truth.tolist(),
                 "points": [values.tolist() for values in task.points], "functions": task.functions.tolist()}
                for task in shown
            ]  # fmt: skip
            print(json.dumps({"model": str(path), "seed": self.seed, "panels": panels}))
