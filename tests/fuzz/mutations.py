"""Ways to damage a file: its bytes, JSON in it, the zip around it, opcodes of a pickle, cells of a table."""

import copy
import io
import itertools
import json
import pickle
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

DEEP = "@deep@"
"""Stands for nesting that `json.dumps` itself could not write."""
OTHERS = (
    None, True, False, 0, -1, 1, 2, 3, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, 1e-300, 1e308,
    float("nan"), float("inf"), -float("inf"), "", "x", "0", "\0", "a\0", "\ud800", "ä" * 300, "a" * 100_000, "leo",
    "../../etc/passwd", [], [[]], [None], [1, 2, 3], ["a", ["b"]], [[1, "x"]], {}, {"a": 1}, {"": {}}, [0] * 1000, DEEP,
)  # fmt: skip
Mutation = Callable[[bytes, random.Random], bytes]


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    front = rng.random() < 0.7  # headers are at the front
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        end = min(len(changed), 400) if front else len(changed)
        changed[rng.randrange(end)] = rng.choice((0, 255, 127, rng.randrange(256), rng.randrange(256)))
    return bytes(changed)


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice((0, 1, 7, 8, 9, rng.randrange(len(data)), len(data) - 1))]


def splice(data: bytes, rng: random.Random) -> bytes:
    """Cut a piece out, put one in twice, or one of zeros."""
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    end = min(end, start + rng.choice((1, 8, 64, 4096)))
    piece = rng.choice((b"", data[start:end] * 2, bytes(end - start), rng.randbytes(8), data[:64]))
    return data[:start] + piece + data[end:]


# JSON


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all parts of a value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        found += nodes(each, (*path, name))
    return found


def mutate_value(value: Any, rng: random.Random) -> Any:
    """The value with some parts replaced, removed, renamed or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = nodes(value)
        tops = [path for path in paths if len(path) <= 2]  # else long lists of names would take all blows
        path = rng.choice(tops if rng.random() < 0.5 else paths)
        if not path:
            if rng.random() < 0.1:
                return copy.deepcopy(rng.choice(OTHERS))
            continue
        parent = value
        for step in path[:-1]:
            parent = parent[step]
        action = rng.random()
        if action < 0.75:
            parent[path[-1]] = other_than(parent[path[-1]], rng)
        elif action < 0.85:
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[rng.choice(("x", "kind", "dim", ""))] = parent[path[-1]]
        else:
            parent.append(parent[path[-1]])
    return value


def other_than(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        real = 1e308 if isinstance(value, int) and abs(value) > 10**308 else float(value)
        return rng.choice((value + 1, value - 1, -value, 2 * value, 0, real, str(value), 10**6, 2**32, 1e300))
    return copy.deepcopy(rng.choice(OTHERS))


def dump(value: Any) -> bytes:
    text = json.dumps(value)
    return text.replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000).encode()


def json_text(data: bytes, rng: random.Random) -> bytes:
    return dump(mutate_value(json.loads(data), rng))


# safetensors


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_safetensors(header: bytes, rest: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + rest


def safetensors_layout(data: bytes, rng: random.Random) -> bytes:
    """Another shape, type, place or name of an array."""
    header, rest = split_safetensors(data)
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    match rng.randrange(8):
        case 0:
            entry["dtype"] = rng.choice(
                ("F64", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "U8", "BOOL", "X", 3)
            )
        case 1:  # another type of the same size
            same = {
                "F32": ("I32", "U32"),
                "I32": ("F32", "U32"),
                "U8": ("I8", "BOOL", "F8_E4M3"),
                "I64": ("F64", "U64"),
            }
            entry["dtype"] = rng.choice(same.get(entry["dtype"], ("F64",)))
        case 2:  # another shape of the same size
            entry["shape"] = rng.choice((entry["shape"][::-1], [*entry["shape"], 1], [1, *entry["shape"]],
                                         [int(np.prod(entry["shape"]))]))  # fmt: skip
        case 3:
            entry["shape"] = rng.choice(([], [0], [2**62, 4], [-1], ["x"], None, [10**30]))
        case 4:
            entry["data_offsets"] = rng.choice(([0, 2**63], [8, 0], [0], None, [0, 1], [2**64, 2**65]))
        case 5:
            header[rng.choice(("x", "features", "weights", "a" * 1000))] = header.pop(name)
        case 6:
            del header[name]
        case 7:
            return join_safetensors(dump(mutate_value(header, rng)), rest)
    return join_safetensors(dump(header), rest)


def safetensors_metadata(data: bytes, rng: random.Random) -> bytes:
    """Other JSON in one of the strings of the header."""
    header, rest = split_safetensors(data)
    strings = header.get("__metadata__") or {"metaleo": "{}"}
    name = rng.choice(list(strings))
    try:
        strings[name] = dump(mutate_value(json.loads(strings[name]), rng)).decode()
    except ValueError:
        strings[name] = rng.choice(("", "[", "NaN", "null", '"5"', "[1, [2]]"))
    header["__metadata__"] = strings
    return join_safetensors(json.dumps(header).encode(), rest)


def safetensors_numbers(data: bytes, rng: random.Random) -> bytes:
    """NaN, Inf and huge numbers among the arrays."""
    header, rest = split_safetensors(data)
    changed = bytearray(rest)
    for _ in range(rng.choice((1, 10))):
        place = 4 * rng.randrange(max(len(changed) // 4, 1))
        changed[place : place + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"), 3e38, -3e38, 1e-40, 0)))
    return join_safetensors(json.dumps(header).encode(), bytes(changed[: len(rest)]))


# zip


def npz_members(data: bytes, rng: random.Random) -> bytes:
    """A zip whose members were swapped, renamed, dropped, doubled, compressed, or hold other arrays."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(members))
    match rng.randrange(8):
        case 0:
            del members[name]
        case 1:
            members[rng.choice(("features.npy", "labels.npy", "x", "../x.npy", "scale.npy"))] = members[name]
        case 2:
            members[name] = members[rng.choice(list(members))]
        case 3:
            members[name] = flip(members[name], rng)
        case 4:
            members[name] = truncate(members[name], rng)
        case 5 | 6:
            members[name] = npy_bytes(other_array(rng))
        case 7:
            members[name] = npy_header(members[name], rng)
    out = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(out, "w", method) as archive:
        for each, content in members.items():
            archive.writestr(each, content)
    return flip_tail(out.getvalue(), rng) if rng.random() < 0.1 else out.getvalue()


def flip_tail(data: bytes, rng: random.Random) -> bytes:
    """Damage the zip's own directory."""
    changed = bytearray(data)
    for _ in range(4):
        changed[-rng.randrange(1, 200)] = rng.randrange(256)
    return bytes(changed)


def npy_bytes(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=True)
    return out.getvalue()


def other_array(rng: random.Random) -> np.ndarray:
    return rng.choice((
        lambda: np.array(["a", "b", "c"]), lambda: np.array(["1.0", "x"]), lambda: np.array([b"a", b"\xff"]),
        lambda: np.array([1, "x", None], object), lambda: np.float32(3), lambda: np.zeros((0, 5), np.float32),
        lambda: np.full((12, 8), np.nan, np.float32), lambda: np.full((12, 8), 1e300), lambda: np.arange(12),
        lambda: -np.arange(12), lambda: np.arange(12) * 2**60, lambda: np.ones(12, bool), lambda: np.ones(12) * 1j,
        lambda: np.array(["train"] * 12), lambda: np.array(["a\0", "a", "b"] * 4),
        lambda: np.array(["2020-01-01"] * 12, "M8[D]"), lambda: np.ones((2, 2, 2, 2)), lambda: np.zeros(12, "V3"),
        lambda: np.zeros(12, [("a", "f4"), ("b", "U3")]), lambda: np.array(["é" * 1000, "x"] * 6),
    ))()  # fmt: skip


def npy_header(data: bytes, rng: random.Random) -> bytes:
    """Another shape or type in the header of an array."""
    length = int.from_bytes(data[8:10], "little")
    text = data[10 : 10 + length].decode("latin1")
    before = text.partition("'shape': ")[0]
    shape = rng.choice(("(10**9, 10**9), }", "(-1,), }", "(2147483648, 2147483648), }", "(), }", "('x',), }",
                        "(0, 9223372036854775807), }", "(4, 8), }", "__import__('os'), }", "(" * 5000))  # fmt: skip
    kind = rng.choice(("'<f8'", "'|O'", "'<U100000000'", "'<c16'", "[('a', '<f4')]", "'|V1000000000'", "3"))
    text = rng.choice((f"{before}'shape': {shape}", text.replace("'<f4'", kind).replace("'<i8'", kind)))
    header = text.encode("latin1")
    return data[:8] + len(header).to_bytes(2, "little") + header + data[10 + length :]


# Pickles

SNIPPETS = (
    b"r\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"p99999999999\n", b"N", b"}", b"]", b")", b"(", b"0", b"1", b"2", b"t",
    b"\x85", b"\x86", b"\x87", b"R", b"b", b"s", b"u", b"a", b"e", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n",
    b"c_codecs\nencode\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"K\xff", b"J\xff\xff\xff\xff", b"U\x04abcd",
    b"X\x02\x00\x00\x00\xff\xff", b"\x8b\xff\xff\xff\x7f", b"\x8a\xff" + b"\x7f" * 255, b"I" + b"9" * 5000 + b"\n",
    b"\x96\x00\x00\x00\x00\x00\x01\x00\x00", b"\x8e\x00\x00\x00\x00\x00\x01\x00\x00", b"T\xff\xff\xff\x7f", b"\x8f",
    b"\x91", b"\x81", b"\x92", b"Pid\n", b"Q", b"\x82\x01", b"ios\nsystem\n", b"o", b"\x97", b"\x98", b".",
    b"F1e999\n", b"Fnan\n", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"h\x00", b"j\x00\x00\x00\x00", b"q\x00",
    b"(" + b"]" * 50 + b"t", b"]q\x00" + b"h\x00\x86q\x00" * 40, b"K\x00q\x00" + b"h\x00h\x00\x86q\x00" * 60,
    b"}K\x00q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"Ns",
)  # fmt: skip


def pickle_opcodes(data: bytes, rng: random.Random) -> bytes:
    """Opcodes dropped, doubled, swapped, or put in."""
    try:
        places = [place for _, _, place in pickletools.genops(data)] + [len(data)]
    except Exception:  # not any more a pickle
        return splice(data, rng)
    parts = [data[start:end] for start, end in itertools.pairwise(places)]
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(parts))
        match rng.randrange(4):
            case 0:
                parts[place] = rng.choice(SNIPPETS)
            case 1:
                parts.insert(place, rng.choice(SNIPPETS))
            case 2:
                parts.insert(place, parts[rng.randrange(len(parts))])
            case 3 if len(parts) > 1:
                del parts[place]
    return b"".join(parts)


def pickle_values(data: bytes, rng: random.Random) -> bytes:
    """A pickle of other values, of our own making: the data are trusted here."""
    value = pickle.loads(data, encoding="latin1")
    others = (None, -1, [], [-1] * 4, [[1], [2]], "x", b"x", (1, (2, 3)), {"a": -1}, {1: 2}, 2**70, 1.5, ["x", "y"],
              {("a", ("b",)): 1}, np.ones(3), np.array(["a"]), np.ones((4, 3072), np.uint8))  # fmt: skip
    if isinstance(value, dict):
        for _ in range(rng.choice((1, 2))):
            name = rng.choice(list(value))
            if isinstance(value[name], list | np.ndarray) and len(value[name]) and rng.random() < 0.5:
                changed = list(value[name])
                changed[rng.randrange(len(changed))] = rng.choice(others)
                value[name] = changed
            else:
                value[name] = rng.choice(others)
    return pickle.dumps(value, rng.randrange(6))


# Tables

CELLS = ("", "NaN", "inf", "-1e400", "1e400", "\0", "a\0", '"', '""', "a,b", "é", "\ud7ff", "1" * 1000, "x" * 10_000,
         "0x10", "1_000", "007", "=1+1", "[1, 2]", "true", "\r", "\n", "\t")  # fmt: skip


def csv_cells(data: bytes, rng: random.Random) -> bytes:
    lines = [line.split(",") for line in data.decode().split("\n")]
    for _ in range(rng.choice((1, 1, 3))):
        line = rng.choice(lines)
        place = rng.randrange(len(line))
        match rng.randrange(6):
            case 0 | 1 | 2:
                line[place] = rng.choice(CELLS)
            case 3:
                line.insert(place, rng.choice(CELLS))
            case 4:
                del line[place]
                line.extend([""] * (not line))
            case 5:
                lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    text = "\n".join(",".join(line) for line in lines)
    return text.encode(rng.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-8-sig")))


def parquet_columns(data: bytes, rng: random.Random) -> bytes:
    """Columns of other types."""
    import pyarrow as pa
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(pa.BufferReader(data))
    count = len(table)
    columns = (
        pa.nulls(count), pa.array([None] * (count - 1) + [[1.0]]), pa.array([[[1.0]]] * count),
        pa.array([{"a": 1}] * count), pa.array([{"bytes": b"x"}] * count), pa.array(["a\0", "a"] * (count // 2)),
        pa.array([b"\xff"] * count), pa.array([True] * count), pa.array([float("nan")] * count),
        pa.array(range(count)).cast(pa.timestamp("s")), pa.array(["x"] * count).dictionary_encode(),
        pa.array([[]] * count, pa.list_(pa.float32())), pa.array([["a"]] * count), pa.array([2**63 - 1] * count),
        pa.array([1e300] * count), pa.array([None, 1.0] * (count // 2)),
    )  # fmt: skip
    for _ in range(rng.choice((1, 2))):
        column, place = rng.choice(columns), rng.randrange(table.num_columns)
        match rng.randrange(4):
            case 0:
                table = table.set_column(place, table.column_names[place], column)
            case 1:
                table = table.append_column(rng.choice(("label", "split", "x", "", "1")), column)
            case 2 if table.num_columns > 1:
                table = table.remove_column(place)
            case _:
                table = table.slice(0, rng.randrange(len(table) + 1))
                break
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out)
    return out.getvalue()
