"""Uploaded tables: read from memory, and refused if they would unpack to more than the limit."""

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


def read_upload(body: bytes, name: str, most: int) -> Table:
    """Read a table from the bytes of a file, whose suffix defines the format; at most `most` bytes once unpacked."""
    path = Path(Path(name).name)
    checks = {".csv": check_csv, ".npz": check_npz, ".parquet": check_parquet}
    if path.suffix.lower() not in checks:
        raise BadInput(f"{name!r} is not a table: its name must end in .csv, .npz or .parquet")
    if not body:
        raise BadInput(f"{path} is empty")
    try:
        checks[path.suffix.lower()](body, most)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    except Exception as error:  # parsers may raise anything on a damaged file
        raise BadInput(f"{path} cannot be read ({' '.join(str(error).split())[:200]})") from error
    return read_table(path, content=body)


def check_csv(body: bytes, most: int) -> None:
    del most  # CSV is not compressed
    check_rows(body.count(b"\n"))
    delimiter, _ = find_marks(Path(), ".csv", body)
    head = next(csv.reader(io.TextIOWrapper(io.BytesIO(body), "utf-8", newline=""), delimiter=delimiter), [])
    check_columns(len(head))


def check_npz(body: bytes, most: int) -> None:
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        check_size(sum(member.file_size for member in archive.infolist()), most)
        for member in archive.infolist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape = read(file)[0]
            check_rows(math.prod(shape[:-1]) if len(shape) > 1 else (shape or (1,))[0])


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
        chunks = [group.column(index) for group in groups for index in range(metadata.num_columns)]
        check_size(sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks), most)
        texts = [schema.column(index).path for index in range(metadata.num_columns)
                 if schema.column(index).physical_type == "BYTE_ARRAY"]  # fmt: skip
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
