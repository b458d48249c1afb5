"""Read images from packed files, class folders, CSV splits or known benchmarks; each source becomes an `Images`.

A source is one of
- a packed file (.safetensors), written by `pack`;
- a folder of class folders, which may be grouped in train/, val/ and test/; otherwise all classes are `train`;
- a .csv file with a header and the columns filename, label and optionally split, or a folder with train.csv, val.csv
  and test.csv; the image files are beside it, in images/, or anywhere below if their names are unique;
- NAME:FOLDER, a known benchmark (see `datasets`);
- omniglot-sample, the drawings shipped with the package.
"""

import abc
import concurrent.futures
import csv
import dataclasses
import errno
import io
import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import safetensors
from jaxtyping import Bool, Int, Int32, Num, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from metaleo._io.files import atomic_write
from metaleo._io.json_values import convert, parse_json
from metaleo.data.metaset import SPLITS
from metaleo.errors import BadInput, one_line

SIDE = 84
"""Default side of an image in pixels, as in miniImageNet."""
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jfif"))
SLAB = 1024
"""Number of images read at a time when all are processed; it bounds memory."""
WORKERS = min(16, os.cpu_count() or 1)
MOST_PIXELS = 10**8
"""An image whose header declares more pixels is refused before it is decoded."""
warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MOST_PIXELS makes Pillow's warning redundant
FORMAT = 1
LONGEST_HEADER = 100_000_000
"""Longest header in bytes that safetensors readers accept."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Images(abc.ABC):
    """Square images of one size with their classes and splits, on disk or in memory."""

    labels: Int32[np.ndarray, " image"]
    """The class of each image, as an index into `class_names`."""
    class_names: tuple[str, ...]
    splits: tuple[str, ...]
    """`train`, `val` or `test`, for each class."""
    names: Sequence[str]
    """Names of the images: file names or numbers."""
    side: int
    channels: int
    """3 (red, green, blue) or 1 (grey)."""
    source: str = ""
    """Human-readable origin of the images."""
    kept: Int[np.ndarray, " image"] | None = None
    """Indices of these images among the stored ones; `None` means all."""
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)
    """Images that `read` has failed to read so far, by name, with the reason."""

    @abc.abstractmethod
    def fetch(
        self, stored: Int[np.ndarray, " k"]
    ) -> tuple[UInt8[np.ndarray, "k {self.side} {self.side} {self.channels}"], dict[int, str]]:
        """Return stored images by index, and the reason for each one that failed, by its position in the result."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def counts(self) -> Int[np.ndarray, " class"]:
        """Number of images of each class."""
        return np.bincount(self.labels, minlength=len(self.class_names))

    def read(
        self, rows: slice | Int[np.ndarray, " k"]
    ) -> tuple[UInt8[np.ndarray, "k {self.side} {self.side} {self.channels}"], Bool[np.ndarray, " k"]]:
        """Return the given images and a mask of those that could be read; the others are black."""
        chosen = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        pixels, failures = self.fetch(chosen if self.kept is None else self.kept[chosen])
        readable = np.ones(len(chosen), bool)
        for position, reason in failures.items():
            readable[position] = False
            self.unreadable[self.names[int(chosen[position])]] = reason
        return pixels, readable

    def subset(self, splits: str) -> "Images":
        """Return the classes of one split, or of several joined by `+`."""
        wanted = splits.split("+")
        for split in wanted:
            known_split(split)
        classes = np.array([split in wanted for split in self.splits], bool)
        rows = np.flatnonzero(classes[self.labels])
        return dataclasses.replace(
            self,
            labels=(np.cumsum(classes) - 1)[self.labels[rows]].astype(np.int32),
            class_names=tuple(name for name, is_in in zip(self.class_names, classes, strict=True) if is_in),
            splits=tuple(split for split in self.splits if split in wanted),
            names=[self.names[row] for row in rows.tolist()],
            kept=rows if self.kept is None else self.kept[rows],
        )

    def describe(self) -> str:
        """Return a one-line summary."""
        per_split = ", ".join(f"{self.splits.count(split):,} {split}" for split in SPLITS)
        low, high = self.counts.min(initial=len(self)), self.counts.max(initial=0)
        sizes = f"{high:,}" if low == high else f"{low:,}-{high:,}"
        return (
            f"{len(self.class_names):,} classes ({per_split}), {sizes} images each, {len(self):,} in all, "
            f"{self.side} × {self.side} pixels{'' if self.channels == 3 else ', grey'}"
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PackedImages(Images):
    """A memory-mapped packed file: pixels stay on disk until they are read."""

    pixels: UInt8[np.ndarray, "stored side side channels"]

    def fetch(self, stored):
        return np.asarray(self.pixels[stored]), {}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ArrayImages(Images):
    """Images in consecutive arrays, possibly memory-mapped; resized on reading if their size differs."""

    parts: tuple[UInt8[np.ndarray, "_ _ _ 3"], ...]

    def fetch(self, stored):
        pixels = np.zeros((len(stored), self.side, self.side, self.channels), np.uint8)
        start = 0
        for part in self.parts:
            here = np.flatnonzero((start <= stored) & (stored < start + len(part)))
            chosen = part[stored[here] - start]
            start += len(part)
            if chosen.shape[1:] != pixels.shape[1:]:
                chosen = [fitted(Image.fromarray(one), self.side, self.channels) for one in chosen]
            pixels[here] = chosen
        return pixels, {}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ImageFiles(Images):
    """Image files, or encoded images within a memory-mapped file; decoded on reading."""

    sources: Sequence[str | memoryview]
    inverted: bool = False
    """Whether to invert the pixels, from black on white to white on black."""

    def fetch(self, stored):
        pixels = np.zeros((len(stored), self.side, self.side, self.channels), np.uint8)
        failures: dict[int, str] = {}

        def decode_some(positions: range) -> None:
            for position in positions:
                try:
                    pixels[position] = decode(self.sources[stored[position]], self.side, self.channels)
                except Exception as error:  # the decoders can raise nearly anything on a damaged file
                    failures[position] = why_unreadable(error)

        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:  # decoders release the GIL
            list(pool.map(decode_some, (range(first, len(stored), WORKERS) for first in range(WORKERS))))
        if self.inverted:
            np.subtract(255, pixels, out=pixels)
            pixels[list(failures)] = 0
        return pixels, failures


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TurnedImages(Images):
    """The given images, followed by copies rotated by 90, 180 and 270 degrees; each rotated class is a new class."""

    upright: Images

    @classmethod
    def of(cls, images: Images) -> "TurnedImages":
        ways, turns = len(images.class_names), range(4)
        return cls(
            labels=np.concatenate([images.labels + np.int32(ways * turn) for turn in turns]),
            class_names=tuple(turned_name(name, turn) for turn in turns for name in images.class_names),
            splits=images.splits * 4,
            names=[turned_name(name, turn) for turn in turns for name in images.names],
            side=images.side,
            channels=images.channels,
            source=images.source,
            upright=images,
        )

    def fetch(self, stored):
        turns, rows = np.divmod(stored, len(self.upright))
        pixels, readable = self.upright.read(rows)
        for turn in (1, 2, 3):
            which = turns == turn
            pixels[which] = np.rot90(pixels[which], turn, (1, 2))
        names = {position: self.upright.names[int(rows[position])] for position in np.flatnonzero(~readable).tolist()}
        return pixels, {position: self.upright.unreadable[name] for position, name in names.items()}


def turned_name(name: str, turn: int) -> str:
    return f"{name}@{90 * turn}" if turn else name


def known_split(split: str) -> str:
    if split not in SPLITS:
        raise BadInput(f"unknown split {split!r}; a split is one of {', '.join(SPLITS)}")
    return split


def check_image_classes(images: Images, least: int) -> None:
    """Raise `BadInput` if a class has fewer than `least` images."""
    for name, count in zip(images.class_names, images.counts.tolist(), strict=True):
        if count < least:
            raise BadInput(f"class {name} has {count} image{'s' * (count != 1)}; at least {least} are needed")


# One image.


def decode(source: str | memoryview, side: int, channels: int) -> UInt8[np.ndarray, "{side} {side} {channels}"]:
    """Decode an image file of any format to 8 bits: upright, on white, resized and cropped to its centre."""
    with Image.open(io.BytesIO(source) if isinstance(source, memoryview) else source) as image:
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width} × {image.height} pixels are too many")
        image.draft(None, (2 * side, 2 * side))  # a large JPEG is downscaled in decoding, to at least twice `side`
        image.load()
        return fitted(upright(image), side, channels)


def upright(image: Image.Image) -> Image.Image:
    """Rotate an image as its EXIF data specify, if they can be read."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF data do not make the image unreadable
        return image


def why_unreadable(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    return " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())


def fitted(image: Image.Image, side: int, channels: int) -> UInt8[np.ndarray, "{side} {side} {channels}"]:
    """Crop the central square of an image and resize it to `side`, antialiased."""
    image = eight_bit(image, "RGB" if channels == 3 else "L")
    width, height = image.size
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    image = image.crop((left, top, left + short, top + short))
    if short != side:  # otherwise the pixels stay exact
        image = image.resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(image).reshape(side, side, channels)


def eight_bit(image: Image.Image, mode: str) -> Image.Image:
    """Convert any image to 8 bits in mode RGB or L (grey); transparent pixels become white."""
    if image.mode.startswith(("I", "F")):  # 16 or 32 bits, which Pillow's own conversion would clip
        image = Image.fromarray(scaled_down(np.asarray(image)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def scaled_down(values: Num[np.ndarray, "height width"]) -> UInt8[np.ndarray, "height width"]:
    """Scale 16-bit integers, or floats in [0, 1] or [0, 255], to 8 bits; stretch any other range from min to max."""
    numbers = np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0)
    low, high = float(numbers.min()), float(numbers.max())
    whites = (1, 255) if values.dtype.kind == "f" else (65535,)
    white = next((white for white in whites if low >= 0 and high <= white), None)
    if white is None:
        numbers, white = numbers - low, high - low
    return np.rint(numbers * (255 / white)).astype(np.uint8)


# Listing image files.


class Listed(NamedTuple):
    """An image file, its class and its split."""

    name: str
    source: str | memoryview
    label: str
    split: str


def from_listed(listed: Sequence[Listed], side: int, channels: int, inverted: bool = False) -> ImageFiles:
    """Collect listed image files; classes are in order of first appearance."""
    splits: dict[str, str] = {}
    for each in listed:
        if splits.setdefault(each.label, each.split) != each.split:
            two = f"{splits[each.label]} and {each.split}"
            raise BadInput(f"class {each.label} is in two splits, {two} ({each.name}); a class belongs to one split")
    positions = {label: position for position, label in enumerate(splits)}
    return ImageFiles(
        labels=np.array([positions[each.label] for each in listed], np.int32),
        class_names=tuple(splits),
        splits=tuple(splits.values()),
        names=[each.name for each in listed],
        side=side,
        channels=channels,
        sources=[each.source for each in listed],
        inverted=inverted,
    )


def read_class_folders(folder: Path, side: int, channels: int) -> ImageFiles:
    """Read class folders, which may be grouped in split folders, or train.csv, val.csv and test.csv."""
    tables = [folder / f"{split}.csv" for split in SPLITS if (folder / f"{split}.csv").is_file()]
    if tables:
        index = FileIndex(folder)
        return from_listed([each for table in tables for each in read_csv(table, index)], side, channels)
    parts = [split for split in SPLITS if (folder / split).is_dir()]
    listed = [each for split in parts for each in list_classes(folder / split, split)]
    return from_listed(listed if parts else list(list_classes(folder, "train")), side, channels)


def list_classes(folder: Path, split: str) -> Iterator[Listed]:
    """List the images in and below each class folder."""
    found = find_images(folder)
    classes = {path.partition("/")[0] for path in found if "/" in path}
    if not classes:
        raise BadInput(f"{folder} holds no class folders with images in them")
    empty = [entry.name for entry in sorted(folder.iterdir()) if entry.is_dir() and entry.name not in classes]
    empty = [name for name in empty if not name.startswith(".")]
    if empty:
        raise BadInput(f"{folder / empty[0]} holds no images: a class needs some")
    for path in found:
        if "/" in path:
            yield Listed(path, f"{folder}/{path}", path.partition("/")[0], split)


def find_images(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files below a folder that have an image suffix."""

    def refuse(error: OSError) -> None:
        raise BadInput(f"cannot read {error.filename}: {error.strerror}")

    found, seen = [], set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here = os.stat(parent)
        if (here.st_dev, here.st_ino) in seen:  # symbolic links may form a cycle
            folders.clear()
            continue
        seen.add((here.st_dev, here.st_ino))
        folders[:] = [name for name in folders if name[0] != "."]
        prefix = os.path.relpath(parent, folder).replace(os.sep, "/")
        for name in files:
            if name[0] != "." and os.path.splitext(name)[1].lower() in SUFFIXES:
                found.append(name if prefix == "." else f"{prefix}/{name}")
    return sorted(found)


class FileIndex:
    """An index of the image files below a folder, by path and by name alone."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.paths = set(find_images(folder))
        self.by_name = {path.rpartition("/")[2]: path for path in self.paths}
        self.uses = Counter(path.rpartition("/")[2] for path in self.paths)

    def find(self, name: str) -> str | None:
        """Return the path of a file: the given path, the same in images/, or the only file of that name."""
        for path in (name, f"images/{name}"):
            if path in self.paths:
                return f"{self.folder}/{path}"
        alone = name.rpartition("/")[2]
        if self.uses[alone] > 1:
            raise BadInput(f"{self.folder} holds {self.uses[alone]} files called {alone}; their folder must be named")
        return f"{self.folder}/{self.by_name[alone]}" if alone in self.by_name else None


def read_csv(path: Path, index: FileIndex) -> list[Listed]:
    """Read a split file; without a column `split`, the split is the file's stem if that is a split, else `train`."""
    listed, missing, lines = [], [], {}
    for number, row in read_csv_rows(path, ("filename", "label")):
        where = f"{path}, line {number}"
        name, label = row["filename"], row["label"]
        if not name or not label:
            raise BadInput(f"{where}: a line needs a filename and a label")
        if lines.setdefault(name, number) != number:
            raise BadInput(f"{where}: {name} stands in line {lines[name]} already")
        split = row.get("split", path.stem if path.stem in SPLITS else "train")
        if split not in SPLITS:
            raise BadInput(f"{where}: unknown split {split!r}; a split is one of {', '.join(SPLITS)}")
        source = index.find(name)
        if source is None:
            missing.append(name)
        else:
            listed.append(Listed(name, source, label, split))
    if missing:
        raise BadInput(
            f"{path}: {len(missing):,} of its {len(lines):,} images are missing, the first {missing[0]}; "
            f"put them in {index.folder / 'images'}"
        )
    if not listed:
        raise BadInput(f"{path} lists no images")
    return listed


def read_csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and row of each line of a CSV file that has at least these columns."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, skipinitialspace=True)
            header = [name or "" for name in table.fieldnames or ()]
            for column in columns:
                if column not in header:
                    raise BadInput(
                        f"{path} has no column {column!r}: it begins with {','.join(header)[:80]!r}; the header of a "
                        f"split file is filename,label or filename,label,split"
                    )
            for row in table:
                yield table.line_num, {name: value or "" for name, value in row.items() if name}
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a CSV file ({one_line(error)})") from error


# Packed files: safetensors with `images` and `labels`; all strings are in the header as JSON.


def pack(images: Images, path: Path, report: Callable[[int], None] | None = None) -> PackedImages:
    """Write all readable images to one file, `SLAB` at a time; `report` receives the number done so far."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        space = len(images) * (images.side**2 * images.channels + 4)
        free = shutil.disk_usage(path.parent).free
        if space > free:  # fail now rather than after an hour
            raise OSError(errno.ENOSPC, f"it needs {space / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there")
        write_packed(images, file, report or (lambda done: None))
    return read_packed(path)


def write_packed(images: Images, file: BinaryIO, report: Callable[[int], None]) -> None:
    """Write the header last, into reserved space: the number of readable images is known only at the end."""
    readable = np.ones(len(images), bool)
    named = len(packed_header(images, readable, True)) <= LONGEST_HEADER
    room = -(-len(packed_header(images, readable, named)) // 8) * 8
    file.seek(8 + room)
    for start in range(0, len(images), SLAB):
        pixels, readable[start : start + SLAB] = images.read(slice(start, start + SLAB))
        file.write(pixels[readable[start : start + SLAB]].data)
        report(min(start + SLAB, len(images)))
    labels = images.labels[readable]
    empty = np.flatnonzero(np.bincount(labels, minlength=len(images.class_names)) == 0)
    if len(empty):
        rows = np.flatnonzero(images.labels == empty[0]).tolist()
        example = "".join(f" ({images.names[row]}: {images.unreadable[images.names[row]]})" for row in rows[:1])
        raise BadInput(f"no image of class {images.class_names[empty[0]]} could be read{example}")
    file.write(labels.astype("<i4").tobytes())
    file.seek(0)
    file.write(room.to_bytes(8, "little") + packed_header(images, readable, named).ljust(room))


def packed_header(images: Images, readable: Bool[np.ndarray, " image"], named: bool) -> bytes:
    count, end = int(readable.sum()), int(readable.sum()) * images.side**2 * images.channels
    names = [images.names[row] for row in np.flatnonzero(readable).tolist()] if named else []
    lists = {"class_names": images.class_names, "split": images.splits, "names": names}
    strings = {name: json.dumps(values, separators=(",", ":")) for name, values in lists.items()}
    shape = [count, images.side, images.side, images.channels]
    layout = {
        "__metadata__": {"format": str(FORMAT), "source": images.source} | strings,
        "images": {"dtype": "U8", "shape": shape, "data_offsets": [0, end]},
        "labels": {"dtype": "I32", "shape": [count], "data_offsets": [end, end + 4 * count]},
    }
    return json.dumps(layout, separators=(",", ":")).encode()


def read_packed(path: Path, side: int | None = None, channels: int | None = None) -> PackedImages:
    """Open a packed file; raise `BadInput` if its images have another size than the given one."""
    try:
        with safetensors.safe_open(path, framework="np") as archive:  # checks sizes and offsets
            strings = archive.metadata() or {}
        if strings.get("format") != str(FORMAT):
            raise ValueError(f"its format is {strings.get('format')!r}, not '{FORMAT}'")
        images = map_packed(path, strings)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # the parsers can raise anything on a damaged or foreign file
        raise BadInput(f"{path} is truncated or not a file of packed images ({one_line(error)})") from error
    return of_size(images, str(path), side, channels)


def of_size(images: PackedImages, source: str, side: int | None, channels: int | None) -> PackedImages:
    """Return the images unchanged; raise `BadInput` if they have another size than the given one."""
    if (side or images.side, channels or images.channels) != (images.side, images.channels):
        held = f"{images.side} × {images.side} pixels and {images.channels} channels"
        raise BadInput(f"{source} holds images of {held}; pack others from their source with `metaleo pack`")
    return images


def map_packed(path: Path, strings: dict[str, str]) -> PackedImages:
    """Memory-map the images of an intact packed file; `strings` is the metadata of its header."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        layout = parse_json(file.read(length))
    count, side, width, channels = layout["images"]["shape"]
    starts = {name: 8 + length + layout[name]["data_offsets"][0] for name in ("images", "labels")}
    labels = np.fromfile(path, "<i4", count, offset=starts["labels"]).astype(np.int32)
    class_names, splits, names = (
        convert(list[str], parse_json(strings[name]), name) for name in ("class_names", "split", "names")
    )
    if (
        (layout["images"]["dtype"], layout["labels"]["dtype"], layout["labels"]["shape"]) != ("U8", "I32", [count])
        or (side != width or channels not in (1, 3) or len(names) not in (0, count) or len(splits) != len(class_names))
        or not set(labels.tolist()) <= set(range(len(class_names)))
        or not set(splits) <= set(SPLITS)
    ):
        raise ValueError("its parts do not go together")
    return PackedImages(
        labels=labels,
        class_names=tuple(class_names),
        splits=tuple(splits),
        names=names or [str(number) for number in range(count)],
        side=side,
        channels=channels,
        source=strings.get("source", ""),
        pixels=np.memmap(path, np.uint8, "r", starts["images"], (count, side, side, channels)),
    )
