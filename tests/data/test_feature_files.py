"""Feature files: what is written comes back, and what is broken is refused in one line."""

import json
import os

import numpy as np
import pytest
import safetensors.numpy

from helpers.disks import files_no_larger_than
from helpers.small import message
from metaleo.data import MetaSet, load_data, save_data
from metaleo.data.splits import split_classes, split_names
from metaleo.data.tables import Table, to_metaset

SUFFIXES = ("npz", "safetensors")
NAMES = ("dog", "ant", "cat", "bee")
SPLITS = ("train", "val", "train", "test")


def some_features(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def balanced(dtype=np.float32) -> MetaSet:
    return MetaSet.from_classes(some_features(4, 3, 5).astype(dtype), NAMES, SPLITS)


def unbalanced() -> MetaSet:
    """Rows of the classes mixed: ant has 3, bee 1, cat 2."""
    labels = np.array(["cat", "ant", "bee", "ant", "cat", "ant"])
    splits = np.array(["train", "val", "test", "val", "train", "val"])
    return MetaSet.from_labels(some_features(6, 5), labels, splits)


def images_of(metaset: MetaSet, name: str) -> np.ndarray:
    index = metaset.class_names.index(name)
    start = metaset.starts[index]
    return metaset.read(metaset.rows[start : start + metaset.counts[index]])


def assert_same(one: MetaSet, other: MetaSet) -> None:
    assert one.class_names == other.class_names
    assert one.splits == other.splits
    for name in one.class_names:
        np.testing.assert_array_equal(images_of(one, name), images_of(other, name))


def write(path, **fields):
    """A feature file made by somebody else's program."""
    if path.suffix == ".npz":
        np.savez(path, **fields)
    else:
        arrays = {name: value for name, value in fields.items() if value.dtype.kind != "U"}
        header = {name: json.dumps(value.tolist()) for name, value in fields.items() if name not in arrays}
        safetensors.numpy.save_file(arrays, path, header)
    return path


@pytest.fixture(params=SUFFIXES)
def path(request, tmp_path):
    """A file name of either kind."""
    return tmp_path / f"features.{request.param}"


# What is written comes back.


@pytest.mark.parametrize("metaset", [balanced(), unbalanced()], ids=["balanced", "unbalanced"])
def test_round_trip(path, metaset):
    save_data(metaset, path)
    assert_same(load_data(path), metaset)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", "int8", "uint8", "int16", "int64"])
def test_round_trip_keeps_the_numbers_of_every_type(path, dtype):
    metaset = MetaSet.from_classes((10 * some_features(4, 3, 5)).astype(dtype), NAMES, SPLITS)
    save_data(metaset, path)
    assert load_data(path).features.dtype.itemsize == np.dtype(dtype).itemsize
    assert_same(load_data(path), metaset)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_round_trip_of_wide_unsigned_integers(path, dtype):
    metaset = MetaSet.from_classes(np.arange(60, dtype=dtype).reshape(4, 3, 5), NAMES, SPLITS)
    save_data(metaset, path)
    assert_same(load_data(path), metaset)


def test_round_trip_of_quantised_features(path):
    scale = np.array([0.5, 0.25, 1, 2, 4], np.float32)
    codes = np.arange(-30, 30, dtype=np.int8).reshape(4, 3, 5)
    metaset = MetaSet.from_classes(codes, NAMES, SPLITS, scale)
    save_data(metaset, path)
    again = load_data(path)
    assert again.features.dtype == np.int8
    np.testing.assert_array_equal(images_of(again, "ant"), codes[1] * scale)
    assert_same(again, metaset)


def test_a_part_is_saved_without_the_rest(path):
    save_data(balanced().subset("train"), path)
    again = load_data(path)
    assert again.class_names == ("dog", "cat")
    assert again.features.shape == (6, 5)
    np.testing.assert_array_equal(images_of(again, "cat"), images_of(balanced(), "cat"))


def test_unbalanced_classes_come_back_in_their_order(path):
    """Else the same key would sample other tasks from the copy."""
    metaset = MetaSet(some_features(6, 5), np.arange(6), np.array([3, 1, 2]), ("b", "c", "a"), ("train",) * 3)
    save_data(metaset, path)
    assert_same(load_data(path), metaset)


def test_fortran_order(path):
    metaset = MetaSet.from_labels(np.asfortranarray(some_features(6, 5)), np.repeat([0, 1], 3), np.full(6, "train"))
    save_data(metaset, path)
    np.testing.assert_array_equal(load_data(path).read(slice(None)), some_features(6, 5))


def test_a_file_may_be_saved_over_itself(path):
    save_data(balanced(), path)
    save_data(load_data(path), path)
    assert_same(load_data(path), balanced())


# The two layouts, as other programs write them.


def test_layout_by_class(path):
    features = some_features(4, 3, 5)
    metaset = load_data(write(path, features=features, class_names=np.array(NAMES), split=np.array(SPLITS)))
    assert_same(metaset, balanced())


def test_layout_by_class_without_names_or_splits(path):
    metaset = load_data(write(path, features=some_features(4, 3, 5)))
    assert metaset.class_names == ("0", "1", "2", "3")
    assert list(metaset.splits) == split_classes(4)
    assert load_data(path).splits == metaset.splits


def test_flat_layout_with_string_labels(path):
    labels = np.array(["cat", "ant", "bee", "ant", "cat", "ant"])
    splits = np.array(["train", "val", "test", "val", "train", "val"])
    metaset = load_data(write(path, features=some_features(6, 5), labels=labels, split=splits))
    assert dict(zip(metaset.class_names, metaset.splits, strict=True)) == {
        "ant": "val",
        "bee": "test",
        "cat": "train",
    }
    np.testing.assert_array_equal(images_of(metaset, "ant"), some_features(6, 5)[[1, 3, 5]])


@pytest.mark.parametrize("split", ["by row", "by class"])
def test_flat_layout_with_integer_labels_and_class_names(path, split):
    labels, by_class = np.array([2, 0, 1, 0, 2, 0]), np.array(["val", "test", "train"])
    metaset = load_data(
        write(
            path,
            features=some_features(6, 5),
            labels=labels,
            class_names=np.array(["ant", "bee", "cat"]),
            split=by_class[labels] if split == "by row" else by_class,
        )
    )
    assert_same(metaset, unbalanced())


def test_flat_layout_with_integer_labels_alone(path):
    metaset = load_data(write(path, features=some_features(5, 5), labels=np.array([10, 9, 10, 9, 8])))
    assert metaset.class_names == ("8", "9", "10")
    assert list(metaset.splits) == split_names(["8", "9", "10"])
    np.testing.assert_array_equal(images_of(metaset, "10"), some_features(5, 5)[[0, 2]])


@pytest.mark.parametrize("shape", [(2, 3, 5), (6, 5)], ids=["by class", "flat"])
def test_two_classes_need_a_split(path, shape):
    fields = {"features": some_features(*shape), "labels": np.repeat([0, 1], 3)}
    assert "2 classes cannot be split" in message(lambda: load_data(write(path, **fields)))
    splits = np.array(["train", "test"])
    metaset = load_data(write(path, **fields, split=splits if len(shape) == 3 else np.repeat(splits, 3)))
    assert metaset.splits == ("train", "test")


# Where the numbers are kept.


@pytest.mark.parametrize("metaset", [balanced(), unbalanced()], ids=["balanced", "unbalanced"])
def test_features_stay_on_the_disk(path, metaset):
    save_data(metaset, path)
    features = load_data(path).features
    assert isinstance(features, np.memmap)
    assert features.filename == path
    assert not features.flags.writeable


def test_compressed_npz(tmp_path):
    path = tmp_path / "features.npz"
    np.savez_compressed(path, features=some_features(4, 3, 5), class_names=NAMES, split=SPLITS)
    assert_same(load_data(path), balanced())


def test_sample():
    sample = load_data("sample")
    assert [sample.splits.count(split) for split in ("train", "val", "test")] == [64, 16, 20]
    assert sample.counts.tolist() == [100] * 100
    assert sample.dim == 640
    assert len(set(sample.class_names)) == 100
    assert isinstance(sample.features, np.memmap)
    assert os.path.getsize(sample.features.filename) <= 8_000_000
    assert_same(load_data("sample").subset("val"), sample.subset("val"))


def test_images_of_a_class_are_nearer_to_each_other_in_the_sample():
    """The labels of the sample go with its rows."""
    sample = load_data("sample")
    vectors = sample.read(sample.rows).reshape(100, 100, 640)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    means = vectors[:, :50].mean(1)
    nearest = (vectors[:, 50:].reshape(-1, 640) @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(1)
    assert (nearest == np.repeat(np.arange(100), 50)).mean() > 0.4  # chance is 0.01


def test_intents():
    intents = load_data("intents")
    assert [intents.splits.count(split) for split in ("train", "val", "test")] == [90, 30, 30]
    assert intents.counts.tolist() == [50] * 150
    assert len(set(intents.class_names)) == 150
    lengths = np.linalg.norm(intents.read(intents.rows), axis=1)
    np.testing.assert_allclose(lengths, 1, atol=0.01)  # 8 bits are enough
    assert isinstance(intents.features, np.memmap)
    assert os.path.getsize(intents.features.filename) <= 2_000_000


def test_intents_are_split_by_whole_domains():
    intents = load_data("intents")
    domains = {(name.split("/")[0], split) for name, split in zip(intents.class_names, intents.splits, strict=True)}
    assert len(domains) == 10
    assert {domain for domain, split in domains if split == "test"} == {"banking", "credit_cards"}


def test_sentences_of_an_intent_are_nearer_to_each_other():
    """The labels of the intents go with their rows."""
    intents = load_data("intents")
    vectors = intents.read(intents.rows).reshape(150, 50, 256)
    means = vectors[:, :25].mean(1)
    nearest = (vectors[:, 25:].reshape(-1, 256) @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(1)
    assert (nearest == np.repeat(np.arange(150), 25)).mean() > 0.75  # chance is 0.007


# What is broken is refused.


def test_missing_file(path):
    assert f"{path} does not exist" in message(lambda: load_data(path))


def test_unknown_suffix(tmp_path):
    path = tmp_path / "features.xlsx"
    path.write_text("1,2,3")
    assert "ends in none of .npz, .safetensors, .csv, .tsv, .parquet" in message(lambda: load_data(path))
    assert ".npz or .safetensors" in message(lambda: save_data(balanced(), tmp_path / "other.csv"))
    assert os.listdir(tmp_path) == ["features.xlsx"]


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_truncated_file(path, share):
    save_data(balanced(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert f"{path} is truncated or not a {path.suffix} file" in message(lambda: load_data(path))


def test_text_under_the_name_of_a_feature_file(path):
    path.write_text("cat,1.0,2.0\ndog,3.0,4.0\n")
    assert f"not a {path.suffix} file" in message(lambda: load_data(path))


def test_no_features(path):
    write(path, vectors=some_features(4, 3, 5), class_names=np.array(NAMES))
    text = message(lambda: load_data(path))
    assert "no `features`" in text
    assert "vectors" in text


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(path, bad):
    features = some_features(4, 3, 5)
    features[1, 0, 2] = features[3, 2, 4] = bad
    text = message(lambda: load_data(write(path, features=features)))
    assert "NaN or Inf in 2 of 12 rows: 3, 11" in text
    assert str(path) in text


def test_many_bad_rows_are_not_all_listed():
    text = message(lambda: MetaSet.from_labels(np.full((9, 2), np.nan), np.arange(9), np.full(9, "train")))
    assert "in 9 of 9 rows: 0, 1, 2, 3, 4, …" in text


def test_bad_row_beyond_the_first_slab():
    features = np.zeros((10_000, 2), np.float32)
    features[9_000, 1] = np.nan
    assert "rows: 9000" in message(lambda: MetaSet.from_labels(features, np.zeros(10_000, int), np.full(10_000, "val")))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_numbers_too_large_for_float32(path):
    assert "Inf in 12 of 12" in message(lambda: load_data(write(path, features=np.full((4, 3, 5), 1e300))))


def test_class_in_two_splits(path):
    labels, splits = np.array(["ant", "ant", "bee", "bee"]), np.array(["train", "train", "train", "test"])
    text = message(lambda: load_data(write(path, features=some_features(4, 5), labels=labels, split=splits)))
    assert "class bee is in two splits, train and test (row 3)" in text


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 5)], ids=["by class", "flat"])
def test_unknown_split(path, shape):
    splits = np.array(["train", "train", "train", "dev"])
    text = message(lambda: load_data(write(path, features=some_features(*shape), labels=np.array(NAMES), split=splits)))
    assert "unknown split 'dev'" in text


def test_unknown_part():
    assert "unknown split 'dev'" in message(lambda: balanced().subset("train+dev"))


@pytest.mark.parametrize(
    ("shape", "fields", "expected"),
    [
        ((4, 3, 5), {"class_names": np.array(NAMES[:3])}, "`class_names` has shape [3]; 4 are needed"),
        ((4, 3, 5), {"split": np.array(SPLITS[:2])}, "`split` has shape [2]; 4 are needed"),
        ((4, 5), {"labels": np.array(NAMES[:3])}, "`labels` has shape [3]; 4 are needed"),
        (
            (4, 5),
            {"labels": np.array(NAMES), "split": np.array(SPLITS[:3])},
            "`split` has shape [3]; 4 are needed",
        ),
        ((4, 5), {"labels": np.zeros((4, 2), np.int64)}, "`labels` has shape [4, 2]; 4 are needed"),
        (
            (4, 5),
            {"labels": np.array([0, 1, 2, 1]), "class_names": np.array(NAMES[:2])},
            "`labels` go from 0 up to 2",
        ),
        ((4, 5), {}, "need `labels [n]`"),
        ((5,), {}, "`features` must be numbers"),
        ((0, 5), {"labels": np.zeros(0, np.int64)}, "empty"),
    ],
)
def test_shapes_that_do_not_fit(path, shape, fields, expected):
    text = message(lambda: load_data(write(path, features=some_features(*shape), **fields)))
    assert expected in text or (shape[0] == 0 and str(path) in text)


@pytest.mark.parametrize("scale", [np.ones(3), np.ones((5, 2))], ids=["short", "table"])
def test_scale_of_another_size(path, scale):
    text = message(lambda: load_data(write(path, features=some_features(4, 3, 5), scale=scale)))
    assert "scale" in text


@pytest.mark.parametrize("field", ["class_names", "split"])
def test_one_string_where_a_list_belongs(path, field):
    fields = {"class_names": np.array(["ant", "bee"]), "split": np.array(["train", "val"])} | {field: np.array("val")}
    text = message(lambda: load_data(write(path, features=some_features(3, 5), labels=np.array([0, 1, 1]), **fields)))
    assert field in text


@pytest.mark.parametrize("field", ["features", "class_names", "split"])
def test_python_objects(tmp_path, field):
    fields = {"features": some_features(4, 3, 5), "class_names": np.array(NAMES), "split": np.array(SPLITS)}
    fields[field] = fields[field].astype(object)
    path = write(tmp_path / "features.npz", **fields)
    assert "bject" in message(lambda: load_data(path))


def test_strings_for_features(tmp_path):
    path = write(tmp_path / "features.npz", features=np.full((4, 3, 5), "one"))
    assert "`features` must be numbers" in message(lambda: load_data(path))


def test_folder_without_features(tmp_path):
    assert "no train_embeddings.pkl in it" in message(lambda: load_data(tmp_path))


def test_folder_around_the_folder_that_is_meant(tmp_path):
    inside = tmp_path / "embeddings" / "center"
    inside.mkdir(parents=True)
    (inside / "train_embeddings.pkl").touch()
    assert f"did you mean {inside}?" in message(lambda: load_data(tmp_path))


# A write that fails harms nothing.


def test_full_disk(path):
    save_data(balanced(), path)
    before = path.read_bytes()
    large = MetaSet.from_classes(np.ones((4, 100, 1000), np.float32), NAMES, SPLITS)  # 1.6 MB
    with files_no_larger_than(1_000_000):
        text = message(lambda: save_data(large, path))
    assert f"cannot write {path}: " in text
    assert "File too large" in text
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_folder_that_is_a_file(path):
    save_data(balanced(), path)
    before = path.read_bytes()
    assert "cannot write" in message(lambda: save_data(balanced(), path / path.name))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_target_that_is_a_folder(path):
    path.mkdir()
    assert "Is a directory" in message(lambda: save_data(balanced(), path))
    assert os.listdir(path.parent) == [path.name]


def test_folders_are_made(path):
    deep = path.parent / "a" / "b" / path.name
    save_data(balanced(), deep)
    assert os.listdir(deep.parent) == [path.name]
    assert_same(load_data(deep), balanced())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scale": np.array(["a", "b", "c", "d", "e"])}, "`scale` must be numbers"),
        ({"scale": np.ones(5) * 1j}, "`scale` must be numbers"),
        ({"class_names": np.array(["2020"] * 4, "M8[D]")}, "`class_names` must be names or numbers"),
    ],
)
def test_fields_of_another_kind(tmp_path, fields, expected):
    np.savez(tmp_path / "a.npz", features=some_features(4, 3, 5), **fields)
    assert expected in message(lambda: load_data(tmp_path / "a.npz"))


@pytest.mark.parametrize("names", [["a", ["b"], "c", "d"], "abcd", {"a": 1}, [None] * 4, [float("nan")] * 4, 4])
def test_names_of_another_kind_in_json(tmp_path, names):
    path = tmp_path / "a.safetensors"
    header = {"class_names": json.dumps(names), "split": json.dumps(SPLITS)}
    safetensors.numpy.save_file({"features": some_features(4, 3, 5)}, path, header)
    assert "`class_names`" in message(lambda: load_data(path))


def test_numbers_too_large_for_single_precision(tmp_path):
    np.savez(
        tmp_path / "a.npz", features=np.full((4, 3, 5), 1e300), class_names=np.array(NAMES), split=np.array(SPLITS)
    )
    assert "hold NaN or Inf" in message(lambda: load_data(tmp_path / "a.npz"))


def test_names_that_differ_in_a_nul_alone(tmp_path):
    """NumPy's own strings lose it."""
    table = Table(np.ones((6, 2), np.float32), ["a", "a\0", "b"] * 2, ["train", "val", "test"] * 2)
    metaset = to_metaset(table)
    assert metaset.class_names == ("a", "a\0", "b")
    save_data(metaset, tmp_path / "a.safetensors")
    assert load_data(tmp_path / "a.safetensors").class_names == metaset.class_names
    assert "NUL" in message(lambda: save_data(metaset, tmp_path / "a.npz"))


def test_one_long_label_does_not_make_all_long():
    """As an array of NumPy's strings these would be 400 gigabytes."""
    count = 100_000
    metaset = to_metaset(Table(np.ones((count, 1), np.float32), ["a" * 10**6, *["b"] * (count - 1)], ["train"] * count))
    assert metaset.counts.tolist() == [1, count - 1]
