"""What the commands share: flags, results on standard output, progress on standard error."""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import statistics
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from metaleo._io.progress import Bar, Progress
from metaleo.errors import BadInput, Interrupted

console = Console(stderr=True, highlight=False)
"""For progress and advice. Results go to standard output: `emit`."""

# Flags


def default_is(words: str, **others: Any) -> object:
    """A flag whose default is only known later; help describes it in words."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {words})", **others)


Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""A flag without a value, and without a `--no-` twin."""
Columns = Annotated[tuple[str, ...], default_is("none", metavar="COLUMN [COLUMN ...]")]
Counts = Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT [INT ...]")]
AsTrained = Annotated[int | None, default_is("as in training")]
DataOf = Annotated[str | None, default_is("the data it was trained on")]
Out = Annotated[Path, tyro.conf.arg(aliases=["-o"])]
Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")]


class Span(typing.NamedTuple):
    """A number, or a range of them."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


records: dict[type, tuple[str, ...]] = {}
"""Records of the library whose fields are flags, each with the fields that are not."""
registry = tyro.constructors.ConstructorRegistry()


@registry.struct_rule
def fields_as_flags(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
    """Flags for the fields of a record of the library: real defaults, and help from the docstring of each field."""
    if info.type not in records:
        return None
    about = attribute_docstrings(info.type)
    fields = [
        tyro.constructors.StructFieldSpec(
            field.name, as_typed(field.type), getattr(info.default, field.name), helptext=about.get(field.name, "")
        )
        for field in dataclasses.fields(info.type)
        if field.name not in records[info.type]
    ]
    return tyro.constructors.StructConstructorSpec(
        lambda **values: dataclasses.replace(info.default, **values), tuple(fields)
    )


@registry.primitive_rule
def span_of_numbers(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """A flag that takes 5 or 2..20."""
    if info.type is not Span:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar="INT|INT..INT", instance_from_str=lambda words: parse_span(words[0]),
        is_instance=lambda value: isinstance(value, Span), str_from_instance=lambda span: [str(span)],
    )  # fmt: skip


def parse_span(word: str) -> Span:
    least, dots, most = word.partition("..")
    try:
        found = Span(int(least), int(most if dots else least))
    except ValueError:
        raise ValueError(f"takes a whole number or a range such as 2..20, not {word!r}") from None
    return found


def as_typed(kind: Any) -> Any:
    """What a person can type for a field: of a number that may also be an array, the number."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else ()
    return float if float in options and type(None) not in options else kind


def attribute_docstrings(kind: type) -> dict[str, str]:
    """The string literal after each field of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in itertools.pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def flag_names(command: Any) -> list[str]:
    """The names of a command's flags, with those of the records inside it."""
    names = []
    for field in dataclasses.fields(command):
        value = getattr(command, field.name, None)
        if dataclasses.is_dataclass(value):
            names += [name for name in flag_names(value) if name not in records.get(type(value), ())]
        else:
            names.append(field.name)
    return names


def visible(record: Any) -> dict[str, Any]:
    """The values of a record's fields that are flags."""
    names = [field.name for field in dataclasses.fields(record)]
    return {name: getattr(record, name) for name in names if name not in records[type(record)]}


def check_new(out: Path, overwrite: bool, *suffixes: str) -> None:
    """Raise `BadInput` if a file cannot be written here, is there already, or has a name that says something else."""
    from metaleo._io.files import check_writable

    if suffixes and out.suffix not in suffixes:
        raise BadInput(f"{out}: the file's name must end in {' or '.join(suffixes)}")
    if out.exists() and not overwrite:
        raise BadInput(f"{out} exists; replace it with overwrite=True, or choose another `out=`")
    check_writable(out)


# Results


def emit(result: Any, as_json: bool, *shown: RenderableType) -> None:
    """Print a result on standard output: as JSON, or as the lines and tables that people read."""
    if as_json:
        print(json.dumps(json_safe(result), indent=2))
        return
    page = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for part in shown:
        page.print(part, markup=False, soft_wrap=isinstance(part, str))


def tell(text: str) -> None:
    """Say something about the work in hand, on standard error."""
    console.print(text, markup=False, soft_wrap=True)


def json_safe(value: Any) -> Any:
    """The same, with None for the numbers that JSON does not know: NaN and the infinities."""
    if isinstance(value, dict):
        return {name: json_safe(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, collapse_padding=True)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        table.add_row(*row)
    return table


def evaluation_table(evaluations: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Accuracy, NLL and calibration of each model; over several seeds, also their mean.

    Of models with a temperature: with it, as in all predictions, and then without.
    """
    headings, rows = ["", "accuracy (95 %)", "NLL", "calibration error"], []
    both = any(found.temperature is not None for found in evaluations.values())
    for name, found in evaluations.items():
        cells = [name, f"{100 * found.accuracy:.2f} ± {100 * found.accuracy_interval:.2f} %"]
        plain = [f"{found.nll:.3f} ± {found.nll_interval:.3f}", f"{100 * found.calibration_error:.1f} %"]
        if found.temperature is not None:
            cells += [f"{found.calibrated_nll:.3f} ± {found.calibrated_nll_interval:.3f}"]
            cells += [f"{100 * found.calibrated_error:.1f} %", *plain]
        else:
            cells += [*plain, *(["–", "–"] if both else [])]
        rows.append(cells)
    yield make_table([*headings, *(["before temperature:\nNLL", "\nerror"] if both else [])], rows)
    if len(evaluations) > 1 and all(name.startswith("seed ") for name in evaluations):
        accuracies = [100 * found.accuracy for found in evaluations.values()]
        mean, deviation = statistics.mean(accuracies), statistics.stdev(accuracies)
        yield f"over {len(accuracies)} seeds: {mean:.2f} ± {deviation:.2f} % (mean ± standard deviation)"


def finding_table(finding: Any) -> tuple[RenderableType, ...]:
    """A finding of an analysis: what it is about, its table, and how to read it."""
    return f"{finding.title}: {finding.where}", make_table(finding.headings, finding.rows), finding.note


def list_unreadable(unreadable: dict[str, str]) -> None:
    """Name the images that are left out, and why: the first ten of them."""
    for name, why in list(unreadable.items())[:10]:
        tell(f"left out {name}: {why}")
    if unreadable:
        tell(f"{len(unreadable):,} images could not be read and were left out")


# Progress


class ConsoleProgress(Progress):
    """Progress as messages and live bars on standard error."""

    def say(self, text: str) -> None:
        tell(text)

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
