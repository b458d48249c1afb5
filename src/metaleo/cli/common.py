"""What the commands share: flags, progress bars, tables."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from metaleo._io.progress import Bar, Progress
from metaleo.errors import Interrupted

console = Console(stderr=True, highlight=False)
"""For people; standard output is for results."""


def flag(metavar: str) -> object:
    """A flag that may be left out; its help says what then holds."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Int = Annotated[int | None, flag("N")]
Float = Annotated[float | None, flag("X")]
Text = Annotated[str | None, flag("TEXT")]
Place = Annotated[Path | None, flag("PATH")]
YesNo = Annotated[bool | None, flag("{True,False}")]


def given(command: object, kind: type) -> dict[str, object]:
    """The flags that were given, of those that this record has."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(command).items() if name in names and value is not None}


class ConsoleProgress(Progress):
    """Progress as messages and live bars on standard error."""

    def say(self, text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, name: str, total: int | None = None, note: str = "") -> Iterator[Bar]:
        with progress_bar() as bars:
            number = bars.add_task(name, total=total, note=note)

            def update(done: int | None = None, *, total: int | None = None, note: str | None = None) -> None:
                changes = {"completed": done, "total": total, "note": note}
                bars.update(number, **{key: value for key, value in changes.items() if value is not None})

            try:
                yield update
                update(note=bars.tasks[number].fields["note"].replace("compiling …", "done"))
            except Interrupted:
                bars.stop()
                raise


progress = ConsoleProgress()


def progress_bar() -> Bars:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    return Bars(*columns, console=console)


def json_safe(value: Any) -> Any:
    """The same, with None for the numbers that JSON does not know: NaN and the infinities."""
    if isinstance(value, dict):
        return {name: json_safe(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def list_unreadable(unreadable: dict[str, str]) -> None:
    """Images that are left out, and why; the first ten by name."""
    for name, why in list(unreadable.items())[:10]:
        console.print(f"left out {name}: {why}", markup=False, soft_wrap=True)
    if unreadable:
        console.print(f"{len(unreadable):,} images could not be read and were left out")


def print_finding(finding) -> None:
    from rich import box

    console.print(f"\n{finding.title}: {finding.where}", markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, collapse_padding=True)
    for index, heading in enumerate(finding.headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in finding.rows:
        table.add_row(*row)
    console.print(table)
    console.print(finding.note, markup=False)


def print_evaluations(title: str, evaluations: dict) -> None:
    import statistics

    table = Table(title=title, title_justify="left")
    for column in ("", "accuracy (95 %)", "NLL", "calibration error"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, found in evaluations.items():
        table.add_row(
            name,
            f"{100 * found.accuracy:.2f} ± {100 * found.accuracy_interval:.2f} %",
            f"{found.nll:.3f} ± {found.nll_interval:.3f}",
            f"{100 * found.calibration_error:.1f} %",
        )
    console.print(table)
    if len(evaluations) > 1 and all(name.startswith("seed ") for name in evaluations):
        accuracies = [100 * found.accuracy for found in evaluations.values()]
        console.print(
            f"over {len(accuracies)} seeds: {statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f} % "
            "(mean ± standard deviation)"
        )
