"""Tables of feature vectors: .csv, .tsv, .parquet, Hugging Face data sets on disk, and feature files.

A table has one row per example. The vector is one column of lists, or else all columns of numbers; other columns are
stored in `beside`. The label is in the column `label` unless another is named; rows without one are to be predicted.
"""

import dataclasses
import io
import math
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

from metaleo.data.metaset import MetaSet
from metaleo.data.splits import SHARES, Shares, split_names
from metaleo.errors import BadInput, needs_extra

LABELS = ("label", "labels")
"""Default names of the label column, and of the labels in a feature file."""
SPLIT = "split"
SUFFIXES = (".csv", ".tsv", ".parquet")
HEAD_BYTES = 2**20
"""How much of a line is read to find out what separates its columns."""


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Feature vectors with their labels, splits and other columns."""

    vectors: Float32[np.ndarray, "row dim"]
    labels: list[str] | None
    """The label of each row; an empty string where a row has none."""
    splits: list[str] | None = None
    beside: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    """All other columns, as text."""
    images: list[bytes] | None = None
    """Encoded images, one per row, if the table holds images instead of vectors."""
    columns: tuple[str, ...] = ()
    """Names of the columns of numbers that form the vector; empty if it is one column of lists."""

    def labelled(self, present: bool = True) -> "Table":
        """Return the rows with a label, or with `present=False` those without one."""
        labels = self.labels if self.labels is not None else [""] * len(self.vectors)
        rows = [row for row, label in enumerate(labels) if bool(label) == present]
        return Table(
            self.vectors[rows],
            [labels[row] for row in rows],
            None if self.splits is None else [self.splits[row] for row in rows],
            {name: [column[row] for row in rows] for name, column in self.beside.items()},
            columns=self.columns,
        )

    def arranged(self, columns: Sequence[str]) -> "Table":
        """Return the table with the vector formed by these columns, in this order."""
        if not columns or not self.columns or tuple(columns) == self.columns:
            return self
        require_columns(columns, self.columns)
        place = {name: index for index, name in enumerate(self.columns)}
        vectors = np.ascontiguousarray(self.vectors[:, [place[name] for name in columns]])
        return dataclasses.replace(self, vectors=vectors, columns=tuple(columns))


def is_table(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES or is_dataset(path)


def is_dataset(path: Path) -> bool:
    """Return whether the path is a folder that Hugging Face's `save_to_disk` wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def read_arrow(path: Path, suffix: str, content: bytes | None, label: str | None) -> Any:
    if content is None and path.is_dir():
        return read_dataset(path)
    with needs_extra("tables"):
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet

    source = str(path) if content is None else pa.BufferReader(content)
    if suffix == ".parquet":
        return pyarrow.parquet.read_table(source)
    delimiter, decimal_point = find_marks(path, suffix, content)
    parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    text = dict.fromkeys((*LABELS, SPLIT, *([label] if label else [])), pa.string())  # keeps 007 apart from 7
    typing = pyarrow.csv.ConvertOptions(strings_can_be_null=False, column_types=text, decimal_point=decimal_point)
    return pyarrow.csv.read_csv(source, parse_options=parsing, convert_options=typing)


def find_marks(path: Path, suffix: str, content: bytes | None) -> tuple[str, str]:
    """What separates the columns of a text table, and the decimals of its numbers.

    Spreadsheets write semicolons where commas mark decimals; the line of names tells, and the one after it.
    """
    if suffix == ".tsv":
        return "\t", "."
    with open(path, "rb") if content is None else io.BytesIO(content) as file:
        names, values = (re.sub(r'"[^"]*"', "", file.readline(HEAD_BYTES).decode("utf-8", "replace")) for _ in range(2))
    if "," in names or ";" not in names:
        return ",", "."
    return ";", "," if re.search(r"(^|;)\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*(;|$)", values) else "."


def read_dataset(folder: Path) -> Any:
    """Read a Hugging Face data set as an Arrow table; the splits of a dataset dict become a column."""
    with needs_extra("huggingface"):
        import datasets
    import pyarrow as pa

    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.Dataset):
        return with_class_names(found)
    tables = []
    for name, part in found.items():
        table = with_class_names(part)
        tables.append(table if SPLIT in table.column_names else table.append_column(SPLIT, [[name] * len(table)]))
    return pa.concat_tables(tables)


def with_class_names(dataset: Any) -> Any:
    """The Arrow table of a data set, with names in the place of the integers that encode classes."""
    import pyarrow as pa
    from datasets import ClassLabel

    table = dataset.with_format("arrow")[:]
    for place, name in enumerate(table.column_names):
        feature = dataset.features[name]
        if isinstance(feature, ClassLabel):
            numbers = table[name].to_pylist()  # -1 marks a row without a label
            names = [None if number is None or number < 0 else feature.names[number] for number in numbers]
            table = table.set_column(place, name, [pa.array(names, pa.string())])
    return table


def require_columns(wanted: Sequence[str], there: Sequence[str]) -> None:
    missing = next((name for name in wanted if name not in set(there)), None)
    if missing is not None:
        raise BadInput(f"there is no column of numbers {missing!r}; the vector is made of {show(wanted)}")


def from_arrow(table: Any, label: str | None, ignore: Sequence[str], columns: Sequence[str] = ()) -> Table:
    """Make a table of an Arrow table; `columns`, if given, form the vector, and other numbers are kept as text."""
    import pyarrow as pa

    names = table.column_names
    if all(is_number(name) for name in names):
        raise BadInput(f"its first line must name the columns, and reads {show(names)}")
    if len(set(names)) < len(names):
        raise BadInput(f"two columns are called {next(name for name in names if names.count(name) > 1)!r}")
    for name in (*([label] if label else []), *ignore):
        if name not in names:
            raise BadInput(f"there is no column {name!r}; there are {show(names)}")
    label = label or next((name for name in LABELS if name in names), None)
    kept = [name for name in names if name not in (label, SPLIT, *ignore)]
    kinds = {name: table.schema.field(name).type for name in kept}
    lists = [name for name, kind in kinds.items() if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
             or pa.types.is_large_list(kind)]  # fmt: skip
    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    numbers = [name for name, kind in kinds.items() if any(test(kind) for test in numeric) and not is_index(name)]
    pictures = [name for name, kind in kinds.items() if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0]
    spare: list[str] = []
    if columns and not lists and not pictures:
        require_columns(columns, numbers)
        spare, numbers = [name for name in numbers if name not in set(columns)], list(columns)
    vector = lists or ([] if pictures else numbers)
    others = [name for name in kept if name not in (*vector, *pictures)]
    text = {name: ["" if value is None else str(value) for value in table[name].to_pylist()] for name in others}
    labels = None if label is None else [as_label(value) for value in table[label].to_pylist()]
    splits = [str(value) for value in table[SPLIT].to_pylist()] if SPLIT in names else None
    if len(table) == 0:
        raise BadInput("it has no rows")
    check_labels(labels, label)
    coded = next(
        (name for name in (label, *others) if name and pa.types.is_binary(table.schema.field(name).type)), None
    )
    if coded is not None:
        raise BadInput(f"column {coded} is not UTF-8 text")
    if pictures and not lists:
        images = [value["bytes"] or b"" for value in table[pictures[0]].to_pylist()]
        return Table(np.zeros((len(table), 0), np.float32), labels, splits, text, images)
    for name in others:
        if name not in spare:
            check_text(name, text[name])
    if len(lists) > 1:
        raise BadInput(f"columns {show(lists)} all hold vectors; leave out all but one with `ignore=`")
    if lists:
        vectors = from_lists(table[lists[0]].to_pylist(), lists[0])
    elif numbers:
        values = [table[name].to_numpy(zero_copy_only=False) for name in numbers]
        with np.errstate(over="ignore"):  # what is too large for float32 becomes Inf, and is found below
            vectors = np.stack([column.astype(np.float32) for column in values], axis=1)
    else:
        raise BadInput(f"no column holds numbers; there are {show(names)}")
    bad = np.argwhere(~np.isfinite(vectors))
    if len(bad):
        row, column = bad[0]
        raise BadInput(f"row {row + 1} has no finite number in column {lists[0] if lists else numbers[column]}")
    return Table(
        np.ascontiguousarray(vectors, np.float32), labels, splits, text, columns=() if lists else tuple(numbers)
    )


def is_index(name: str) -> bool:
    """Return whether this is the name of an index column (row numbers), as pandas writes it."""
    return not name or name.startswith(("__index_level_", "Unnamed: "))


def check_text(name: str, values: list[str]) -> None:
    """Refuse a column of numbers that is text only because of a few words: it would be missing from the vector."""
    told = [(row, value) for row, value in enumerate(values) if value]
    words = [(row, value) for row, value in told if not is_number(value)]
    if words and 2 * len(words) < len(told):
        row, value = words[0]
        raise BadInput(f"column {name} holds numbers, but row {row + 1} has {value[:40]!r}; mend it, or use `ignore=`")


def from_lists(values: list[Any], name: str) -> Float32[np.ndarray, "row dim"]:
    lengths = [0 if value is None else len(value) for value in values]
    other = next((row for row, length in enumerate(lengths) if length != lengths[0]), None)
    if other is not None or not lengths[0]:
        row = other or 0
        raise BadInput(f"row {row + 1} of column {name} has {lengths[row]} numbers, and the first has {lengths[0]}")
    vectors = np.asarray(values, np.float32)
    if vectors.ndim != 2:
        raise BadInput(f"column {name} holds lists of lists; a vector is one list")
    return vectors


def as_label(value: Any) -> str:
    """Convert a label to text: empty if missing, and without a decimal point if it is a whole float.

    A column of integers with missing values is often stored as floats.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def check_labels(labels: list[str] | None, name: str | None) -> None:
    """Refuse a column of measurements: numbers of which some are fractions are not the names of classes."""
    told = [(row, label) for row, label in enumerate(labels or ()) if label]
    if all(is_number(label) for _, label in told):
        for row, label in told:
            if math.isfinite(float(label)) and not float(label).is_integer():
                raise BadInput(f"column {name}: row {row + 1} has {label}, and a label is text or a whole number")


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def show(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:6])) + (f", … ({len(names)} in all)" if len(names) > 6 else "")


# Rows that can be read, but look wrong


def warn_of_oddities(table: Table, source: str | Path) -> None:
    """Warn of columns that are hardly features and of rows that repeat, one line for each kind.

    They spoil a classifier, and nothing else shows it.
    """
    for odd in (*strange_columns(table), *repeated_rows(table)):
        warnings.warn(f"{source}: {odd}", stacklevel=3)


def strange_columns(table: Table) -> Iterator[str]:
    """Say which columns look like row numbers, or drown the others because a vector is scaled to length one."""
    if not table.columns:
        return
    some = table.vectors[:ENOUGH_ROWS]
    counters, large = look_like_ids(some), drown_the_others(some)
    for found, what in (
        (counters, "a different whole number in every row, as an id has"),
        (large & ~counters, f"numbers {LARGER:,} times as large as the others'"),
    ):
        names = [name for name, strange in zip(table.columns, found, strict=True) if strange]
        if names:
            which = f"column {names[0]} has" if len(names) == 1 else f"columns {show(names)} have"
            yield f"{which} {what}; if this is no feature, leave it out with `ignore=` {shlex.join(names)}"


ENOUGH_ROWS = 10_000
"""Rows from the start of a table that show what its columns are."""
LARGER = 1000
"""How many times as large as the others' the numbers of a column must be to be remarkable."""


def look_like_ids(vectors: Float32[np.ndarray, "row dim"]) -> Bool[np.ndarray, " dim"]:
    """Find columns of whole numbers of which none occurs twice, where that is hardly chance.

    It is not where random numbers of the same range would hardly be in order, or hardly be all different; nor, from
    ten rows on, where nearly all other columns hold fractions.
    """
    rows, dim = vectors.shape
    whole = np.flatnonzero((vectors == np.round(vectors)).all(0))
    found = np.zeros(dim, bool)
    for column in whole:
        own = vectors[:, column].astype(np.float64)
        if len(np.unique(own)) < rows:
            continue
        steps = np.diff(own)
        in_order = (steps > 0).all() or (steps < 0).all()
        different = np.log1p(-np.arange(rows) / (np.ptp(own) + 1)).sum()
        chance = min(math.log(2) - math.lgamma(rows + 1) if in_order else 0, different)
        among_fractions = rows >= 10 and len(whole) <= max(2, dim // 10)
        found[column] = among_fractions or len(whole) * math.exp(chance) < 0.02
    return found & ~found.all()  # not all of them: without them nothing would be left


def drown_the_others(vectors: Float32[np.ndarray, "row dim"]) -> Bool[np.ndarray, " dim"]:
    """Find columns whose typical size is beyond `LARGER` times that of a typical column; zeros do not count."""
    sizes = np.array([np.median(np.abs(own[own != 0])) if own.any() else 0 for own in vectors.T])
    if np.count_nonzero(sizes) < 3:
        return np.zeros(len(sizes), bool)
    return sizes > LARGER * np.median(sizes[sizes > 0])


def repeated_rows(table: Table) -> Iterator[str]:
    """Say which rows with a label have the vector of an earlier one, with the same label or with another."""
    first: dict[int, int] = {}
    again, contrary = [], []
    for row, label in enumerate(table.labels or ()):
        if not label:
            continue
        before = first.setdefault(hash(table.vectors[row].tobytes()), row)
        if before != row:
            (again if label == table.labels[before] else contrary).append((before, row))
    for pairs, what in ((again, "repeat an earlier row"), (contrary, "repeat an earlier row under another label")):
        if pairs:
            before, row = pairs[0]
            total = len(table.vectors)
            yield f"{len(pairs):,} of {total:,} rows {what}; the first is row {row + 1}, as row {before + 1}"


def to_metaset(table: Table, seed: int = 0, shares: Shares = SHARES) -> MetaSet:
    """Group the labelled rows by class; classes are split by the column `split` or, without one, at random."""
    known = table.labelled()
    if table.images is not None:
        raise BadInput("it holds images, and vectors are needed, which `metaleo embed` makes of class folders")
    if table.labels is None:
        raise BadInput("there is no column `label`; name the one that holds the classes with `label=`")
    if not known.labels:
        raise BadInput("no row has a label")
    labels = np.array(
        known.labels, object
    )  # NumPy's own strings lose a NUL at their end, and are as long as the longest
    if known.splits is not None:
        splits = ["val" if split == "validation" else split for split in known.splits]  # Hugging Face's name for it
        return MetaSet.from_labels(known.vectors, labels, np.array(splits, object))
    names, classes = np.unique(labels, return_inverse=True)
    return MetaSet.from_labels(
        known.vectors, labels, np.array(split_names(names.tolist(), seed, shares), object)[classes]
    )
