"""Tables of one's own: every format gives the same vectors, and what is broken is refused in one line."""

import io
import json
import warnings

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors.numpy
from datasets import ClassLabel

from helpers.small import message
from helpers.tables import write_dataset
from metaleo.data.feature_files import read_table
from metaleo.data.tables import Table, as_label, is_table, strange_columns, to_metaset, warn_of_oddities

VECTORS = np.array([[0.5, -1, 2], [1, 0, 3], [-2, 4, 0.25], [8, 1, 1]], np.float32)
LABELS = ["ant", "bee", "ant", "cat"]
NOTES = ["first", "", "the third, of four", "last"]


def write_text(path, text):
    path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    return path


def write_columns(path, **columns):
    """A text table, or one of columns of numbers, by the suffix."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return path
    mark = "\t" if path.suffix == ".tsv" else ","

    def cell(value):
        text = str(value)
        return f'"{text}"' if mark in text else text

    lines = [mark.join(columns), *(mark.join(map(cell, row)) for row in zip(*columns.values(), strict=True))]
    return write_text(path, "\n".join(lines) + "\n")


def columns():
    return {"note": NOTES, "a": VECTORS[:, 0], "label": LABELS, "b": VECTORS[:, 1], "c": VECTORS[:, 2]}


def as_table(labels):
    """Rows of lists."""
    return pa.table({"vector": pa.array(VECTORS.tolist(), pa.list_(pa.float32())), "label": labels, "note": NOTES})


def check(table, labels=LABELS, vectors=VECTORS):
    np.testing.assert_array_equal(table.vectors, vectors)
    assert table.vectors.dtype == np.float32
    assert table.labels == labels
    return table


# Formats.


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet", "CSV"])
def test_columns_of_numbers_are_the_vector_in_their_order(tmp_path, suffix):
    path = write_columns(tmp_path / f"mine.{suffix}", **columns())
    table = check(read_table(path))
    assert table.beside == {"note": NOTES}
    assert table.splits is None
    assert table.images is None


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.list_(pa.float32(), 3), pa.large_list(pa.float16())])
def test_one_column_of_lists_is_the_vector(tmp_path, kind):
    """Then numbers beside it are no part of it."""
    path = tmp_path / "mine.parquet"
    vectors = pa.array([list(row) for row in VECTORS.astype(np.float16)], kind)
    pyarrow.parquet.write_table(pa.table({"id": [7, 8, 9, 10], "label": LABELS, "vector": vectors}), path)
    assert check(read_table(path)).beside == {"id": ["7", "8", "9", "10"]}


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize("labels", ["numbers", "text", "none"])
def test_flat_feature_files(tmp_path, suffix, labels):
    path = tmp_path / f"mine.{suffix}"
    known = {"numbers": np.array([3, 1, 3, 2]), "text": np.array(LABELS), "none": None}[labels]
    write_features(path, {"features": VECTORS, **({} if known is None else {"labels": known})})
    expected = {"numbers": ["3", "1", "3", "2"], "text": LABELS, "none": None}[labels]
    check(read_table(path), expected)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_feature_files_by_class(tmp_path, suffix):
    path, features = tmp_path / f"mine.{suffix}", np.arange(24, dtype=np.int8).reshape(3, 2, 4)
    fields = {"features": features, "class_names": np.array(["b", "a", "c"]), "scale": np.full(4, 0.5, np.float32)}
    write_features(path, fields)
    table = read_table(path)
    check(table, ["b", "b", "a", "a", "c", "c"], features.reshape(6, 4) / np.float32(2))
    assert table.splits is None
    write_features(path, {**fields, "split": np.array(["train", "test", "val"])})
    assert read_table(path).splits == ["train", "train", "test", "test", "val", "val"]


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_the_split_of_a_flat_feature_file(tmp_path, suffix):
    path, splits = tmp_path / f"mine.{suffix}", ["train", "val", "train", "test"]
    write_features(path, {"features": VECTORS, "labels": np.array(LABELS), "split": np.array(splits)})
    assert read_table(path).splits == splits
    assert to_metaset(read_table(path)).splits == ("train", "val", "test")


def test_bfloat16_features(tmp_path):
    path = tmp_path / "mine.safetensors"
    safetensors.numpy.save_file({"features": VECTORS.astype(ml_dtypes.bfloat16)}, path)
    check(read_table(path), None)


def write_features(path, fields):
    if path.suffix == ".npz":
        np.savez(path, **fields)
    else:
        text = {name: json.dumps(value.tolist()) for name, value in fields.items() if value.dtype.kind == "U"}
        safetensors.numpy.save_file({name: fields[name] for name in fields if name not in text}, path, text)


def test_a_hugging_face_data_set(tmp_path):
    folder = write_dataset(tmp_path / "mine", as_table(LABELS))
    assert is_table(folder)
    assert check(read_table(folder)).beside == {"note": NOTES}


def test_numbers_that_stand_for_the_names_of_classes(tmp_path):
    """A number below 0 is how such data sets say that a row has no label."""
    names = ClassLabel(names=["ant", "bee", "cat"])
    check(read_table(write_dataset(tmp_path / "mine", as_table([0, 1, 0, 2]), label=names)))
    gaps = write_dataset(tmp_path / "gaps", as_table(pa.array([0, -1, None, 2])), label=names)
    check(read_table(gaps), ["ant", "", "", "cat"])


def test_the_splits_of_a_hugging_face_data_set(tmp_path):
    """Each decodes its own labels; a column `split` of the data's own stays as it is."""
    names = ClassLabel(names=["ant", "bee", "cat"])
    parts = {"train": as_table([0, 1, 0, 2]), "test": as_table([2, 1, 0, 0])}
    table = read_table(write_dataset(tmp_path / "mine", parts, label=names))
    check(table, [*LABELS, "cat", "bee", "ant", "ant"], np.concatenate([VECTORS] * 2))
    assert table.splits == ["train"] * 4 + ["test"] * 4
    own = {name: part.append_column("split", [["val"] * 4]) for name, part in parts.items()}
    assert read_table(write_dataset(tmp_path / "own", own)).splits == ["val"] * 8


def test_a_data_set_in_several_files(tmp_path):
    folder = write_dataset(tmp_path / "mine", as_table(LABELS), shards=2)
    assert len(list(folder.glob("*.arrow"))) == 2
    check(read_table(folder))


def test_a_data_set_is_only_read(tmp_path, monkeypatch):
    """Nothing is fetched from a network, and nothing written beside the data."""
    folder = write_dataset(tmp_path / "mine", {"train": as_table(LABELS), "test": as_table(LABELS)})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(f"socket.socket.{name}", lambda *_: pytest.fail("it asked the network"))
    read_table(folder)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_column_of_images(tmp_path):
    images = [{"bytes": b"one", "path": "1.png"}, {"bytes": None, "path": "2.png"}]
    table = pa.table({"image": images, "label": ["ant", "bee"], "id": [1, 2]})
    found = read_table(write_dataset(tmp_path / "mine", table))
    assert found.images == [b"one", b""]
    assert found.labels == ["ant", "bee"]
    assert found.beside == {"id": ["1", "2"]}
    assert "images" in message(lambda: to_metaset(found))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet", "npz"])
def test_bytes_from_memory_are_as_good_as_a_file(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    if suffix == "npz":
        write_features(path, {"features": VECTORS, "labels": np.array(LABELS)})
    else:
        write_columns(path, **columns())
    content, there = path.read_bytes(), read_table(path)
    path.unlink()
    assert check(read_table(path, content=content)).beside == there.beside
    assert f"{path} does not exist" in message(lambda: read_table(path))


def test_safetensors_are_not_read_from_memory(tmp_path):
    assert "from memory" in message(lambda: read_table(tmp_path / "mine.safetensors", content=b"..."))


# Labels.


def test_rows_without_a_label(tmp_path):
    path = write_text(tmp_path / "mine.csv", "label,a,b,note\nant,1,2,x\n,3,4,y\nbee,5,6,z\n")
    table = read_table(path)
    assert table.labels == ["ant", "", "bee"]
    known, unknown = table.labelled(), table.labelled(present=False)
    check(known, ["ant", "bee"], [[1, 2], [5, 6]])
    check(unknown, [""], [[3, 4]])
    assert (known.beside, unknown.beside) == ({"note": ["x", "z"]}, {"note": ["y"]})
    assert read_table(path, label="note").labels == ["x", "y", "z"]


def test_a_table_without_labels_has_no_labelled_row(tmp_path):
    table = read_table(write_text(tmp_path / "mine.csv", "a,b\n1,2\n"))
    assert table.labels is None
    assert len(table.labelled().vectors) == 0
    assert len(table.labelled(present=False).vectors) == 1
    assert "no column `label`" in message(lambda: to_metaset(table))


def test_splits_stay_with_their_rows():
    table = Table(VECTORS, ["ant", "", "bee", "cat"], ["train", "x", "val", "test"])
    assert table.labelled().splits == ["train", "val", "test"]
    assert to_metaset(table).splits == ("train", "val", "test")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_whole_numbers_as_labels_have_no_point_even_beside_gaps(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    if suffix == "csv":
        write_text(path, "a,label\n1,3\n2,\n3,10\n")
    else:
        pyarrow.parquet.write_table(pa.table({"a": [1, 2, 3], "label": [3.0, float("nan"), 10.0]}), path)
    assert read_table(path).labels == ["3", "", "10"]


def test_labels_as_text():
    values = (None, float("nan"), 3.0, 3, 2.5, " ant ", "NA", True)
    assert [as_label(value) for value in values] == ["", "", "3", "3", "2.5", "ant", "NA", "True"]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz"])
def test_fractions_are_no_labels(tmp_path, suffix):
    """As the guide says; among words they are words."""
    path, values = tmp_path / f"mine.{suffix}", [3.0, 2.5, float("nan"), 1.0]
    if suffix == "npz":
        write_features(path, {"features": VECTORS, "labels": np.array(values)})
    else:
        given = ["" if np.isnan(value) else value for value in values] if suffix == "csv" else values
        write_columns(path, a=range(4), label=pa.array(values) if suffix == "parquet" else pa.array(map(str, given)))
    said = message(lambda: read_table(path))
    assert said.endswith(
        f"column label{'s' if suffix == 'npz' else ''}: row 2 has 2.5, and a label is text or a whole number"
    )
    words = write_text(tmp_path / "words.csv", "a,label\n1,2.5\n2,v3\n")
    assert read_table(words).labels == ["2.5", "v3"]


def test_words_that_other_programs_take_for_nothing_are_labels(tmp_path):
    path = write_text(tmp_path / "mine.csv", "a,label\n1,NA\n2,null\n3,ant\n")
    assert read_table(path).labels == ["NA", "null", "ant"]


def test_label_and_ignored_columns_are_no_part_of_the_vector(tmp_path):
    path = write_columns(tmp_path / "mine.csv", id=[1, 2], x=[3, 4], y=[5, 6], kind=[7, 8], split=["train", "test"])
    check(read_table(path, "kind", ["id"]), ["7", "8"], [[3, 5], [4, 6]])
    assert read_table(path, "kind", ["id"]).splits == ["train", "test"]
    check(read_table(path), None, [[1, 3, 5, 7], [2, 4, 6, 8]])


def test_labels_is_also_a_name_for_the_labels(tmp_path):
    check(read_table(write_text(tmp_path / "mine.csv", "labels,a\n1,2\n")), ["1"], [[2]])


# Text as people write it.


def test_quotes_newlines_and_every_alphabet(tmp_path):
    text = 'label,a,note\n"Ruß, fein",1,"two\nlines"\n"says ""no""",2,日本\n'
    for start in ("", "\ufeff"):  # what spreadsheets put before it
        table = read_table(write_text(tmp_path / "mine.csv", start + text))
        check(table, ["Ruß, fein", 'says "no"'], [[1], [2]])
        assert table.beside == {"note": ["two\nlines", "日本"]}


def test_lines_that_end_as_on_windows(tmp_path):
    check(read_table(write_text(tmp_path / "mine.csv", "label,a\r\nant,1\r\nbee,2\r\n")), ["ant", "bee"], [[1], [2]])


@pytest.mark.parametrize(
    "text",
    [
        "label;a;b\nant;0.5;1\nbee;-2;1e-1\n",
        "label;a;b\nant;0,5;1\nbee;-2;1e-1\n",
        '"label";"a";"b"\n"ant";0,5;1\n"bee";-2;"0,1"\n',
        '"label";"a";"b"\r\n"ant, or; so";0.5;1\r\n"bee";-2;0.1\r\n',
    ],
)
def test_semicolons_as_spreadsheets_write_them(tmp_path, text):
    path = write_text(tmp_path / "mine.csv", text)
    for table in (read_table(path), read_table(path, content=path.read_bytes())):
        check(table, ["ant, or; so" if "so" in text else "ant", "bee"], np.array([[0.5, 1], [-2, 0.1]], np.float32))


def test_semicolons_within_columns(tmp_path):
    path = write_text(tmp_path / "mine.csv", "label,a,note;more\nant,1,x;y\n")
    assert check(read_table(path), ["ant"], [[1]]).beside == {"note;more": ["x;y"]}


def test_whole_numbers_and_truths_are_numbers(tmp_path):
    path = write_text(tmp_path / "mine.csv", "label,a,b,c\nant,1,true,1e-3\nbee,-2,false,2\n")
    check(read_table(path), ["ant", "bee"], np.array([[1, 1, 1e-3], [-2, 0, 2]], np.float32))


# What is broken is refused.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("label,a,b,a\nant,1,2,3\n", "two columns are called 'a'"),
        ("0.5,1,2\n0.25,3,4\n", "its first line must name the columns, and reads 0.5, 1, 2"),
        ("1,1,2\n0.25,3,4\n", "its first line must name the columns"),
        ("label,note\nant,x\n", "no column holds numbers; there are label, note"),
        ("label,a,b\nant,1,2\nbee,,3\n", "row 2 has no finite number in column a"),
        ("label,a,b\nant,1,nan\nbee,2,3\n", "row 1 has no finite number in column b"),
        ("label,a,b\nant,1,2\nbee,2,-inf\n", "row 2 has no finite number in column b"),
        ("label,a\nant,1e300\n", "row 1 has no finite number in column a"),
        ("label,a\n", "it has no rows"),
        ("", "cannot be read"),
        ("label,a\nant,1,2\n", "cannot be read"),
        ("label,a,b,c,d,e,f,g\nant,x,x,x,x,x,x,x\n", "there are label, a, b, c, d, e, … (8 in all)"),
        ("label,a\ncaf\xe9,1\n".encode("latin-1"), "UTF"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_broken_text(tmp_path, text, expected):
    path = write_text(tmp_path / "mine.csv", text)
    said = message(lambda: read_table(path))
    assert expected in said
    assert said.startswith(str(path))


@pytest.mark.parametrize("flags", [{"label": "kind"}, {"ignore": ["kind"]}, {"ignore": ["a", "kind"]}])
def test_columns_that_are_not_there(tmp_path, flags):
    path = write_columns(tmp_path / "mine.csv", a=[1], b=[2])
    assert "there is no column 'kind'; there are a, b" in message(lambda: read_table(path, **flags))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.0, 2.0], [3.0]], "row 2 of column v has 1 numbers, and the first has 2"),
        ([[1.0], None], "row 2 of column v has 0 numbers"),
        ([[], []], "row 1 of column v has 0 numbers"),
        ([[1.0], [None]], "row 2 has no finite number in column v"),
        ([["a"], ["b"]], "cannot be read"),
        ([[[1.0], [2.0]]], "column v holds lists of lists"),
    ],
)
def test_broken_lists(tmp_path, values, expected):
    path = tmp_path / "mine.parquet"
    pyarrow.parquet.write_table(pa.table({"v": values}), path)
    assert expected in message(lambda: read_table(path))


def test_two_columns_of_lists(tmp_path):
    path = tmp_path / "mine.parquet"
    pyarrow.parquet.write_table(pa.table({"v": [[1.0]], "w": [[2.0]]}), path)
    assert "columns v, w all hold vectors" in message(lambda: read_table(path))
    check(read_table(path, ignore=["v"]), None, [[2]])


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
@pytest.mark.parametrize("suffix", ["parquet", "npz", "safetensors", "arrow"])
def test_truncated_files(tmp_path, suffix, share):
    place = path = tmp_path / f"mine.{suffix}"
    if suffix == "parquet":
        write_columns(path, **columns())
    elif suffix == "arrow":
        place = write_dataset(tmp_path / "mine", as_table(LABELS))
        path = place / "data-00000-of-00001.arrow"
    else:
        write_features(path, {"features": VECTORS, "labels": np.array([1, 2, 3, 4])})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert f"{place} cannot be read" in message(lambda: read_table(place))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vectors": VECTORS}, "it holds vectors, but no `features`"),
        ({"features": VECTORS, "labels": np.arange(3)}, "4 rows of `features` need as many `labels`, not 3"),
        ({"features": VECTORS, "split": np.array(["train"])}, "4 rows of `features` need as many `split`, not 1"),
        ({"features": VECTORS + np.array([np.nan, 0, 0])}, "`features` hold NaN or Inf in row 0"),
        ({"features": np.array([["a"]])}, "`features` must be numbers [n, dim]"),
        ({"features": np.zeros((0, 3))}, "`features` must be numbers [n, dim]"),
        ({"features": np.zeros(3)}, "`features` must be numbers"),
    ],
)
def test_broken_feature_files(tmp_path, fields, expected):
    path = tmp_path / "mine.npz"
    write_features(path, fields)
    for content in (None, path.read_bytes()):
        said = message(lambda content=content: read_table(path, content=content))
        assert expected in said
        assert said.startswith(str(path))


def test_python_objects_are_not_run(tmp_path):
    content = io.BytesIO()
    np.savez(content, features=np.array([object()], object))
    assert "cannot be read" in message(lambda: read_table(tmp_path / "mine.npz", content=content.getvalue()))


def test_things_that_are_no_tables(tmp_path):
    (tmp_path / "mine.xlsx").write_text("a")
    for path in (tmp_path, tmp_path / "mine.xlsx"):
        assert "is no table of vectors" in message(lambda path=path: read_table(path))
    assert "does not exist" in message(lambda: read_table(tmp_path / "nowhere.csv"))


def test_no_row_with_a_label():
    assert "no row has a label" in message(lambda: to_metaset(Table(VECTORS, [""] * 4)))


def test_labels_of_text_tables_are_text(tmp_path):
    """007 is a name, not a number; so in a column of any name, as long as it is said to be the label."""
    path = write_text(tmp_path / "t.csv", "label,agent,a,b\n007,001,1,2\ntrue,002,3,4\n")
    assert read_table(path, ignore=["agent"]).labels == ["007", "true"]
    assert read_table(path, label="agent").labels == ["001", "002"]


def test_row_numbers_of_pandas_are_no_part_of_the_vector(tmp_path):
    path = write_text(tmp_path / "t.csv", ",a,label,b\n0,1,x,2\n1,3,y,4\n")
    np.testing.assert_array_equal(read_table(path).vectors, [[1, 2], [3, 4]])
    table = pa.table({"a": [1.0, 3.0], "label": ["x", "y"], "__index_level_0__": [7, 8]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    found = read_table(tmp_path / "t.parquet")
    np.testing.assert_array_equal(found.vectors, [[1], [3]])
    assert found.beside == {"__index_level_0__": ["7", "8"]}


def test_columns_are_known_by_their_names(tmp_path):
    """Other numbers are what they were to the last digit: an id is no float."""
    path = write_text(tmp_path / "t.csv", "b,id,price,a,label\n1,100234567,19.99,2,x\n3,0,,4,y\n")
    table = read_table(path, columns=["a", "b"])
    np.testing.assert_array_equal(table.vectors, [[2, 1], [4, 3]])
    assert (table.columns, table.labels) == (("a", "b"), ["x", "y"])
    assert table.beside == {"id": ["100234567", "0"], "price": ["19.99", ""]}
    assert "no column of numbers 'c'" in message(lambda: read_table(path, columns=["a", "c"]))
    whole = read_table(path, ignore=["price"])
    arranged = whole.arranged(["a", "b"])
    np.testing.assert_array_equal(arranged.vectors, table.vectors)
    assert (arranged.columns, whole.labelled().arranged(["a", "b"]).columns) == (("a", "b"), ("a", "b"))
    assert "no column of numbers 'c'" in message(lambda: whole.arranged(["a", "c"]))


def test_a_stray_word_does_not_take_a_column_away(tmp_path):
    path = write_text(tmp_path / "t.csv", "a,b,label\n1,2,x\n3,oops,y\n4,5,x\n")
    assert "column b holds numbers, but row 2 has 'oops'" in message(lambda: read_table(path))
    assert read_table(path, ignore=["b"]).vectors.shape == (3, 1)
    notes = write_text(tmp_path / "n.csv", "a,note,label\n1,2 of them,x\n3,,y\n4,7,x\n")
    assert read_table(notes).beside["note"] == ["2 of them", "", "7"]


def test_decimals_are_numbers(tmp_path):
    from decimal import Decimal

    table = pa.table({"a": pa.array([Decimal("1.5"), Decimal("2.25")]), "b": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    np.testing.assert_array_equal(read_table(tmp_path / "t.parquet").vectors, [[1.5, 1], [2.25, 2]])


def test_rows_of_feature_files_stay_in_their_order(tmp_path):
    rows = np.array([[10, 0], [0, 10], [10, 1], [1, 10]])
    fields = {"features": rows, "labels": np.array([1, 0, 1, 0]), "class_names": np.array(["zero", "one"])}
    np.savez(tmp_path / "t.npz", **fields)
    table = read_table(tmp_path / "t.npz")
    np.testing.assert_array_equal(table.vectors, rows)
    assert table.labels == ["one", "zero", "one", "zero"]


def test_labels_of_feature_files_by_another_name(tmp_path):
    np.savez(tmp_path / "t.npz", features=np.eye(2), intent=np.array(["a", "b"]), labels=np.array([b"c", b"d"]))
    assert read_table(tmp_path / "t.npz", "intent").labels == ["a", "b"]
    assert read_table(tmp_path / "t.npz").labels == ["c", "d"]
    np.savez(tmp_path / "u.npz", features=np.eye(2), label=np.array(["a", "b"]))
    assert read_table(tmp_path / "u.npz").labels == ["a", "b"]
    assert "no array 'kind'" in message(lambda: read_table(tmp_path / "t.npz", "kind"))
    assert "no columns to ignore" in message(lambda: read_table(tmp_path / "t.npz", ignore=["x"]))


# What can be read, but looks wrong.


def odd(path, **flags):
    """What is said of a table besides reading it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_oddities(read_table(path, **flags), path.name)
    return [str(one.message) for one in said]


def embedding(rows, dim=16, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)
    return {f"x{i}": column for i, column in enumerate((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).T)}


random = np.random.default_rng(1)
IDS = {
    "counter": np.arange(20),
    "from the last": np.arange(20)[::-1],
    "shuffled": random.permutation(20),
    "sorted sample": np.sort(random.choice(900, 20, replace=False)),
    "sample": random.choice(900, 20, replace=False),
    "large": random.choice(10**9, 20),
    "time": 1.7e9 + random.random(20),
}


@pytest.mark.parametrize("kind", IDS)
def test_a_column_that_cannot_be_a_feature_is_named(tmp_path, kind):
    path = write_columns(tmp_path / "mine.parquet", **{"the id": IDS[kind]}, **embedding(20))
    (said,) = odd(path)
    assert said.startswith("mine.parquet: column the id has ")
    assert said.endswith("if this is no feature, leave it out with `ignore=` 'the id'")
    assert odd(path, ignore=["the id"]) == []


def test_several_columns_that_cannot_be_features(tmp_path):
    ids = {"id": np.arange(20), "place": np.arange(20) + 7, "price": 1e5 * random.random(20)}
    first, second = odd(write_columns(tmp_path / "mine.parquet", **ids, **embedding(20)))
    assert first.endswith("columns id, place have a different whole number in every row, as an id has; if this is no "
                          "feature, leave it out with `ignore=` id place")  # fmt: skip
    assert "column price has numbers 1,000 times as large as the others'" in second


def test_a_counter_beside_few_rows_and_beside_counts(tmp_path):
    assert odd(write_columns(tmp_path / "few.parquet", id=range(6), **embedding(6)))
    counts = {f"n{i}": random.poisson(3, 40) for i in range(8)}
    assert odd(write_columns(tmp_path / "counts.parquet", id=random.permutation(40), **counts))


@pytest.mark.parametrize("rows", [2, 5, 10, 50, 200])
def test_ordinary_features_are_not_called_strange(tmp_path, rows):
    """Embeddings, also rounded, rectified or quantised, counts of a few and of many, pixels, and a mixture of them."""
    normal = np.random.default_rng(rows).normal(size=(rows, 640))
    tables = {
        "normal": normal,
        "rounded": normal.round(1),
        "rectified": np.maximum(normal - 1, 0) * np.exp(np.random.default_rng(0).normal(size=640)),
        "quantised": np.clip((40 * normal).round(), -128, 127),
        "counts": np.random.default_rng(rows).poisson(np.exp(np.linspace(-5, 4, 640)), (rows, 640)),
        "pixels": np.random.default_rng(rows).integers(0, 17, (rows, 64)),
        "ages": np.concatenate([normal[:, :3], np.random.default_rng(rows).integers(20, 40, (rows, 1))], axis=1),
    }
    for name, vectors in tables.items():
        columns = tuple(f"x{i}" for i in range(vectors.shape[1]))
        assert list(strange_columns(Table(vectors.astype(np.float32), None, columns=columns))) == [], name


def test_rows_that_repeat_are_counted(tmp_path):
    """With the same label once, and with another twice; rows without a label do not count, but have numbers."""
    rows = {"label": ["ant", "", "bee", "ant", "bee", "cat"], "a": [1, 1, 2, 1, 1, 2], "b": [0.5, 0.5, 1, 0.5, 0.5, 1]}
    first, second = odd(write_columns(tmp_path / "mine.csv", **rows))
    assert first == "mine.csv: 1 of 6 rows repeat an earlier row; the first is row 4, as row 1"
    assert second == "mine.csv: 2 of 6 rows repeat an earlier row under another label; the first is row 5, as row 1"
