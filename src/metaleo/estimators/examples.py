"""The user's examples as vectors: from a table, or from images through a trained network."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float32, UInt8

from metaleo.data.feature_files import read_table
from metaleo.data.tables import Table, is_table
from metaleo.errors import BadInput
from metaleo.features.backbone_files import BackboneFile, load_backbone
from metaleo.features.datasets import open_images
from metaleo.features.drawings import from_picture
from metaleo.features.embed import Views, embed_slab
from metaleo.features.images import SUFFIXES, Images, Listed, decode, from_listed, why_unreadable

SLAB = 1024
"""Images in memory at a time."""
FINE = 4
"""Drawings are read at this many times the side length that the network takes."""


def read_examples(
    path: Path,
    network: str | None = None,
    views: Views = "centre",
    label: str | None = None,
    ignore: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> Table:
    """A table of vectors, or of features that the network extracts from images.

    Images come from class folders, one folder of images, or a data set. `columns` is as in `read_table`.
    """
    if path.is_dir() and not is_table(path):
        file = wanted(path, network)
        return from_images(open_folder(path, file), file, views)
    table = read_table(path, label, ignore, columns=columns)
    if table.images is None:
        return table
    file = wanted(path, network)
    vectors = embed_pictures(
        np.stack([decode_row(row, image, file) for row, image in enumerate(table.images)]), file, views
    )
    return Table(vectors, table.labels, table.splits, table.beside)


def wanted(path: Path, network: str | None) -> BackboneFile:
    if network is None:
        raise BadInput(f"{path} holds images; name the network that makes vectors of them with `network=`")
    return load_backbone(Path(network))


def side_of(file: BackboneFile) -> int:
    """Side length in pixels of the images that the network was trained on."""
    return file.header.get("image_side") or file.architecture.side


def reading_side(file: BackboneFile) -> int:
    """Side length in pixels at which images are read; larger for drawings, to find the ink."""
    return side_of(file) * (FINE if file.drawings else 1)


def embed_pictures(
    pixels: UInt8[np.ndarray, "image h w channel"], file: BackboneFile, views: Views
) -> Float32[np.ndarray, "image dim"]:
    """Feature vectors of images as they were read."""
    if file.drawings:
        pixels = np.stack([find_ink(number, image, file) for number, image in enumerate(pixels)])
    return embed_images(pixels, file, views)


def open_folder(path: Path, file: BackboneFile) -> Images:
    """Open class folders, or one folder of images without a class."""
    side, channels = reading_side(file), file.architecture.channels
    if any(one.is_dir() and not one.name.startswith(".") for one in path.iterdir()):
        return open_images(path, side, channels)
    files = sorted(one for one in path.iterdir() if one.suffix.lower() in SUFFIXES)
    if not files:
        raise BadInput(f"{path} holds neither class folders nor images")
    return from_listed([Listed(one.name, str(one), "", "test") for one in files], side, channels)


def from_images(images: Images, file: BackboneFile, views: Views) -> Table:
    """Feature vectors of all images; raises `BadInput` if some cannot be read."""
    vectors, kept = [], []
    for start in range(0, len(images), SLAB):
        pixels, readable = images.read(slice(start, start + SLAB))
        kept.extend((start + np.flatnonzero(readable)).tolist())
        if readable.any():
            vectors.append(embed_pictures(pixels[readable], file, views))
    if images.unreadable:
        name, why = next(iter(images.unreadable.items()))
        raise BadInput(f"{len(images.unreadable)} of {len(images)} images cannot be read, the first is {name} ({why})")
    labels = [images.class_names[images.labels[row]] for row in kept]
    return Table(np.concatenate(vectors), labels, None, {"file": [images.names[row] for row in kept]})


def find_ink(number: int, image: UInt8[np.ndarray, "h w 1"], file: BackboneFile) -> UInt8[np.ndarray, "side side 1"]:
    try:
        return from_picture(image, side_of(file))
    except BadInput as error:
        raise BadInput(f"picture {number + 1}: {error}") from error


def embed_images(
    pixels: UInt8[np.ndarray, "image h w channel"], file: BackboneFile, views: Views
) -> Float32[np.ndarray, "image dim"]:
    taps = ((file.architecture.layer, "rectified"),)
    (vectors,) = embed_slab(file, pixels, jax.random.key(0), taps, views)
    return vectors.astype(np.float32)


def decode_row(row: int, image: bytes, file: BackboneFile) -> UInt8[np.ndarray, "h w channel"]:
    try:
        return decode(memoryview(image), reading_side(file), file.architecture.channels)
    except Exception as error:  # Pillow may raise anything on a damaged image
        raise BadInput(f"the image of row {row + 1} cannot be read ({why_unreadable(error)})") from error
