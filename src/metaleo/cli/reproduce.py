"""`metaleo reproduce`."""

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from metaleo.cli.common import Switch, default_is, emit, make_table, progress, tell
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
    data: Annotated[str | None, default_is("the sample, for `sample` only")] = None
    """Features of that data set: a file (.npz, .safetensors) or a folder of the authors' pickles."""
    shot: Annotated[tuple[int, ...], default_is("1 5; 1 with --quick", metavar="INT [INT ...]")] = ()
    """Labelled examples per class."""
    rows: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROW [ROW ...]")] = ("all",)
    """Rows of the table; a wrong name lists them."""
    quick: Switch = False
    """Few trials, steps, seeds and tasks: minutes on a CPU, to see the whole protocol at work."""
    trials: Annotated[int | None, default_is("64; 8 with --quick")] = None
    """Trials of each search."""
    search_steps: Annotated[int | None, default_is("20,000; 400 with --quick")] = None
    """Meta-steps of the trials that get to the end."""
    final_steps: Annotated[int | None, default_is("20,000; 400 with --quick")] = None
    """Meta-steps of the final runs at most."""
    seeds: Annotated[int | None, default_is("5; 2 with --quick")] = None
    """Final runs."""
    tasks: Annotated[int | None, default_is("50,000; 1,000 with --quick")] = None
    """Test tasks."""
    seed: int = 0
    """Seed of all randomness; final runs use this and the next ones."""
    out: Annotated[Path | None, default_is("reproduce-DATASET", aliases=["-o"])] = None
    """Folder for searches, runs and the report."""
    overwrite: Switch = False
    """Replace the reproduction in --out."""
    json: Switch = False
    """Print the report as JSON."""

    @property
    def folder(self) -> Path:
        return self.out or Path(f"reproduce-{self.dataset}")

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
        tell(f"{source}: {metaset.describe()}")
        report = reproduce(
            plan, metaset, shots, rows, self.folder, self.command(shots, given), progress, self.overwrite
        )
        tables = [part for shot, found in report["shots"].items() for part in (f"{shot}-shot", table_2(found["rows"]))]
        emit(report, self.json, *tables)
        tell(f"report: {self.folder}/report.md, .json, .png")

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


def table_2(rows: list[dict[str, Any]]) -> Table:
    """Ours beside the paper's."""
    from metaleo.experiments.reproduce import ROWS

    def shown(mean: float, deviation: float | None) -> str:
        return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"

    return make_table(
        ("", "test accuracy (%)", "the paper (%)", "calibration error"),
        [
            (ROWS[row["row"]], shown(row["accuracy"], row["deviation"]),
             "–" if row["paper"] is None else shown(*row["paper"]), f"{100 * row['calibration_error']:.1f} %")
            for row in rows
        ],
    )  # fmt: skip
