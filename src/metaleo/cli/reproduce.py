"""`metaleo reproduce`."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated, Literal

import tyro

from metaleo.cli.common import Int, Place, Text, progress
from metaleo.errors import BadInput, needs_extra


@dataclasses.dataclass(frozen=True)
class Reproduce:
    """Make the paper's Table 2 (LEO, its ablations, Meta-SGD) by the paper's protocol, with its numbers beside ours.

    For every row a random search, then five fresh runs with the chosen hyper-parameters, then 50,000 test tasks, the
    same for all. The same command again goes on where it was stopped or killed, and ends in the same report. Several
    processes may share --out, each with rows of its own; the last command then only has to write the report.

    Try:
      metaleo reproduce sample --quick
      metaleo reproduce miniimagenet --data features.npz --shot 1 5
      metaleo reproduce miniimagenet --data features.npz --shot 1 --rows leo meta-sgd
      metaleo reproduce tieredimagenet --data embeddings/tieredImageNet/center
    """

    dataset: Annotated[Literal["miniimagenet", "tieredimagenet", "sample"], tyro.conf.Positional]
    """Whose numbers of the paper to put beside; `sample` is the part of miniImageNet in this package."""
    data: Text = None
    """Features of that data set: a file (.npz, .safetensors) or a folder of the authors' pickles."""
    shot: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N ...]", help_behavior_hint="")] = ()
    """Labelled examples per class (1 and 5; 1 with --quick)."""
    rows: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROW [ROW ...]", help_behavior_hint="")] = ("all",)
    """Rows of the table (all); a wrong name lists them."""
    quick: bool = False
    """Few trials, steps, seeds and tasks: minutes on a CPU, to see the whole protocol at work."""
    trials: Int = None
    """Trials of each search (64; quick: 8)."""
    search_steps: Int = None
    """Meta-steps of the trials that get to the end (20,000; quick: 400)."""
    final_steps: Int = None
    """Meta-steps of the final runs at most (20,000; quick: 400)."""
    seeds: Int = None
    """Final runs (5; quick: 2)."""
    tasks: Int = None
    """Test tasks (50,000; quick: 1,000)."""
    seed: int = 0
    """Of everything random; final runs use this and the next ones."""
    out: Place = None
    """Folder (reproduce-<dataset>)."""
    json: bool = False
    """Print the report as JSON on standard output."""

    def run(self) -> None:
        from metaleo.data.feature_files import load_data

        with needs_extra("search"):
            from metaleo.experiments.reproduce import ROWS, ReproductionPlan, reproduce

        if self.data is None and self.dataset != "sample":
            raise BadInput(
                f"{self.dataset} needs --data: its features as .npz or .safetensors, or the folder of the authors' "
                "embeddings; `metaleo reproduce sample` needs nothing"
            )
        source = "sample" if self.data is None else str(Path(self.data).resolve())
        metaset = load_data(source)
        quick = {
            "trials": 8, "search_steps": 400, "halvings": 2, "final_steps": 400, "validate_every": 50,
            "validation_tasks": 200, "seeds": 2, "tasks": 1000,
        }  # fmt: skip
        names = ("trials", "search_steps", "final_steps", "seeds", "tasks")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        plan = ReproductionPlan(self.dataset, source, seed=self.seed, **((quick if self.quick else {}) | given))
        shots = self.shot or ((1,) if self.quick else (1, 5))
        rows = tuple(ROWS) if "all" in self.rows else self.rows
        folder = self.out or Path(f"reproduce-{self.dataset}")
        progress.say(f"{source}: {metaset.describe()}")
        report = reproduce(plan, metaset, shots, rows, folder, self.command(shots, given), progress)
        progress.say(f"report: {folder}/report.md, .json, .png")
        if self.json:
            print(json.dumps(report, indent=2))

    def command(self, shots: tuple[int, ...], given: dict[str, int]) -> str:
        """What to type for the same numbers."""
        parts = ["metaleo", "reproduce", self.dataset]
        parts += ["--data", Path(self.data).name] if self.data else []
        parts += ["--shot", *map(str, shots)]
        parts += [] if "all" in self.rows else ["--rows", *self.rows]
        parts += ["--quick"] if self.quick else []
        for name, value in (given | ({"seed": self.seed} if self.seed else {})).items():
            parts += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(parts)
