"""The known benchmarks, in the forms in which they are passed on; each is checked against its published counts."""

import csv
import dataclasses
import importlib.resources
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from metaleo.data.feature_files import map_member
from metaleo.data.metaset import SPLITS
from metaleo.errors import BadInput
from metaleo.features.images import (
    SIDE,
    ArrayImages,
    FileIndex,
    ImageFiles,
    Images,
    Listed,
    PackedImages,
    TurnedImages,
    find_images,
    from_listed,
    of_size,
    read_class_folders,
    read_csv,
    read_packed,
)
from metaleo.features.pickled import read_pickle

LAKE_VALIDATION = 5
"""Lake's split has no validation classes: we take the last background alphabets by name, this many."""


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """How to read one, what it must hold, and what to do when it does not."""

    reader: Callable[[Path, int, int], Images]
    side: int
    channels: int
    classes: tuple[int, ...]
    """Of train, val and test."""
    images: tuple[int, ...]
    advice: str
    """Where to get it, and where to put it."""
    even: bool = True
    """All classes of a split have the same size."""


def read_dataset(name: str, folder: Path, side: int | None = None, channels: int | None = None) -> Images:
    """A benchmark from its folder, at its usual size unless another is given."""
    benchmark = DATASETS[name]
    try:
        if not folder.is_dir():
            raise BadInput(f"{folder} is not a folder")
        images = benchmark.reader(folder, side or benchmark.side, channels or benchmark.channels)
        check_counts(benchmark, images, folder)
    except BadInput as error:
        raise BadInput(f"{name}: {error}; {benchmark.advice}") from error
    return TurnedImages.of(images) if name == "omniglot" else images


def check_counts(benchmark: ImageDataset, images: Images, folder: Path) -> None:
    """Every split has its classes, every class its images."""
    counts = images.counts.tolist()
    for split, ways, total in zip(SPLITS, benchmark.classes, benchmark.images, strict=True):
        here = [position for position, other in enumerate(images.splits) if other == split]
        if len(here) != ways:
            raise BadInput(f"{folder} has {len(here)} of {ways} {split} classes")
        sizes = {images.class_names[position]: counts[position] for position in here}
        for name, count in sizes.items():
            if benchmark.even and count != total // ways:
                raise BadInput(f"{name} has {amount(count, total // ways)} in {folder}")
        if sum(sizes.values()) != total:
            raise BadInput(f"{split} has {amount(sum(sizes.values()), total)} in {folder}")


def amount(count: int, published: int) -> str:
    return f"{count:,} of {published:,} images" if count < published else f"{count:,} images instead of {published:,}"


def rows_of(name: str) -> list[dict[str, str]]:
    """A class list of this package."""
    text = (importlib.resources.files("metaleo") / "assets" / "splits" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def folder_with(folder: Path, *names: str) -> Path | None:
    """The folder that holds all these: this one, or one in it."""
    inside = (entry for entry in sorted(folder.iterdir()) if entry.is_dir())
    return next((parent for parent in (folder, *inside) if all((parent / name).exists() for name in names)), None)


# miniImageNet and tieredImageNet.


def read_miniimagenet(folder: Path, side: int, channels: int) -> Images:
    """Cached arrays, or JPEGs with the CSV files of Ravi and Larochelle, or a folder for each class."""
    caches = find_caches(folder, MINI_CACHES)
    if caches:
        return from_caches([read_cache(path, split) for split, path in caches.items()], side, channels)
    if any((folder / f"{split}.csv").is_file() for split in SPLITS):
        return read_class_folders(folder, side, channels)
    return by_class(folder, {row["class"]: row["split"] for row in rows_of("miniimagenet")}, side, channels)


def read_tieredimagenet(folder: Path, side: int, channels: int) -> Images:
    """The authors' released files, or the folders of their classes in ImageNet."""
    caches = find_caches(folder, TIERED_CACHES)
    if not caches:
        return by_class(folder, {row["class"]: row["split"] for row in rows_of("tieredimagenet")}, side, channels)
    labels = find_caches(folder, ("{}_labels.pkl",))
    if not labels:
        raise BadInput(f"{next(iter(caches.values())).parent} has images but no train_labels.pkl")
    parts = [read_cache(path, split, labels[split]) for split, path in caches.items()]
    if caches["train"].suffix == ".npz":  # unpacked by OpenCV: blue, green, red
        parts = [part._replace(pixels=np.asarray(part.pixels)[..., ::-1]) for part in parts]
    return from_caches(parts, side, channels)


def by_class(folder: Path, splits: dict[str, str], side: int, channels: int) -> ImageFiles:
    """Image files that lie in folders of their class's name, wherever those are."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in find_images(folder):
        label = path.rpartition("/")[0].rpartition("/")[2]
        if label in splits:
            found[label].append(path)
    missing = [label for label in splits if label not in found]
    if missing:
        raise BadInput(f"{folder} has {len(found)} of {len(splits)} classes; {missing[0]} is missing")
    return from_listed(
        [
            Listed(f"{label}/{path.rpartition('/')[2]}", f"{folder}/{path}", label, split)
            for label, split in splits.items()
            for path in sorted(found[label], key=lambda path: path.rpartition("/")[2])
        ],
        side,
        channels,
    )


# Cached arrays: a file for each split.

MINI_CACHES = (
    "mini-imagenet-cache-{}.pkl",
    "mini-imagenet-cache-{}.npz",
    "mini-imagenet-{}.npz",
    "miniImageNet_category_split_{}.pickle",
)
TIERED_CACHES = ("{}_images.npz", "{}_images_png.pkl")


class Cache(NamedTuple):
    """The images of a split."""

    split: str
    pixels: Any
    """An array of them, or a list of encoded images."""
    labels: Int[np.ndarray, " image"]
    names: Sequence[str]
    """Of the classes."""


def find_caches(folder: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """The three files of the first of these forms that is there, if any is."""
    for pattern in patterns:
        names = {split: pattern.format(split) for split in SPLITS}
        if pattern.startswith("miniImageNet_category"):  # its train file is called by two words
            names["train"] = pattern.format("train_phase_train")
        parent = folder_with(folder, names["train"])
        if parent is not None:
            missing = [name for name in names.values() if not (parent / name).is_file()]
            if missing:
                raise BadInput(f"{parent} has {names['train']} but no {missing[0]}")
            return {split: parent / name for split, name in names.items()}
    return {}


def read_cache(path: Path, split: str, labels_path: Path | None = None) -> Cache:
    """A cached split; its labels may be in a file of their own."""
    fields = read_arrays(path) if path.suffix == ".npz" else read_pickle(path)
    fields = fields if isinstance(fields, dict) else {"images": fields}
    fields |= read_pickle(labels_path) if labels_path else {}
    try:
        pixels = next(fields[name] for name in ("image_data", "images", "data") if name in fields)
        labels, names = read_labels(fields, len(pixels), split)
    except Exception as error:  # whatever fields of other kinds lead to
        raise BadInput(f"{path} holds {', '.join(map(str, fields))[:80]}, not images and their classes") from error
    if len(labels) != len(pixels) or labels.min(initial=0) < 0:
        raise BadInput(f"{path} has {len(pixels):,} images, but {np.sum(labels >= 0):,} labels")
    if isinstance(pixels, np.ndarray) and (pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3):
        raise BadInput(f"{path} holds {pixels.dtype} {list(pixels.shape)}, not uint8 [image, height, width, 3]")
    return Cache(split, pixels, labels, names)


def read_labels(fields: dict[str, Any], count: int, split: str) -> tuple[Int[np.ndarray, " image"], list[str]]:
    """Labels, and the names of their classes where there are some: from the rows of each class, or as numbers."""
    if "class_dict" in fields:
        labels = np.full(count, -1)
        for position, rows in enumerate(fields["class_dict"].values()):
            labels[np.asarray(rows, np.int64)] = position
        return labels, [str(name) for name in fields["class_dict"]]
    given = next(fields[name] for name in ("labels", "targets", "label_specific") if name in fields)
    numbers, labels = np.unique(np.asarray(given), return_inverse=True)
    names = dict(enumerate(fields.get("label_specific_str", ())))
    names |= {number: name for name, number in fields.get("catname2label", {}).items()}
    return labels, [str(names.get(int(number), f"{split}-{number}")) for number in numbers]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, mapped unless they are compressed."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive, zipfile.ZipFile(path) as zipped:
            members = {member.filename.removesuffix(".npy"): member for member in zipped.infolist()}
            return {
                name: map_member(path, member.header_offset)
                if member.compress_type == zipfile.ZIP_STORED
                else archive[name]
                for name, member in members.items()
            }
    except Exception as error:  # whatever a damaged file makes the parsers say
        raise BadInput(f"{path} is truncated or not an .npz file of numbers ({error})") from error


def from_caches(caches: Sequence[Cache], side: int, channels: int) -> Images:
    """The splits one after the other; classes of one name are told apart by a number."""
    labels, class_names, names = [], [], []
    for cache in caches:
        labels.append(cache.labels + len(class_names))
        for name in cache.names:
            again = sum(other.partition(" #")[0] == name for other in class_names)
            class_names.append(f"{name} #{again + 1}" if again else name)
        names += [f"{cache.split}-{row}" for row in range(len(cache.labels))]
    shared = {
        "labels": np.concatenate(labels).astype(np.int32),
        "class_names": tuple(class_names),
        "splits": tuple(cache.split for cache in caches for _ in cache.names),
        "names": names,
        "side": side,
        "channels": channels,
    }
    if all(isinstance(cache.pixels, np.ndarray) for cache in caches):
        return ArrayImages(parts=tuple(cache.pixels for cache in caches), **shared)
    return ImageFiles(sources=[np.ravel(one).data for cache in caches for one in cache.pixels], **shared)


# CIFAR-FS and FC100, two ways to split CIFAR-100.


def read_cifar_fs(folder: Path, side: int, channels: int) -> Images:
    return read_cifar(folder, side, channels, "cifar-fs", "CIFAR_FS_{}.pickle")


def read_fc100(folder: Path, side: int, channels: int) -> Images:
    return read_cifar(folder, side, channels, "fc100", "FC100_{}.pickle")


def read_cifar(folder: Path, side: int, channels: int, column: str, cache: str) -> Images:
    """All 600 images of a class: CIFAR-100's own division into train and test plays no part."""
    caches = find_caches(folder, (cache,))
    if caches:
        return from_caches([read_cache(path, split) for split, path in caches.items()], side, channels)
    rows = rows_of("cifar100")
    splits = {row["class"]: row[column] for row in rows}
    parts = list(cifar_parts(folder))
    if not parts:
        return by_class(folder, splits, side, channels)
    labels = np.concatenate([part.labels for part in parts])
    if labels.max(initial=0) >= len(rows):
        raise BadInput(f"{folder}: label {labels.max()} is none of CIFAR-100's {len(rows)}")
    return ArrayImages(
        labels=labels.astype(np.int32),
        class_names=tuple(splits),
        splits=tuple(splits.values()),
        names=[f"{part.name}-{row}" for part in parts for row in range(len(part.labels))],
        side=side,
        channels=channels,
        parts=tuple(part.pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for part in parts),
    )


class CifarPart(NamedTuple):
    name: str
    pixels: UInt8[np.ndarray, "image 3072"]
    """Red, then green, then blue."""
    labels: Int[np.ndarray, " image"]


def cifar_parts(folder: Path) -> Iterable[CifarPart]:
    """CIFAR-100 from its pickles, from its binary files, or from a binary file for each class."""
    pickles, binaries = folder_with(folder, "train", "test", "meta"), folder_with(folder, "train.bin", "test.bin")
    if pickles:
        return [cifar_pickle(pickles / name) for name in ("train", "test")]
    if binaries:
        return [cifar_binary(binaries / name) for name in ("train.bin", "test.bin")]
    named = ((re.fullmatch(r".+-(\d+)-(train|test)", path.stem), path) for path in folder.rglob("*.bin"))
    found = [(match[2] == "test", int(match[1]), path) for match, path in named if match]
    return [cifar_class(path, label) for _, label, path in sorted(found)]


def cifar_pickle(path: Path) -> CifarPart:
    fields = read_pickle(path)
    try:
        return CifarPart(path.name, fields["data"].reshape(-1, 3072), np.asarray(fields["fine_labels"], np.int64))
    except Exception as error:  # whatever fields of other kinds lead to
        raise BadInput(f"{path} is not a file of CIFAR-100's Python version") from error


def cifar_binary(path: Path) -> CifarPart:
    """Records of a coarse label, a fine label and 3,072 pixels."""
    records = read_records(path, 3074)
    return CifarPart(path.stem, records[:, 2:], records[:, 1].astype(np.int64))


def cifar_class(path: Path, label: int) -> CifarPart:
    records = read_records(path, 3072)
    return CifarPart(path.stem, records, np.full(len(records), label))


def read_records(path: Path, size: int) -> UInt8[np.ndarray, "record {size}"]:
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    if len(content) % size or not len(content):
        raise BadInput(f"{path} is truncated: {len(content):,} bytes are not whole records of {size:,}")
    return content.reshape(-1, size)


# Omniglot: white ink on black.


def read_omniglot(folder: Path, side: int, channels: int) -> Images:
    """The split of Vinyals et al. (2016)."""
    return read_characters(folder, side, channels, lambda row: row["vinyals"])


def read_omniglot_lake(folder: Path, side: int, channels: int) -> Images:
    """The split of Lake et al. (2015), some of whose background alphabets become val."""
    background = sorted({row["alphabet"] for row in rows_of("omniglot") if row["set"] == "background"})
    splits = dict.fromkeys(background, "train") | dict.fromkeys(background[-LAKE_VALIDATION:], "val")
    return read_characters(folder, side, channels, lambda row: splits.get(row["alphabet"], "test"))


def read_characters(folder: Path, side: int, channels: int, split_of: Callable[[dict[str, str]], str]) -> ImageFiles:
    """Every character of every alphabet is a class."""
    parent = folder_with(folder, "images_background", "images_evaluation")
    if parent is None:
        raise BadInput(f"{folder} has no folders images_background and images_evaluation")
    found: dict[str, list[str]] = defaultdict(list)
    for part in ("images_background", "images_evaluation"):
        for path in find_images(parent / part):
            found[f"{part}/{path.rpartition('/')[0]}"].append(path.rpartition("/")[2])
    listed = []
    for row in rows_of("omniglot"):
        for number in range(int(row["first"]), int(row["last"]) + 1):
            label = f"{row['alphabet']}/character{number:02}"
            place = f"images_{row['set']}/{label}"
            if place not in found:
                raise BadInput(f"{place} has no images in {parent}")
            split = split_of(row)
            listed += [Listed(f"{label}/{name}", f"{parent}/{place}/{name}", label, split) for name in found[place]]
    return from_listed(listed, side, channels, inverted=True)


SAMPLE = "omniglot-sample"
"""All of Omniglot in two bits per pixel, inside this package (its README says how it was made)."""


def read_sample() -> PackedImages:
    """Every drawing at 28 × 28 pixels of four greys, in the split of `read_omniglot_lake`."""
    folder = importlib.resources.files("metaleo") / "assets" / "drawings"
    with importlib.resources.as_file(folder / "omniglot.npz") as path:
        fields = read_arrays(path)
    ways, drawings, _ = fields["ink"].shape
    class_names = tuple(map(str, fields["class_names"]))
    bits = np.unpackbits(fields["ink"], axis=2).reshape(-1, 28, 28, 1, 2)
    return PackedImages(
        labels=np.repeat(np.arange(ways, dtype=np.int32), drawings),
        class_names=class_names,
        splits=tuple(map(str, fields["split"])),
        names=[f"{name}/{number:02}" for name in class_names for number in range(1, drawings + 1)],
        side=28,
        channels=1,
        source=SAMPLE,
        pixels=170 * bits[..., 0] + 85 * bits[..., 1],
    )


MINI_ADVICE = (
    "the images are ImageNet's (image-net.org), the choice Ravi and Larochelle's (github.com/twitter-research/"
    "meta-learning-lstm): put train.csv, val.csv, test.csv and images/ there, or 100 folders of 600 images named by "
    "WordNet id, or mini-imagenet-cache-{train,val,test}.pkl"
)
TIERED_ADVICE = (
    "get {train,val,test}_images_png.pkl and {train,val,test}_labels.pkl as github.com/renmengye/few-shot-ssl-public "
    "says and put them there, or ImageNet's train folder (image-net.org) with a folder for each WordNet id"
)
CIFAR_ADVICE = (
    "get CIFAR-100 (cs.toronto.edu/~kriz/cifar.html), its Python or binary version, and put its unpacked folder there"
)
OMNIGLOT_ADVICE = (
    "get images_background.zip and images_evaluation.zip (github.com/brendenlake/omniglot) and unpack both there"
)
DATASETS = {
    "miniimagenet": ImageDataset(read_miniimagenet, 84, 3, (64, 16, 20), (38_400, 9_600, 12_000), MINI_ADVICE),
    "tieredimagenet": ImageDataset(
        read_tieredimagenet, 84, 3, (351, 97, 160), (448_695, 124_261, 206_209), TIERED_ADVICE, even=False
    ),
    "cifar-fs": ImageDataset(read_cifar_fs, 32, 3, (64, 16, 20), (38_400, 9_600, 12_000), CIFAR_ADVICE),
    "fc100": ImageDataset(read_fc100, 32, 3, (60, 20, 20), (36_000, 12_000, 12_000), CIFAR_ADVICE),
    "omniglot": ImageDataset(read_omniglot, 28, 1, (1028, 172, 423), (20_560, 3_440, 8_460), OMNIGLOT_ADVICE),
    "omniglot-lake": ImageDataset(read_omniglot_lake, 28, 1, (813, 151, 659), (16_260, 3_020, 13_180), OMNIGLOT_ADVICE),
}
"""By the names that `open_images` knows."""


def open_images(source: str | Path, side: int | None = None, channels: int | None = None) -> Images:
    """Images from any source (see `images`), of this size and 3 or 1 channels, or as is natural for the source."""
    if side is not None and side < 1:
        raise BadInput(f"an image's side must be at least 1 pixel, not {side}")
    if channels not in (None, 1, 3):
        raise BadInput(f"images have 3 channels or 1, not {channels}")
    path = Path(source)
    name, colon, folder = str(source).partition(":")
    if source == SAMPLE:
        return of_size(read_sample(), str(source), side, channels)
    if name in DATASETS and colon:
        images = read_dataset(name, Path(folder), side, channels)
    elif path.is_dir():
        images = read_class_folders(path, side or SIDE, channels or 3)
    elif path.is_file() and path.suffix == ".safetensors":
        return read_packed(path, side, channels)
    elif path.is_file() and path.suffix == ".csv":
        images = from_listed(read_csv(path, FileIndex(path.parent)), side or SIDE, channels or 3)
    else:
        known = ", ".join(DATASETS)
        problem = "is no source of images" if path.exists() or colon else "does not exist"
        raise BadInput(
            f"{source} {problem}; one is a packed .safetensors file, a folder of class folders, a .csv file of "
            f"filename,label,split, NAME:FOLDER with NAME one of {known}, or {SAMPLE}"
        )
    return dataclasses.replace(images, source=f"{name}:{Path(folder).name}" if colon else path.name)
