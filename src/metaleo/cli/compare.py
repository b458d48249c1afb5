"""`metaleo compare`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import RenderableType

from metaleo.cli.common import Columns, Counts, Out, Switch, default_is, emit, make_table, progress
from metaleo.data.feature_files import BUILTIN
from metaleo.learners.registry import LEARNERS

if TYPE_CHECKING:
    from metaleo.experiments.compare import Comparison, ComparisonRow


@dataclasses.dataclass(frozen=True)
class Compare:
    """Meta-train several learners on the same data, test them on the same tasks, and rank them.

    Each learner starts from its preset for the shot and is kept at its best validation accuracy. The folder gets a
    table (compare.md), a figure (compare.png), results.json, and every model. Nothing is lost by Ctrl-C or a kill:
    the same command goes on where it was. With other --learner or --shot, what is there already is used again. Below
    each table a sentence says which learner to use for such tasks. Models learn their temperatures on validation tasks.

    Try:
      metaleo compare --learner leo-anchored leo nearest-centroid logistic-regression --steps 3000
      metaleo compare --data features.npz --shot 1 5 --out comparisons/mine
      metaleo compare --shot 1 --tasks 50000 --json
    """

    data: str = "sample"
    """Table, feature file (.npz, .safetensors), folder of the authors' pickles, or data in this package: sample,
    strokes, intents."""
    label: Annotated[str | None, default_is("label")] = None
    """Of a table, the column of the labels."""
    ignore: Columns = ()
    """Of a table, columns of numbers that are no part of the vector."""
    shot: Counts = (1, 5)
    """Labelled examples per class: one comparison for each."""
    learner: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="(default: all)")
    ] = LEARNERS
    """Learners to compare (`metaleo list learners`)."""
    way: int = 5
    """Classes per task."""
    steps: int = 100_000
    """Meta-steps of each learner at most."""
    tasks: int = 10_000
    """Test tasks, the same for every learner."""
    seed: int = 0
    """Seed of all randomness."""
    out: Out = Path("compare")
    """Folder for the results and the models."""
    overwrite: Switch = False
    """Replace the comparison in --out."""
    json: Switch = False
    """Print the results as JSON."""

    def run(self) -> None:
        from metaleo.experiments.compare import Comparison, compare

        source = self.data if self.data in BUILTIN else str(Path(self.data).resolve())
        plan = Comparison(source, self.shot, self.learner, self.way, self.steps, self.tasks, self.seed,
                          self.label, self.ignore)  # fmt: skip
        tables: list[RenderableType] = []
        results = compare(
            plan,
            self.out,
            self.overwrite,
            progress,
            lambda shot, rows, advice: tables.extend((*comparison_table(plan, shot, rows), f"{advice}\n")),
        )
        emit(results, self.json, *tables)


def comparison_table(plan: "Comparison", shot: int, rows: "list[ComparisonRow]") -> tuple[RenderableType, ...]:
    from metaleo.experiments.compare import cells, columns

    title = f"{plan.way}-way {shot}-shot, the same {plan.tasks:,} test tasks "
    title += "(±: 95 %; ECE: calibration error, with the temperature of predictions)"
    headings = ["\n".join(name.rsplit(" ", 1)) for name in columns(plan.reference)]  # the longest fit eighty columns
    return title, make_table(headings, [cells(row, plan.reference) for row in rows])
