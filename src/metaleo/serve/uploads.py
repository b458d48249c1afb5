"""Uploaded tables: what they claim to hold is checked first, and nothing on the disk is read.

A file can claim less than it unpacks to, so this runs in a process with bounded memory: `reader`.
"""

import csv
import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from metaleo.data.feature_files import read_table
from metaleo.data.tables import Table, find_marks
from metaleo.errors import BadInput, needs_extra
from metaleo.serve.api import COLUMNS, ROWS


def read_upload(body: bytes, name: str, most: int, label: str | None = None) -> Table:
    """Read a table from the bytes of a file, whose suffix defines the format; at most `most` bytes once unpacked.

    `name` is a text for messages: only its suffix goes further, so that no file or folder of that name is opened.
    """
    name = name.replace("\\", "/").rpartition("/")[2]
    path = Path("upload" + Path(name).suffix.lower())
    checks = {".csv": check_csv, ".npz": check_npz, ".parquet": check_parquet}
    if path.suffix not in checks:
        raise BadInput(f"{name!r} is not a table: its name must end in .csv, .npz or .parquet")
    if not body:
        raise BadInput(f"{name} is empty")
    try:
        checks[path.suffix](body, most)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # parsers may raise anything on a damaged file
        raise BadInput(f"{name} cannot be read ({' '.join(str(error).split())[:200]})") from error
    try:
        table = read_table(path, label, content=body)
    except BadInput as error:
        if isinstance(error.__cause__, MemoryError):
            raise MemoryError from error
        raise BadInput(str(error).replace(str(path), name, 1)) from error
    try:
        check_rows(len(table.vectors))  # parsers differ in what they take for a line, so what was read counts
        check_columns(len(table.columns) + len(table.beside))
        check_size(table.vectors.nbytes, most)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from error
    return table


def check_csv(body: bytes, most: int) -> None:
    del most  # CSV is not compressed
    delimiter, _ = find_marks(Path(), ".csv", body)
    lines = csv.reader(io.TextIOWrapper(io.BytesIO(body), "utf-8", newline=""), delimiter=delimiter)
    filled = filter(None, lines)
    check_columns(len(next(filled, [])))
    check_rows(sum(1 for _ in filled))


def check_npz(body: bytes, most: int) -> None:
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        check_size(sum(member.file_size for member in archive.infolist()), most)
        for member in archive.infolist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
            check_rows(math.prod(shape[:-1]) if len(shape) > 1 else (shape or (1,))[0])
            check_size(math.prod(shape) * max(dtype.itemsize, 4), most)


def check_parquet(body: bytes, most: int) -> None:
    """Check the size of the numbers, and of each text column as if all texts were as long as the longest."""
    with needs_extra("tables"):
        import pyarrow as pa
        import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(pa.BufferReader(body)) as file:
        metadata, schema = file.metadata, file.schema
        check_columns(metadata.num_columns)
        check_rows(metadata.num_rows)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        columns = [schema.column(index) for index in range(metadata.num_columns)]
        check_size(
            sum(
                max(chunk.total_uncompressed_size, max(8, column.length or 0) * chunk.num_values)
                for group in groups
                for column, chunk in ((column, group.column(index)) for index, column in enumerate(columns))
            ),
            most,
        )
        texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    if texts:  # dictionary-encoded texts take little space, however often they are repeated
        table = pyarrow.parquet.read_table(pa.BufferReader(body), columns=texts, read_dictionary=texts)
        check_size(sum(len(column) * longest(column) for column in table.columns), most)


def longest(column: Any) -> int:
    """Upper bound on the bytes of the longest text of a column; for texts in lists, the bytes of all."""
    import pyarrow as pa

    chunks = [chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk for chunk in column.chunks]
    if all(pa.types.is_string(chunk.type) or pa.types.is_binary(chunk.type) for chunk in chunks):
        return max((len(text or "") for chunk in chunks for text in chunk.to_pylist()), default=0) * 4
    return sum(chunk.nbytes for chunk in chunks)


def check_rows(count: int) -> None:
    if count > ROWS:
        raise BadInput(f"a table may have {ROWS:,} rows, not {count:,}")


def check_columns(count: int) -> None:
    if count > COLUMNS:
        raise BadInput(f"a table may have {COLUMNS:,} columns, not {count:,}")


def check_size(size: int, most: int) -> None:
    if size > most:
        raise BadInput(f"unpacked it would take {size:,} bytes; {most:,} are allowed")
