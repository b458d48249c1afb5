"""Feature files: `.npz` and `.safetensors` (read and write), the authors' pickles (read), and built-in data (read).

A file holds either `features [class, image, dim]` with `class_names [class]` and `split [class]`, or flat
`features [n, dim]` with `labels [n]` and `split [n]`. Features may be integers with a `scale [dim]`. A
`.safetensors` file cannot hold arrays of strings, so names and splits are JSON lists in its header. Without a `split`,
classes are split at random, with a fixed seed. The module `tables` reads tables (.csv, .parquet …).
"""

import dataclasses
import importlib.resources
import io
import json
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from metaleo._io.files import atomic_write
from metaleo._io.json_values import Label, convert, parse_json
from metaleo.data.metaset import MetaSet
from metaleo.data.safe_unpickling import FILES, read_folder
from metaleo.data.splits import split_names
from metaleo.data.tables import (
    LABELS,
    SUFFIXES,
    Table,
    as_label,
    check_labels,
    from_arrow,
    is_table,
    read_arrow,
    show,
    to_metaset,
    warn_of_oddities,
)
from metaleo.errors import BadInput, one_line

BUILTIN = {"sample": "miniimagenet.safetensors", "strokes": "strokes.npz", "intents": "intents.safetensors"}
"""Built-in data by name: real miniImageNet features, pen strokes of handwritten characters, sentence embeddings."""
NUMPY_TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
}  # fmt: skip


def load_data(source: str | Path, label: str | None = None, ignore: Sequence[str] = ()) -> MetaSet:
    """Read feature vectors, grouped by class.

    Warns of columns that look like ids, and of rows that repeat.

    Args:
        source: A feature file (.npz, .safetensors), a table with a column `label` (.csv, .tsv, .parquet, or a folder
            that Hugging Face's save_to_disk wrote), a folder of the authors' embedding pickles, or the name of
            built-in data: sample, strokes or intents.
        label: For a table, the column of the labels, if that is not `label`.
        ignore: For a table, columns of numbers that are no part of the vector.

    Returns:
        The vectors by class; each class belongs to train, val or test.

    Examples:
        >>> from metaleo import load_data
        >>> load_data("sample").describe()
        '100 classes (64 train, 16 val, 20 test), 100 examples each, 640 numbers per example'
    """
    path = Path(source)
    if (label is not None or ignore) and not is_table(path):
        raise BadInput(f"{source} is no table, so it has no columns to choose with `label=` or `ignore=`")
    if source in BUILTIN:
        return load_builtin(str(source))
    if path.suffix in READERS and path.is_file():
        return read_feature_file(path)
    if is_table(path) and path.exists():
        table = read_table(path, label, ignore)
        try:
            metaset = to_metaset(table)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from error
        warn_of_oddities(table, path)
        return metaset
    if path.is_dir():
        if any((path / name).is_file() for name in FILES.values()):
            return read_folder(path)
        inside = sorted({str(found.parent) for found in path.glob(f"**/{FILES['train']}")})
        hint = f"; did you mean {' or '.join(inside)}?" if inside else f" (no {FILES['train']} in it)"
        raise BadInput(f"{path} is a folder without features{hint}")
    if not path.exists():
        raise BadInput(
            f"{path} does not exist; `data=` is a .npz, .safetensors, .csv or .parquet file, a folder, or "
            f"{', '.join(BUILTIN)}"
        )
    known = ", ".join((*READERS, *SUFFIXES))
    raise BadInput(f"{path} is not a feature file: its name ends in none of {known}")


def read_table(
    path: Path,
    label: str | None = None,
    ignore: Sequence[str] = (),
    content: bytes | None = None,
    columns: Sequence[str] = (),
) -> Table:
    """Read a table in the format of the file's suffix; `content`, if given, replaces the bytes on disk.

    If columns of numbers are named, they form the vector, in this order, and other numbers stand beside it.
    """
    if content is None and not path.exists():
        raise BadInput(f"{path} does not exist")
    suffix = path.suffix.lower()
    try:
        if suffix in (".npz", ".safetensors"):
            return table_of_features(path, suffix, content, label, ignore)
        if is_table(path):
            return from_arrow(read_arrow(path, suffix, content, label), label, ignore, columns)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    except Exception as error:  # the parsers can raise anything on a damaged file
        raise BadInput(f"{path} cannot be read ({one_line(error)})") from error
    raise BadInput(
        f"{path} is no table of vectors: that is a .csv, .tsv, .parquet, .npz or .safetensors file, or a folder that "
        f"Hugging Face's save_to_disk has written"
    )


def table_of_features(
    path: Path, suffix: str, content: bytes | None, label: str | None, ignore: Sequence[str]
) -> Table:
    """Read a feature file, with or without labels, as a table."""
    if ignore:
        raise BadInput("a feature file has no columns to ignore")
    if content is not None and suffix != ".npz":
        raise BadInput("only .csv, .tsv, .parquet and .npz files are read from memory")
    if content is None:
        fields = read_npz(path) if suffix == ".npz" else read_safetensors(path)
    else:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            fields = {name: archive[name] for name in archive.files}
    if "features" not in fields:
        raise BadInput(f"it holds {show(sorted(fields)) or 'nothing'}, but no `features`")
    features = fields["features"]
    if label is not None and label not in fields:
        raise BadInput(f"there is no array {label!r}; there are {show(sorted(fields))}")
    found = label or next((name for name in LABELS if name in fields), None)
    if found is not None:
        fields["labels"] = fields[found]
    if features.ndim == 2 and "class_names" not in fields and "scale" not in fields:
        if not (features.dtype.kind in "fiu" or features.dtype == ml_dtypes.bfloat16) or not features.size:
            raise BadInput(f"`features` must be numbers [n, dim], not {features.dtype} {list(features.shape)}")
        vectors = np.asarray(features, np.float32)
        beside = {name: np.ravel(fields[name]).tolist() for name in ("labels", "split") if name in fields}
        for name, values in beside.items():
            if len(values) != len(vectors):
                raise BadInput(f"{len(vectors)} rows of `features` need as many `{name}`, not {len(values)}")
        if not np.isfinite(vectors).all():
            raise BadInput(f"`features` hold NaN or Inf in row {np.argwhere(~np.isfinite(vectors))[0][0]}")
        labels = [as_label(value) for value in beside["labels"]] if "labels" in beside else None
        check_labels(labels, found)
        return Table(vectors, labels, [str(value) for value in beside["split"]] if "split" in beside else None)
    unsplit = np.full(len(features), "test")  # a placeholder: these rows are not for training
    metaset = assemble({"split": unsplit, **fields})
    order = np.argsort(metaset.rows)  # restores the order of the file
    names, splits = (
        np.repeat(np.array(each, object), metaset.counts)[order].tolist()
        for each in (metaset.class_names, metaset.splits)
    )
    splits = splits if "split" in fields else None
    return Table(metaset.read(metaset.rows[order]), names, splits)


def read_feature_file(path: Path) -> MetaSet:
    try:
        fields = READERS[path.suffix](path)
    except BadInput:
        raise
    except Exception as error:  # the parsers can raise anything on a damaged file
        raise BadInput(f"{path} is truncated or not a {path.suffix} file ({one_line(error)})") from error
    try:
        return assemble(fields)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def load_builtin(name: str) -> MetaSet:
    folder = importlib.resources.files("metaleo") / "assets" / "data"
    with importlib.resources.as_file(folder / BUILTIN[name]) as path:
        return load_data(path)


def assemble(fields: dict[str, Any]) -> MetaSet:
    """Make a `MetaSet` from the named fields of a feature file."""
    if "features" not in fields:
        raise BadInput(f"not a feature file: it holds {', '.join(sorted(fields)) or 'nothing'}, but no `features`")
    features = fields["features"]
    if features.ndim not in (2, 3) or not (features.dtype.kind in "fiu" or features.dtype == ml_dtypes.bfloat16):
        raise BadInput(
            f"`features` must be numbers [class, image, dim] or [n, dim], not {features.dtype} {list(features.shape)}"
        )
    if features.size == 0:
        raise BadInput("`features` is empty")
    scale = fields.get("scale")
    if scale is not None:
        scale = np.asarray(scale)
        if scale.dtype.kind not in "fiu":
            raise BadInput(f"`scale` must be numbers, not {scale.dtype}")
        scale = scale.astype(np.float32)
        same_length("scale", scale, "number of a row", features.shape[-1])
    known = {name: names_in(name, fields[name]) for name in STRINGS if name in fields}
    if features.ndim == 3:
        ways = len(features)
        names = known.get("class_names", np.arange(ways))
        same_length("class_names", names, "class", ways)
        splits = known["split"] if "split" in known else np.array(split_names(list(map(str, names))), object)
        same_length("split", splits, "class", ways)
        return MetaSet.from_classes(features, tuple(map(str, names)), tuple(map(str, splits)), scale)
    if "labels" not in known:
        raise BadInput("flat `features [n, dim]` need `labels [n]`")
    labels = known["labels"]
    same_length("labels", labels, "row", len(features))
    names = known.get("class_names") if labels.dtype.kind in "iu" else None  # labels are positions in it
    if names is not None and names.ndim != 1:
        raise BadInput(f"`class_names` has shape {list(names.shape)}; it must be a list")
    if names is not None and (labels.min() < 0 or labels.max() >= len(names)):
        raise BadInput(f"`labels` go from {labels.min()} up to {labels.max()}, but there are {len(names)} class_names")
    if "split" in known:
        splits = known["split"]
    else:
        classes, places = np.unique(labels, return_inverse=True)
        splits = np.array(split_names([str(one if names is None else names[one]) for one in classes]), object)[places]
    if names is not None and splits.shape == names.shape != labels.shape:
        splits = splits[labels]
    same_length("split", splits, "row", len(features))
    metaset = MetaSet.from_labels(features, labels, splits, scale)
    if names is None:
        return metaset
    return dataclasses.replace(metaset, class_names=tuple(str(names[int(index)]) for index in metaset.class_names))


def names_in(name: str, values: Any) -> np.ndarray:
    """Names as Python's strings, or numbers; NumPy's own strings would all be as long as the longest."""
    if not isinstance(values, np.ndarray):  # from JSON
        values = convert(list[Label], values, f"`{name}`")
        whole = all(type(one) is int and abs(one) < 2**63 for one in values)
        return np.array(values, np.int64) if whole else np.array([str(one) for one in values], object)
    if values.dtype.kind not in "iufbSU":
        raise BadInput(f"`{name}` must be names or numbers, not {values.dtype}")
    if values.dtype.kind not in "SU" or values.ndim != 1:
        return values
    return np.array(
        [one.decode("utf-8", "replace") if isinstance(one, bytes) else one for one in values.tolist()], object
    )


def same_length(name: str, values: np.ndarray, unit: str, expected: int) -> None:
    if values.shape != (expected,):
        raise BadInput(f"`{name}` has shape {list(values.shape)}; {expected} are needed, one per {unit}")


def read_npz(path: Path) -> dict[str, Any]:
    """Read arrays by name; `features` are memory-mapped unless they are compressed."""
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:  # closes a damaged zip too
        names = archive.files
        fields = {name: archive[name] for name in names if name != "features"}
        if "features" in names:
            with zipfile.ZipFile(path) as zipped:
                member = zipped.getinfo("features.npy")
            stored = member.compress_type == zipfile.ZIP_STORED
            fields["features"] = map_member(path, member.header_offset) if stored else archive["features"]
    return fields


def map_member(path: Path, offset: int) -> np.ndarray:
    """Memory-map the uncompressed array whose zip entry begins at `offset`."""
    with open(path, "rb") as file:
        file.seek(offset + 26)  # in a zip's local header: the lengths of the name and of the extra field
        name_length, extra_length = struct.unpack("<HH", file.read(4))
        file.seek(offset + 30 + name_length + extra_length)
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise BadInput(f"{path}: `features` are Python objects, not numbers")
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def read_safetensors(path: Path) -> dict[str, Any]:
    """Read arrays by name, with `features` memory-mapped, and the strings in the header."""
    with safetensors.safe_open(path, framework="np") as archive:  # checks sizes and offsets
        header = archive.metadata() or {}
        fields: dict[str, Any] = {name: parse_json(header[name]) for name in STRINGS if name in header}
        fields |= {name: archive.get_tensor(name) for name in archive.keys() if name != "features"}  # noqa: SIM118
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        layout = parse_json(file.read(length)).get("features")
    if layout is not None:
        begin, dtype = layout["data_offsets"][0], np.dtype(NUMPY_TYPES[layout["dtype"]])
        fields["features"] = np.memmap(path, dtype, "r", 8 + length + begin, tuple(layout["shape"]))
    return fields


READERS = {".npz": read_npz, ".safetensors": read_safetensors}
STRINGS = ("class_names", "split", "labels")


def save_data(metaset: MetaSet, path: str | Path) -> None:
    """Write a feature file, as one array [class, image, dim] if all classes have the same size.

    Args:
        metaset: The vectors to write.
        path: The file to write; its name ends in .npz or .safetensors.

    Examples:
        >>> import tempfile
        >>> from metaleo import load_data, save_data
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_data(load_data("sample").subset("test"), f"{folder}/test.npz")
        ...     load_data(f"{folder}/test.npz").dim
        640
    """
    path = Path(path)
    order = metaset.features[metaset.rows]
    fields: dict[str, np.ndarray] = {} if metaset.scale is None else {"scale": metaset.scale}
    names, splits = list(metaset.class_names), list(metaset.splits)
    if np.ptp(metaset.counts) == 0:
        fields["features"] = order.reshape(len(metaset.counts), -1, metaset.dim)
    else:
        fields["features"] = order
        fields["labels"] = np.repeat(np.arange(len(metaset.counts)), metaset.counts)
    with atomic_write(path) as temporary:
        if path.suffix == ".npz":
            if any(name.endswith("\0") for name in metaset.class_names):
                raise BadInput(f"{path}: a class name ends in a NUL character, which only .safetensors files hold")
            with open(temporary, "wb") as file:
                np.savez(file, class_names=np.array(names), split=np.array(splits), allow_pickle=False, **fields)
        elif path.suffix == ".safetensors":
            header = {"class_names": json.dumps(names), "split": json.dumps(splits)}
            safetensors.numpy.save_file(fields, temporary, header)
        else:
            raise BadInput(f"{path}: a feature file's name ends in .npz or .safetensors")
