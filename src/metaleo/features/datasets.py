"""Read the known benchmarks in their common file formats and check each against its published counts."""

import csv
import dataclasses
import importlib.resources
import operator
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
from metaleo.data.tables import show
from metaleo.errors import BadInput, one_line
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
"""Number of background alphabets, the last by name, used for validation: Lake's split has no validation classes."""


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """A benchmark: its reader, its expected counts, and the advice to print when these do not match."""

    reader: Callable[[Path, int, int], Images]
    side: int
    channels: int
    classes: tuple[int, ...]
    """Number of classes in train, val and test."""
    images: tuple[int, ...]
    """Number of images in train, val and test."""
    advice: str
    """Where to download the files and where to put them."""
    even: bool = True
    """Whether all classes of a split have the same number of images."""


def read_dataset(name: str, folder: Path, side: int | None = None, channels: int | None = None) -> Images:
    """Read a benchmark from its folder, at its usual image size unless another is given."""
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
    """Raise `BadInput` unless every split has its published number of classes and images."""
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
    """Read one of the class lists shipped with the package."""
    text = (importlib.resources.files("metaleo") / "assets" / "splits" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def folder_with(folder: Path, *names: str) -> Path | None:
    """Return the folder that holds all these names: `folder` itself or one of its subfolders."""
    inside = (entry for entry in sorted(folder.iterdir()) if entry.is_dir())
    return next((parent for parent in (folder, *inside) if all((parent / name).exists() for name in names)), None)


# miniImageNet and tieredImageNet.


def read_miniimagenet(folder: Path, side: int, channels: int) -> Images:
    """Read cached arrays, JPEGs with the CSV files of Ravi and Larochelle, or one folder per class."""
    caches = find_caches(folder, MINI_CACHES)
    if caches:
        return from_caches([read_cache(path, split) for split, path in caches.items()], side, channels)
    if any((folder / f"{split}.csv").is_file() for split in SPLITS):
        return read_class_folders(folder, side, channels)
    return by_class(folder, {row["class"]: row["split"] for row in rows_of("miniimagenet")}, side, channels)


def read_tieredimagenet(folder: Path, side: int, channels: int) -> Images:
    """Read the files that the authors released, or the ImageNet folders of the same classes."""
    caches = find_caches(folder, TIERED_CACHES)
    if not caches:
        return by_class(folder, {row["class"]: row["split"] for row in rows_of("tieredimagenet")}, side, channels)
    labels = find_caches(folder, ("{}_labels.pkl",))
    if not labels:
        raise BadInput(f"{next(iter(caches.values())).parent} has images but no train_labels.pkl")
    parts = [read_cache(path, split, labels[split]) for split, path in caches.items()]
    if caches["train"].suffix == ".npz":  # decoded by OpenCV: channels are blue, green, red
        parts = [part._replace(pixels=np.asarray(part.pixels)[..., ::-1]) for part in parts]
    return from_caches(parts, side, channels)


def by_class(folder: Path, splits: dict[str, str], side: int, channels: int) -> ImageFiles:
    """List the image files whose parent folder, at any depth, is named after their class."""
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


# Cached arrays: one file per split.

MINI_CACHES = (
    "mini-imagenet-cache-{}.pkl",
    "mini-imagenet-cache-{}.npz",
    "mini-imagenet-{}.npz",
    "miniImageNet_category_split_{}.pickle",
)
TIERED_CACHES = ("{}_images.npz", "{}_images_png.pkl")


class Cache(NamedTuple):
    """The images of one split."""

    split: str
    pixels: Any
    """An array of decoded images, or a list of encoded ones."""
    labels: Int[np.ndarray, " image"]
    names: Sequence[str]
    """Names of the classes."""


def find_caches(folder: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """Return the file of each split for the first file name pattern that is present; empty if none is."""
    for pattern in patterns:
        names = {split: pattern.format(split) for split in SPLITS}
        if pattern.startswith("miniImageNet_category"):  # its train file is called train_phase_train
            names["train"] = pattern.format("train_phase_train")
        parent = folder_with(folder, names["train"])
        if parent is not None:
            missing = [name for name in names.values() if not (parent / name).is_file()]
            if missing:
                raise BadInput(f"{parent} has {names['train']} but no {missing[0]}")
            return {split: parent / name for split, name in names.items()}
    return {}


def read_cache(path: Path, split: str, labels_path: Path | None = None) -> Cache:
    """Read a cached split; its labels may be in a separate file."""
    fields = read_arrays(path) if path.suffix == ".npz" else read_pickle(path)
    fields = fields if isinstance(fields, dict) else {"images": fields}
    beside = read_pickle(labels_path) if labels_path else {}
    try:
        fields |= beside
        pixels = next(fields[name] for name in ("image_data", "images", "data") if name in fields)
        labels, names = read_labels(fields, len(pixels), split)
    except Exception as error:  # fields of unexpected types can raise anything
        raise BadInput(f"{path} holds {show(list(fields))[:80]}, not images and their classes") from error
    if len(labels) != len(pixels) or labels.min(initial=0) < 0:
        raise BadInput(f"{path} has {len(pixels):,} images, but {np.sum(labels >= 0):,} labels")
    if isinstance(pixels, np.ndarray) and (pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3):
        raise BadInput(f"{path} holds {pixels.dtype} {list(pixels.shape)}, not uint8 [image, height, width, 3]")
    if not isinstance(pixels, np.ndarray) and not all(
        isinstance(one, np.ndarray | bytes | memoryview) for one in pixels
    ):
        raise BadInput(f"{path} holds what are no encoded images")
    return Cache(split, pixels, labels, names)


def read_labels(fields: dict[str, Any], count: int, split: str) -> tuple[Int[np.ndarray, " image"], list[str]]:
    """Return labels and class names, from `class_dict` (the rows of each class) or from an array of class numbers."""
    if "class_dict" in fields:
        labels = np.full(count, -1)
        for position, rows in enumerate(fields["class_dict"].values()):
            labels[rows_within(rows, count)] = position
        return labels, [str(name) for name in fields["class_dict"]]
    given = next(fields[name] for name in ("labels", "targets", "label_specific") if name in fields)
    numbers, labels = np.unique(whole_numbers(given), return_inverse=True)
    names = dict(enumerate(fields.get("label_specific_str", ())))
    names |= {number: name for name, number in fields.get("catname2label", {}).items()}
    return labels, [str(names.get(int(number), f"{split}-{number}")) for number in numbers]


def whole_numbers(values: Any) -> Int[np.ndarray, " number"]:
    """A list or array of whole numbers; text would become an array in which all take as much as the longest."""
    if not isinstance(values, np.ndarray):
        values = np.array([operator.index(one) for one in values], np.int64)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise ValueError("these are not whole numbers")
    return values


def rows_within(values: Any, count: int) -> Int[np.ndarray, " row"]:
    rows = whole_numbers(values)
    if rows.min(initial=0) < 0 or rows.max(initial=0) >= count:
        raise ValueError(f"row {rows.min(initial=0)} or {rows.max(initial=0)} does not exist")
    return rows


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz file, memory-mapped unless they are compressed."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive, zipfile.ZipFile(path) as zipped:
            members = {member.filename.removesuffix(".npy"): member for member in zipped.infolist()}
            return {
                name: map_member(path, member.header_offset)
                if member.compress_type == zipfile.ZIP_STORED
                else archive[name]
                for name, member in members.items()
            }
    except Exception as error:  # the parsers can raise anything on a damaged file
        raise BadInput(f"{path} is truncated or not an .npz file of numbers ({one_line(error)})") from error


def from_caches(caches: Sequence[Cache], side: int, channels: int) -> Images:
    """Concatenate the splits; classes that share a name get a number appended."""
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
    """Read all 600 images of each class, from both the train and the test set of CIFAR-100."""
    caches = find_caches(folder, (cache,))
    if caches:
        return from_caches([read_cache(path, split) for split, path in caches.items()], side, channels)
    rows = rows_of("cifar100")
    splits = {row["class"]: row[column] for row in rows}
    parts = list(cifar_parts(folder))
    if not parts:
        return by_class(folder, splits, side, channels)
    labels = np.concatenate([part.labels for part in parts])
    for label in (labels.min(initial=0), labels.max(initial=0)):
        if not 0 <= label < len(rows):
            raise BadInput(f"{folder}: label {label} is none of CIFAR-100's {len(rows)}")
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
    """All red values, then all green, then all blue."""
    labels: Int[np.ndarray, " image"]


def cifar_parts(folder: Path) -> Iterable[CifarPart]:
    """Read CIFAR-100 from its pickles, its binary files, or one binary file per class and set."""
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
        part = CifarPart(path.name, fields["data"].reshape(-1, 3072), whole_numbers(fields["fine_labels"]))
    except Exception as error:  # fields of unexpected types can raise anything
        raise BadInput(f"{path} is not a file of CIFAR-100's Python version") from error
    if part.pixels.dtype != np.uint8 or len(part.pixels) != len(part.labels):
        raise BadInput(f"{path} has {len(part.pixels)} images of {part.pixels.dtype}, but {len(part.labels)} labels")
    return part


def cifar_binary(path: Path) -> CifarPart:
    """Read records of a coarse label, a fine label and 3,072 pixel values, one byte each."""
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
    """Read Omniglot in the split of Vinyals et al. (2016)."""
    return read_characters(folder, side, channels, lambda row: row["vinyals"])


def read_omniglot_lake(folder: Path, side: int, channels: int) -> Images:
    """Read Omniglot in the split of Lake et al. (2015), with some background alphabets as val."""
    background = sorted({row["alphabet"] for row in rows_of("omniglot") if row["set"] == "background"})
    splits = dict.fromkeys(background, "train") | dict.fromkeys(background[-LAKE_VALIDATION:], "val")
    return read_characters(folder, side, channels, lambda row: splits.get(row["alphabet"], "test"))


def read_characters(folder: Path, side: int, channels: int, split_of: Callable[[dict[str, str]], str]) -> ImageFiles:
    """List the drawings; every character of every alphabet is a class."""
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
"""All of Omniglot at two bits per pixel, shipped with the package (its README describes how it was made)."""


def read_sample() -> PackedImages:
    """Read every drawing at 28 × 28 pixels in four grey levels, in the split of `read_omniglot_lake`."""
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
"""The benchmarks, by the names that `open_images` accepts."""


def open_images(source: str | Path, side: int | None = None, channels: int | None = None) -> Images:
    """Open images from any source (see `images`); `side` and `channels` (3 or 1) default to those of the source."""
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
