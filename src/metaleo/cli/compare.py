"""`metaleo compare`."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich import box
from rich.table import Table

from metaleo.cli.common import console, progress
from metaleo.data.feature_files import BUILTIN
from metaleo.learners.registry import LEARNERS

if TYPE_CHECKING:
    from metaleo.experiments.compare import Comparison, ComparisonRow


@dataclasses.dataclass(frozen=True)
class Compare:
    """Meta-train several learners on the same data, test them on the same tasks, and rank them.

    Each learner starts from its preset for the shot and is kept at its best validation accuracy. The folder gets a
    table (compare.md), a figure (compare.png), results.json, and every model. Nothing is lost by Ctrl-C or a kill:
    the same command goes on where it was. With other --learners or --shot, what is there already is used again.

    Try:
      metaleo compare --learners leo meta-sgd nearest-centroid --steps 3000
      metaleo compare --data features.npz --shot 1 5 --out comparisons/mine
      metaleo compare --shot 1 --tasks 50000 --json
    """

    data: str = "sample"
    """Feature file (.npz, .safetensors), folder of the authors' pickles, or `sample`, the one in this package."""
    shot: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N ...]")] = (1, 5)
    """Labelled examples per class: one comparison for each."""
    learners: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")] = LEARNERS
    """Learners to compare (all); a wrong name lists them."""
    way: int = 5
    """Classes per task."""
    steps: int = 100_000
    """Meta-steps of each learner at most."""
    tasks: int = 10_000
    """Test tasks, the same for every learner."""
    seed: int = 0
    """Of everything random."""
    out: Path = Path("compare")
    """Folder for the results and the models."""
    overwrite: bool = False
    """Replace the comparison in --out."""
    json: bool = False
    """Print the results as JSON on standard output."""

    def run(self) -> None:
        from metaleo.experiments.compare import Comparison, compare

        source = self.data if self.data in BUILTIN else str(Path(self.data).resolve())
        plan = Comparison(source, self.shot, self.learners, self.way, self.steps, self.tasks, self.seed)
        results = compare(plan, self.out, self.overwrite, progress, lambda shot, rows: print_rows(plan, shot, rows))
        if self.json:
            print(json.dumps(results, indent=2))


def print_rows(plan: "Comparison", shot: int, rows: "list[ComparisonRow]") -> None:
    from metaleo.experiments.compare import cells, columns

    console.print(f"\n{plan.way}-way {shot}-shot, the same {plan.tasks:,} test tasks (±: 95 %; ECE: calibration error)")
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name in columns(plan.reference):
        heading = "\n".join(name.rsplit(" ", 1))  # so that the longest names fit eighty columns
        table.add_column(heading, justify="left" if name == "learner" else "right", no_wrap=True)
    for row in rows:
        style = "bold" if row.learner == plan.reference else None
        table.add_row(*cells(row, plan.reference), style=style)
    console.print(table, "")
