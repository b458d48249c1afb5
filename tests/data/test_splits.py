"""Which classes are learned from where nobody has said: enough of each, at random, and always the same."""

import numpy as np
import pytest

from helpers.small import DIM, make_metaset, message
from metaleo.data import load_data, save_data
from metaleo.data.splits import FEWEST_CLASSES, split_classes, split_names
from metaleo.data.tables import Table, to_metaset
from metaleo.tasks.episodes import advice, check_enough


def counted(splits):
    return tuple(splits.count(split) for split in ("train", "val", "test"))


@pytest.mark.parametrize(
    ("count", "expected"),
    [(3, (1, 1, 1)), (4, (2, 1, 1)), (10, (4, 3, 3)), (15, (5, 5, 5)), (20, (10, 5, 5)), (100, (64, 16, 20))],
)
def test_counts(count, expected):
    assert counted(split_classes(count)) == expected


def test_every_split_has_a_few_classes_and_train_the_most():
    for count in range(3, 120):
        train, val, test = counted(split_classes(count))
        assert train + val + test == count
        assert min(val, test) >= min(FEWEST_CLASSES, count // 3)
        assert train >= max(val, test)


def test_seeds():
    assert split_classes(40, 3) == split_classes(40, 3)
    assert split_classes(40, 3) != split_classes(40, 4)
    assert counted(split_classes(40, 3)) == counted(split_classes(40, 4))
    assert split_classes(40) == split_classes(40, 0)


def test_shares():
    assert counted(split_classes(100, 0, (0.5, 0.3, 0.2))) == (50, 30, 20)
    assert counted(split_classes(100, 0, (1.0, 0.0, 0.0))) == (90, 5, 5)
    assert "leave none to learn from" in message(lambda: split_classes(10, 0, (0.0, 0.5, 0.5)))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_classes_are_sent_to_adapt(count):
    text = message(lambda: split_classes(count))
    assert f"{count} classes cannot be split" in text
    assert "`metaleo adapt`" in text


def test_advice():
    """Nothing, where classes abound; what to do, where they are few."""
    assert advice(make_metaset((20, 5, 5)), 5) is None
    assert "only 19 train classes" in str(advice(make_metaset((19, 5, 5)), 5))
    assert advice(make_metaset((19, 5, 5)), 4) is None


def test_too_few_classes_are_refused_with_a_way_out():
    check_enough(make_metaset((5, 5, 1)), 5)
    told = message(lambda: check_enough(make_metaset((20, 3, 5)), 5))
    assert "5-way tasks need 5 train and 5 val classes, and there are 20 and 3: try way=3, or adapt" in told
    assert "there are 2 and 5: try way=2" in message(lambda: check_enough(make_metaset((2, 5, 5)), 5))
    assert "--way" not in message(lambda: check_enough(make_metaset((20, 1, 5)), 5))


# Tables and feature files without splits.


def write_csv(path, labels, splits=None, seed=0):
    """Rows in random order."""
    order = np.random.default_rng(seed).permutation(len(labels))
    head = "label,a,b" + (",split" if splits else "")
    lines = [f"{labels[i]},{i + 0.5},{i + 1.5}" + (f",{splits[i]}" if splits else "") for i in order]
    path.write_text("\n".join([head, *lines]))
    return path


LABELS = [f"class{i % 12:02}" for i in range(36)]


def assigned(metaset):
    return dict(zip(metaset.class_names, metaset.splits, strict=True))


def test_a_table_without_splits_is_split_in_the_same_way_every_time(tmp_path):
    """Whatever the order of its rows."""
    one, other = (load_data(write_csv(tmp_path / f"{seed}.csv", LABELS, seed=seed)) for seed in (0, 1))
    assert assigned(one) == assigned(other) == assigned(load_data(tmp_path / "0.csv"))
    assert list(assigned(one).values()) == split_classes(12)
    assert one.counts.tolist() == [3] * 12


def test_the_column_split_holds(tmp_path):
    wanted = {label: ("test", "train", "val")[int(label[-2:]) % 3] for label in LABELS}
    metaset = load_data(write_csv(tmp_path / "mine.csv", LABELS, [wanted[label] for label in LABELS]))
    assert assigned(metaset) == wanted


def test_vectors_stay_with_their_labels(tmp_path):
    metaset = load_data(write_csv(tmp_path / "mine.csv", LABELS))
    for index, start in enumerate(metaset.starts):
        own = metaset.read(metaset.rows[start : start + 3])
        assert sorted(own[:, 0].tolist()) == [index + 0.5, index + 12.5, index + 24.5]


def test_seed_and_shares_of_a_table():
    table = Table(np.zeros((36, DIM), np.float32), LABELS)
    assert list(to_metaset(table, 5, (0.5, 0.25, 0.25)).splits) == split_classes(12, 5, (0.5, 0.25, 0.25))


def test_a_table_of_two_classes_cannot_be_trained_on(tmp_path):
    assert "2 classes cannot be split" in message(lambda: load_data(write_csv(tmp_path / "a.csv", ["x", "y"])))


def test_a_class_in_two_splits_of_a_table(tmp_path):
    path = write_csv(tmp_path / "a.csv", ["x", "x", "y"], ["train", "val", "test"])
    assert "class x is in two splits" in message(lambda: load_data(path))


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_table_made_into_a_feature_file_is_the_same_data(tmp_path, suffix):
    metaset = load_data(write_csv(tmp_path / "mine.csv", LABELS))
    save_data(metaset, tmp_path / f"mine.{suffix}")
    again = load_data(tmp_path / f"mine.{suffix}")
    assert assigned(again) == assigned(metaset)
    np.testing.assert_array_equal(again.read(again.rows), metaset.read(metaset.rows))


def test_the_same_classes_are_split_in_the_same_way_in_every_file(tmp_path):
    """Numbers sort otherwise than texts do, and a file may have them in any order."""
    labels = np.arange(40) % 20
    rows = np.random.default_rng(0).normal(size=(40, 2))
    np.savez(tmp_path / "flat.npz", features=rows, labels=labels)
    order = np.random.default_rng(1).permutation(20)
    by_class = np.stack([rows[labels == one] for one in order])
    np.savez(tmp_path / "dense.npz", features=by_class, class_names=order)
    names = np.array([f"{one}" for one in range(20)])
    np.savez(tmp_path / "named.npz", features=rows, labels=labels, class_names=names)
    (tmp_path / "t.csv").write_text(
        "label,a,b\n" + "".join(f"{one},{a},{b}\n" for one, (a, b) in zip(labels, rows, strict=True))
    )
    found = [load_data(tmp_path / name) for name in ("flat.npz", "dense.npz", "named.npz", "t.csv")]
    splits = [dict(zip(one.class_names, one.splits, strict=True)) for one in found]
    assert (
        splits[0] == splits[1] == splits[2] == splits[3] == dict(zip(names, split_names(names.tolist()), strict=True))
    )
