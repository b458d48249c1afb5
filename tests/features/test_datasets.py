"""The known benchmarks, in every form, at a size that fits a test; the class lists of the package at their own size."""

import dataclasses
import io
import mmap
import os
import pickle
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from helpers.small import message
from metaleo.features import datasets as benchmarks
from metaleo.features.datasets import DATASETS, open_images, rows_of
from metaleo.features.images import pack
from metaleo.features.pickled import read_pickle

SPLITS = ("train", "val", "test")


def pixels_of(seed: int, count: int, side: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def write(path, pixels) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def small(monkeypatch):
    """Makes a benchmark one of the classes in `rows`, which stand for the class list, with few images of each."""

    def shrink(name, listed, column, images, rows):
        counts = Counter(row[column] for row in rows)
        sizes = tuple(counts[split] for split in SPLITS)
        changed = dataclasses.replace(DATASETS[name], classes=sizes, images=tuple(images * size for size in sizes))
        monkeypatch.setitem(DATASETS, name, changed)
        lists = {listed: rows}
        monkeypatch.setattr(benchmarks, "rows_of", lambda asked: lists[asked])

    return shrink


# The class lists.


def test_miniimagenet_list():
    rows = rows_of("miniimagenet")
    assert Counter(row["split"] for row in rows) == {"train": 64, "val": 16, "test": 20}
    assert len({row["class"] for row in rows}) == 100


def test_tieredimagenet_list():
    rows = rows_of("tieredimagenet")
    assert Counter(row["split"] for row in rows) == {"train": 351, "val": 97, "test": 160}
    assert len({row["class"] for row in rows}) == 608
    categories = {split: {row["category"] for row in rows if row["split"] == split} for split in SPLITS}
    assert [len(categories[split]) for split in SPLITS] == [20, 6, 8]
    assert len(set.union(*categories.values())) == 34
    assert sum(DATASETS["tieredimagenet"].images) == 779_165


def test_cifar_lists():
    rows = rows_of("cifar100")
    assert [row["class"] for row in rows] == sorted({row["class"] for row in rows})
    assert len(rows) == 100
    assert Counter(row["cifar-fs"] for row in rows) == {"train": 64, "val": 16, "test": 20}
    assert Counter(row["fc100"] for row in rows) == {"train": 60, "val": 20, "test": 20}
    superclasses = {(row["superclass"], row["fc100"]) for row in rows}
    assert len(superclasses) == len({name for name, _ in superclasses}) == 20


def test_omniglot_list():
    rows = rows_of("omniglot")
    sizes = Counter()
    for row in rows:
        for column in ("vinyals", "set"):
            sizes[row[column]] += int(row["last"]) - int(row["first"]) + 1
    assert sizes == {"train": 1028, "val": 172, "test": 423, "background": 964, "evaluation": 659}
    assert len({row["alphabet"] for row in rows}) == 50


@pytest.mark.parametrize("name", DATASETS)
def test_published_counts(name):
    benchmark = DATASETS[name]
    if benchmark.even:
        each = {total / ways for total, ways in zip(benchmark.images, benchmark.classes, strict=True)}
        assert each == {20 if "omniglot" in name else 600}


@pytest.mark.parametrize("name", DATASETS)
def test_what_is_missing_and_where_to_get_it(tmp_path, name):
    text = message(lambda: open_images(f"{name}:{tmp_path}"))
    assert text.startswith(f"{name}: {tmp_path} has ")
    assert DATASETS[name].advice in text
    assert "is not a folder" in message(lambda: open_images(f"{name}:{tmp_path / 'x'}"))


# miniImageNet.

MINI = [
    {"class": "n02", "split": "train"},
    {"class": "n01", "split": "train"},
    {"class": "n03", "split": "val"},
    {"class": "n04", "split": "test"},
]


@pytest.fixture
def mini(small):
    small("miniimagenet", "miniimagenet", "split", 4, MINI)


def write_mini(folder) -> None:
    """Images of a class in two folders, as they are often passed on; each class a colour."""
    for number in range(16):
        name = f"n0{number // 4 + 1}"
        place = folder / ("train" if number % 2 else "val") / name / f"{name}{number:04}.png"
        write(place, pixels_of(number, 1, 84)[0])


def assert_mini(images) -> None:
    assert images.class_names == ("n02", "n01", "n03", "n04")
    assert images.splits == ("train", "train", "val", "test")
    assert images.counts.tolist() == [4] * 4
    expected = np.concatenate([pixels_of(number, 1, 84) for number in (*range(4, 8), *range(4), *range(8, 16))])
    np.testing.assert_array_equal(images.read(slice(None))[0], expected)


def test_miniimagenet_of_class_folders(mini, tmp_path):
    write_mini(tmp_path)
    write(tmp_path / "train" / "n99" / "other.png", pixels_of(0, 1, 84)[0])
    images = open_images(f"miniimagenet:{tmp_path}")
    assert_mini(images)
    assert images.names[0] == "n02/n020004.png"


def write_tables(folder) -> None:
    for split in SPLITS:
        names = [row["class"] for row in MINI if row["split"] == split]
        numbers = [(name, 4 * int(name[1:]) - 4 + i) for name in names for i in range(4)]
        lines = [f"{name}{number:04}.png,{name}" for name, number in numbers]
        (folder / f"{split}.csv").write_text("\n".join(["filename,label", *lines]))


def test_miniimagenet_of_csv_files(mini, tmp_path):
    write_mini(tmp_path / "images")
    write(tmp_path / "images" / "n01" / "one-too-many.png", pixels_of(0, 1, 84)[0])
    write_tables(tmp_path)
    assert_mini(open_images(f"miniimagenet:{tmp_path}"))


def test_miniimagenet_without_a_csv_file(mini, tmp_path):
    write_mini(tmp_path / "images")
    write_tables(tmp_path)
    (tmp_path / "val.csv").unlink()
    assert f"miniimagenet: {tmp_path} has 0 of 1 val classes; " in message(
        lambda: open_images(f"miniimagenet:{tmp_path}")
    )


def test_miniimagenet_with_too_few_or_too_many(mini, tmp_path):
    write_mini(tmp_path)
    extra = tmp_path / "val" / "n03" / "extra.png"
    write(extra, pixels_of(0, 1, 84)[0])
    text = message(lambda: open_images(f"miniimagenet:{tmp_path}"))
    assert f"miniimagenet: n03 has 5 images instead of 4 in {tmp_path}; the images are ImageNet's" in text
    extra.unlink()
    (tmp_path / "val" / "n03" / "n030008.png").unlink()
    assert "miniimagenet: n03 has 3 of 4 images in" in message(lambda: open_images(f"miniimagenet:{tmp_path}"))


def mini_cache(split: str) -> dict:
    names = [row["class"] for row in MINI if row["split"] == split]
    numbers = [4 * int(name[1:]) - 4 + i for name in names for i in range(4)]
    return {
        "image_data": np.concatenate([pixels_of(number, 1, 84) for number in numbers]),
        "class_dict": {name: list(range(4 * i, 4 * i + 4)) for i, name in enumerate(names)},
    }


@pytest.mark.parametrize("protocol", range(6))
def test_cached_miniimagenet(mini, tmp_path, protocol):
    for split in SPLITS:
        (tmp_path / f"mini-imagenet-cache-{split}.pkl").write_bytes(pickle.dumps(mini_cache(split), protocol))
    assert_mini(open_images(f"miniimagenet:{tmp_path}"))


@pytest.mark.parametrize("form", ["mini-imagenet-cache-{}.npz", "mini-imagenet-{}.npz"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_cached_miniimagenet_npz(mini, tmp_path, form, save):
    for split in SPLITS:
        pixels = mini_cache(split)["image_data"]
        save(tmp_path / form.format(split), images=pixels, labels=np.arange(len(pixels)) // 4 + 7)
    images = open_images(f"miniimagenet:{tmp_path}")
    assert images.class_names == ("train-7", "train-8", "val-7", "test-7")
    np.testing.assert_array_equal(images.subset("val").read(slice(None))[0], mini_cache("val")["image_data"])


def test_cached_miniimagenet_by_category(mini, tmp_path):
    for split in SPLITS:
        cache = mini_cache(split)
        fields = {
            "data": cache["image_data"],
            "labels": [i for i in range(len(cache["class_dict"])) for _ in range(4)],
            "catname2label": {name: i for i, name in enumerate(cache["class_dict"])},
        }
        name = "train_phase_train" if split == "train" else split
        (tmp_path / f"miniImageNet_category_split_{name}.pickle").write_bytes(pickle.dumps(fields))
    assert_mini(open_images(f"miniimagenet:{tmp_path}"))


def test_cached_images_are_mapped_and_may_be_converted(mini, tmp_path):
    for split in SPLITS:
        (tmp_path / f"mini-imagenet-cache-{split}.pkl").write_bytes(pickle.dumps(mini_cache(split), 4))
    pixels = read_pickle(tmp_path / "mini-imagenet-cache-train.pkl")["image_data"]
    while isinstance(pixels, np.ndarray):
        pixels = pixels.base
    assert isinstance(pixels.obj, mmap.mmap)
    images = open_images(f"miniimagenet:{tmp_path}", 21, 1)
    packed = pack(images, tmp_path / "packed.safetensors")
    assert packed.read(slice(None))[0].shape == (16, 21, 21, 1)
    assert abs(packed.read(slice(None))[0].mean() - 127.5) < 3


def test_cached_miniimagenet_without_a_file(mini, tmp_path):
    (tmp_path / "mini-imagenet-cache-train.pkl").write_bytes(pickle.dumps(mini_cache("train")))
    text = message(lambda: open_images(f"miniimagenet:{tmp_path}"))
    assert "has mini-imagenet-cache-train.pkl but no mini-imagenet-cache-val.pkl; the images are" in text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pictures": 1, "class_dict": {}}, "holds pictures, class_dict, not images and their classes"),
        ({"image_data": np.zeros((2, 8, 8, 3), np.uint8)}, "not images and their classes"),
        ({"image_data": np.zeros((2, 8, 8, 3), np.uint8), "class_dict": {"a": [0]}}, "has 2 images, but 1 labels"),
        ({"image_data": np.zeros((2, 8, 8, 3), np.uint8), "class_dict": {"a": [0, 2]}}, "not images and their classes"),
        ({"image_data": np.zeros((2, 8, 8, 3), np.float32), "class_dict": {"a": [0, 1]}}, "holds float32 [2, 8, 8, 3]"),
        ({"image_data": np.zeros((2, 8, 8), np.uint8), "class_dict": {"a": [0, 1]}}, "holds uint8 [2, 8, 8]"),
        (7, "not images and their classes"),
    ],
)
def test_caches_of_another_kind(mini, tmp_path, fields, expected):
    for split in SPLITS:
        (tmp_path / f"mini-imagenet-cache-{split}.pkl").write_bytes(pickle.dumps(fields))
    assert expected in message(lambda: open_images(f"miniimagenet:{tmp_path}"))


# Pickles that would do harm.


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["whole", "image_data", "class_dict"])
def test_nothing_in_a_pickle_is_run(mini, tmp_path, protocol, place):
    target = tmp_path / "harm"
    fields = Harm(target) if place == "whole" else mini_cache("train") | {place: Harm(target)}
    content = pickle.dumps(fields, protocol)
    for split in SPLITS:
        (tmp_path / f"mini-imagenet-cache-{split}.pkl").write_bytes(content)
    text = message(lambda: open_images(f"miniimagenet:{tmp_path}"))
    assert "can be trusted: it refers to " in text
    assert "mkdir, which no array needs" in text
    assert not target.exists()
    pickle.loads(content)  # else the test would show nothing
    assert target.exists()


def test_objects_in_arrays(tmp_path):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(np.array([Harm(tmp_path / "harm")], object)))
    assert "can be trusted" in message(lambda: read_pickle(tmp_path / "x.pkl"))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_truncated_pickle(tmp_path, protocol, share):
    content = pickle.dumps(mini_cache("train"), protocol)
    (tmp_path / "x.pkl").write_bytes(content[: int(share * len(content))])
    assert "is not a pickle of images that can be trusted" in message(lambda: read_pickle(tmp_path / "x.pkl"))


def test_damaged_npz(mini, tmp_path):
    for split in SPLITS:
        (tmp_path / f"mini-imagenet-{split}.npz").write_bytes(b"PK\3\4 and so on")
    assert "is truncated or not an .npz file" in message(lambda: open_images(f"miniimagenet:{tmp_path}"))


# tieredImageNet.


@pytest.fixture
def tiered(small):
    small("tieredimagenet", "tieredimagenet", "split", 2, [row | {"category": "n00"} for row in MINI])


def png(pixels: np.ndarray) -> np.ndarray:
    """As OpenCV returns an encoded image."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return np.frombuffer(file.getvalue(), np.uint8)[:, None]


def write_tiered_labels(folder, split) -> int:
    ways = sum(row["split"] == split for row in MINI)
    fields = {"label_specific": np.repeat(np.arange(ways), 2), "label_specific_str": ["crane", "eagle"][:ways]}
    (folder / f"{split}_labels.pkl").write_bytes(pickle.dumps(fields, 2))
    return 2 * ways


def tiered_pixels(split, count) -> np.ndarray:
    return pixels_of(SPLITS.index(split), count, 84)


@pytest.mark.parametrize("protocol", range(6))
def test_released_tieredimagenet(tiered, tmp_path, protocol):
    for split in SPLITS:
        count = write_tiered_labels(tmp_path, split)
        encoded = [png(one) for one in tiered_pixels(split, count)]
        (tmp_path / f"{split}_images_png.pkl").write_bytes(pickle.dumps(encoded, protocol))
    images = open_images(f"tieredimagenet:{tmp_path}")
    assert images.class_names == ("crane", "eagle", "crane #2", "crane #3")
    assert images.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    expected = np.concatenate([tiered_pixels("train", 4), tiered_pixels("val", 2), tiered_pixels("test", 2)])
    np.testing.assert_array_equal(images.read(slice(None))[0], expected)


def test_unpacked_tieredimagenet_is_blue_green_red(tiered, tmp_path):
    for split in SPLITS:
        count = write_tiered_labels(tmp_path, split)
        np.savez(tmp_path / f"{split}_images.npz", images=tiered_pixels(split, count)[..., ::-1])
    images = open_images(f"tieredimagenet:{tmp_path}").subset("test")
    np.testing.assert_array_equal(images.read(slice(None))[0], tiered_pixels("test", 2))


def test_released_tieredimagenet_without_labels(tiered, tmp_path):
    for split in SPLITS:
        (tmp_path / f"{split}_images_png.pkl").write_bytes(pickle.dumps([png(tiered_pixels(split, 1)[0])]))
    assert "has images but no train_labels.pkl; get {train" in message(
        lambda: open_images(f"tieredimagenet:{tmp_path}")
    )


def test_tieredimagenet_in_imagenet(tiered, tmp_path):
    """Classes differ in size; the sums count."""
    for place in ("n01/1.JPEG", "n01/2.JPEG", "n01/3.JPEG", "n02/1.JPEG", "n03/1.JPEG", "n03/2.JPEG", "n04/1.JPEG"):
        write(tmp_path / "train" / place, pixels_of(0, 1, 100)[0])
    text = message(lambda: open_images(f"tieredimagenet:{tmp_path}"))
    assert f"tieredimagenet: test has 1 of 2 images in {tmp_path}; get " in text
    write(tmp_path / "train" / "n04" / "2.JPEG", pixels_of(0, 1, 100)[0])
    images = open_images(f"tieredimagenet:{tmp_path}")
    assert images.counts.tolist() == [1, 3, 2, 2]
    assert images.read(slice(None))[0].shape == (8, 84, 84, 3)


# CIFAR-FS and FC100.

CIFAR = [
    {"class": "apple", "superclass": "fruit", "cifar-fs": "train", "fc100": "test"},
    {"class": "baby", "superclass": "people", "cifar-fs": "val", "fc100": "train"},
    {"class": "pear", "superclass": "fruit", "cifar-fs": "test", "fc100": "val"},
]


@pytest.fixture(params=["cifar-fs", "fc100"])
def cifar(request, small):
    small(request.param, "cifar100", request.param, 6, CIFAR)
    return request.param


def cifar_split(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images, and their labels in no order: five of each class for train, one for test."""
    labels = np.array([2, 0, 1, 1, 0, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]) if part == "train" else np.array([1, 2, 0])
    return pixels_of(len(labels), len(labels), 32), labels


def planes(pixels: np.ndarray) -> np.ndarray:
    return pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)


def assert_cifar(images, name) -> None:
    assert images.class_names == ("apple", "baby", "pear")
    assert images.splits == tuple(row[name] for row in CIFAR)
    both = [cifar_split("train"), cifar_split("test")]
    for label, position in enumerate(images.class_names):
        expected = np.concatenate([pixels[labels == label] for pixels, labels in both])
        one = images.subset(images.splits[images.class_names.index(position)])
        np.testing.assert_array_equal(one.read(slice(None))[0], expected)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_cifar_pickles(cifar, tmp_path, protocol):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for part in ("train", "test"):
        pixels, labels = cifar_split(part)
        fields = {"data": planes(pixels), "fine_labels": labels.tolist(), "filenames": ["x.png"] * len(labels)}
        (folder / part).write_bytes(pickle.dumps(fields, protocol))
    (folder / "meta").touch()
    assert_cifar(open_images(f"{cifar}:{tmp_path}"), cifar)
    fields = {"data": planes(pixels[:2]), "fine_labels": [0, -1]}
    (folder / "train").write_bytes(pickle.dumps(fields))
    assert "label -1 is none of CIFAR-100's" in message(lambda: open_images(f"{cifar}:{tmp_path}"))
    (folder / "train").write_bytes(pickle.dumps(fields | {"fine_labels": [0]}))
    assert "has 2 images of uint8, but 1 labels" in message(lambda: open_images(f"{cifar}:{tmp_path}"))
    (folder / "train").write_bytes(pickle.dumps({"data": 1}))
    assert "is not a file of CIFAR-100's Python version; get CIFAR-100" in message(
        lambda: open_images(f"{cifar}:{tmp_path}")
    )


def test_cifar_binaries(cifar, tmp_path):
    for part in ("train", "test"):
        pixels, labels = cifar_split(part)
        records = np.concatenate([np.full((len(labels), 1), 9), labels[:, None], planes(pixels)], 1)
        (tmp_path / f"{part}.bin").write_bytes(records.astype(np.uint8).tobytes())
    assert_cifar(open_images(f"{cifar}:{tmp_path}"), cifar)
    with open(tmp_path / "test.bin", "r+b") as file:
        file.truncate(4000)
    assert "test.bin is truncated: 4,000 bytes" in message(lambda: open_images(f"{cifar}:{tmp_path}"))
    (tmp_path / "test.bin").write_bytes(b"\0\77" + bytes(3072))
    assert "label 63 is none of CIFAR-100's 3" in message(lambda: open_images(f"{cifar}:{tmp_path}"))


def test_cifar_binaries_of_each_class(cifar, tmp_path):
    for part in ("train", "test"):
        pixels, labels = cifar_split(part)
        (tmp_path / f"split {part} bins").mkdir()
        for label, row in enumerate(CIFAR):
            path = tmp_path / f"split {part} bins" / f"{row['class']}-{label}-{part}.bin"
            path.write_bytes(planes(pixels[labels == label]).tobytes())
    assert_cifar(open_images(f"{cifar}:{tmp_path}"), cifar)
    path.unlink()
    assert f"{cifar}: pear has 5 of 6 images in {tmp_path}; get" in message(lambda: open_images(f"{cifar}:{tmp_path}"))


def test_cifar_class_folders(cifar, tmp_path):
    for part in ("train", "test"):
        for number, (pixels, label) in enumerate(zip(*cifar_split(part), strict=True)):
            name = CIFAR[label]["class"]
            write(tmp_path / "data" / name / f"{'b' if part == 'test' else 'a'}{number:03}.png", pixels)
    assert_cifar(open_images(f"{cifar}:{tmp_path}"), cifar)


def test_cached_cifar(cifar, tmp_path):
    for split in SPLITS:
        fields = {"data": pixels_of(0, 6, 32), "labels": [3] * 6}
        (tmp_path / f"{cifar.replace('-', '_').upper()}_{split}.pickle").write_bytes(pickle.dumps(fields))
    assert open_images(f"{cifar}:{tmp_path}").class_names == ("train-3", "val-3", "test-3")


# Omniglot.


def omniglot_row(part, alphabet, first, last, split):
    return {"set": part, "alphabet": alphabet, "first": str(first), "last": str(last), "vinyals": split}


OMNIGLOT = [
    omniglot_row("background", "A", 1, 2, "train"),
    omniglot_row("background", "B", 1, 1, "val"),
    omniglot_row("evaluation", "C", 1, 1, "train"),
    omniglot_row("evaluation", "C", 2, 3, "test"),
]


@pytest.fixture
def omniglot(monkeypatch, tmp_path):
    """Six characters of two drawings: a black stroke along the upper edge of white paper."""
    monkeypatch.setattr(benchmarks, "rows_of", lambda asked: OMNIGLOT)
    monkeypatch.setattr(benchmarks, "LAKE_VALIDATION", 1)
    for name, sizes in {"omniglot": (3, 1, 2), "omniglot-lake": (2, 1, 3)}.items():
        changed = dataclasses.replace(DATASETS[name], classes=sizes, images=tuple(2 * size for size in sizes))
        monkeypatch.setitem(DATASETS, name, changed)
    drawing = np.full((105, 105), True)
    drawing[:15] = False
    for part, characters in {"background": ("A/1", "A/2", "B/1"), "evaluation": ("C/1", "C/2", "C/3")}.items():
        for character in characters:
            folder = tmp_path / "Omniglot" / f"images_{part}" / character.replace("/", "/character0")
            for number in range(2):
                write(folder / f"0001_{number}.png", drawing)
    return tmp_path


def test_omniglot(omniglot):
    images = open_images(f"omniglot:{omniglot}")
    assert (images.side, images.channels) == (28, 1)
    assert images.class_names[:6] == tuple(f"{c[0]}/character0{c[1]}" for c in ("A1", "A2", "B1", "C1", "C2", "C3"))
    assert images.splits == ("train", "train", "val", "train", "test", "test") * 4
    assert images.counts.tolist() == [2] * 24
    pixels, _ = images.read(np.array([0, 12]))
    assert (pixels[0, :3] > 240).all()  # ink
    assert (pixels[0, 6:] < 10).all()
    assert (pixels[1, :, :3] > 240).all()  # turned against the clock: along the left edge
    assert 0 < pixels[0, 4, 14, 0] < 255 or 0 < pixels[0, 3, 14, 0] < 255  # antialiased


def test_omniglot_of_lake(omniglot):
    images = open_images(f"omniglot-lake:{omniglot}")
    assert images.splits == ("train", "train", "val", "test", "test", "test")


def test_incomplete_omniglot(omniglot):
    folder = omniglot / "Omniglot" / "images_evaluation" / "C" / "character02"
    (folder / "0001_0.png").unlink()
    text = message(lambda: open_images(f"omniglot:{omniglot}"))
    assert "omniglot: C/character02 has 1 of 2 images" in text
    (folder / "0001_1.png").unlink()
    text = message(lambda: open_images(f"omniglot:{omniglot}"))
    assert "omniglot: images_evaluation/C/character02 has no images in" in text
    assert "get images_background.zip" in text
