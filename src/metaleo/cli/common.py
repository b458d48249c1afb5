"""What the commands share: flags, progress bars, tables."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

say = Console(stderr=True, highlight=False)
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


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=say)


def speakable(value: Any) -> Any:
    """The same, with None for the numbers that JSON does not know: NaN and the infinities."""
    if isinstance(value, dict):
        return {name: speakable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [speakable(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def list_unreadable(unreadable: dict[str, str]) -> None:
    """Images that are left out, and why; the first ten by name."""
    for name, why in list(unreadable.items())[:10]:
        say.print(f"left out {name}: {why}", markup=False, soft_wrap=True)
    if unreadable:
        say.print(f"{len(unreadable):,} images could not be read and were left out")


MERITS = ("validation_accuracy", "validation_loss")


def show_merit(merit: dict[str, float], digits: int = 2) -> str:
    """An accuracy in per cent, or a loss as it is."""
    ((name, value),) = merit.items()
    return f"{100 * value:.{digits}f} %" if name.endswith("accuracy") else f"{value:.{digits + 1}f}"


def better_merit(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    choose = max if "validation_accuracy" in one else min
    return choose(one, other, key=lambda merit: next(iter(merit.values())))


def train_with_progress(run, name: str, go_on: str = ""):
    """Train, with a live bar: speed, accuracy (or loss) on training tasks, the best on validation tasks so far.

    Whoever interrupts it is told how to `go_on`, by default with `metaleo train`.
    """
    from metaleo import runs

    best: dict[int, dict[str, float]] = {}
    with progress_bar() as progress:
        bar = progress.add_task(name, total=run.config.steps, note="compiling …")

        def report(records):
            step = records[0]["step"]
            for record in records:
                own = {name: record[name] for name in MERITS if record.get(name) is not None}
                if own:
                    best[record["seed"]] = better_merit(best.get(record["seed"], own), own)
            training = {name: records[0].get(name) for name in ("query_accuracy", "query_loss")}
            name = next((name for name, value in training.items() if value is not None), None)
            note = f"{run.steps_per_second:,.0f} steps/s"
            if name is not None:
                note += f" · train {name.removeprefix('query_')} {show_merit({name: training[name]}, 1)}"
            if best:
                note += " · val " + ", ".join(show_merit(merit, 1) for merit in best.values())
            if any(record["skipped"] for record in records):
                note += f" · [red]{max(record['skipped'] for record in records)} steps skipped (NaN)[/red]"
            progress.update(bar, completed=step, note=note)

        try:
            state = run.train(report)
        except runs.Interrupted:
            progress.stop()
            go_on = go_on or f"go on with:\n  metaleo train --resume --out {run.folder}"
            say.print(f"stopped and saved; {go_on}")
            raise
        reached = int(state.step.max())
        note = progress.tasks[bar].fields["note"].replace("compiling …", "done")  # it may have been done before
        progress.update(bar, completed=reached, total=reached, note=note)
    return state


def score_with_progress(learner, episodes, seed: int, tasks: int, name: str):
    from metaleo.evaluation import evaluate

    return watch(name, tasks, lambda heard: evaluate(learner, episodes, seed, tasks, heard))


def watch(name: str, tasks: int, work):
    """Do work on this many tasks, with a bar."""
    with progress_bar() as progress:
        bar = progress.add_task(name, total=tasks, note="")
        return work(lambda done: progress.update(bar, completed=done))


def print_finding(finding) -> None:
    from rich import box

    say.print(f"\n{finding.title}: {finding.where}", markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, collapse_padding=True)
    for index, heading in enumerate(finding.headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in finding.rows:
        table.add_row(*row)
    say.print(table)
    say.print(finding.note, markup=False)


def print_reports(title: str, reports: dict) -> None:
    import statistics

    table = Table(title=title, title_justify="left")
    for column in ("", "accuracy (95 %)", "NLL", "calibration error"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, report in reports.items():
        table.add_row(
            name,
            f"{100 * report.accuracy:.2f} ± {100 * report.accuracy_interval:.2f} %",
            f"{report.nll:.3f} ± {report.nll_interval:.3f}",
            f"{100 * report.calibration_error:.1f} %",
        )
    say.print(table)
    if len(reports) > 1 and all(name.startswith("seed ") for name in reports):
        accuracies = [100 * report.accuracy for report in reports.values()]
        say.print(
            f"over {len(accuracies)} seeds: {statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f} % "
            "(mean ± standard deviation)"
        )
