"""Compute feature vectors of images with a trained network: the export of stage 1."""

import dataclasses
import functools
import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Array, Float, Float16, Int, PRNGKeyArray, UInt8

from metaleo._io.files import atomic_write, read_json, write_text
from metaleo._io.run_log import owned
from metaleo.errors import BadInput
from metaleo.features.augment import crop, mirror, random_boxes, scaled, view_boxes
from metaleo.features.backbone import Pass, pool
from metaleo.features.backbone_files import BackboneFile, TrainedBackbone
from metaleo.features.images import Images
from metaleo.features.pretrain import padded, split_training
from metaleo.features.recipes import Architecture

Tap = tuple[int, str]
"""A layer, and `rectified` (after its norm and ReLU) or `raw` (before them)."""
Views = Literal["centre", "multi", "random"]
"""`centre` is the centre crop, and `random` a random crop. `multi` averages over the centre and the four corner crops,
and over their mirror images if the network was trained on mirrored images."""
SLAB = 4096
"""Number of images embedded between two writes: the most work that a kill can lose."""
BATCH = 256
RANDOM_AREA = 0.3
"""Smallest area of a random view, as a share of the image."""


def precision() -> Any:
    """Return bfloat16 on accelerators, where networks are trained in it, and float32 on a CPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


@functools.partial(jax.jit, static_argnames=("architecture", "taps", "views", "flat", "mirrors"))
def embed_batch(
    trained: TrainedBackbone,
    images: UInt8[Array, "image h w channel"],
    key: PRNGKeyArray,
    architecture: Architecture,
    taps: tuple[Tap, ...],
    views: Views = "centre",
    flat: bool = False,
    mirrors: bool = True,
) -> list[Float[Array, "image _"]]:
    """Return the features of each tap: averaged over height and width or, if `flat`, all activations flattened.

    Without `mirrors` no view is mirrored: a mirrored letter is not the same letter.
    """
    pixels, count = scaled(images), len(images)

    def look(box: Array, mirrored: Array) -> list[Array]:
        values = mirror(crop(pixels, box, architecture.side), mirrored)
        through = Pass(trained.moments)
        trained.backbone((2 * values - 1).astype(precision()), through)
        found = [through.taps[tap] for tap in taps]
        return [each.reshape(count, -1).astype(jnp.float32) if flat else pool(each) for each in found]

    if views == "random":
        box_key, mirror_key = jax.random.split(key)
        boxes = random_boxes(box_key, count, RANDOM_AREA)
        return look(boxes, mirrors & jax.random.bernoulli(mirror_key, shape=(count,)))
    boxes = view_boxes(architecture.share, views == "multi")
    sides = [False, True] if views == "multi" and mirrors else [False]
    seen = [look(jnp.tile(box, (count, 1)), jnp.full(count, side)) for box in boxes for side in sides]
    return [jnp.stack(parts).mean(0) for parts in zip(*seen, strict=True)]


def check_taps(file: BackboneFile, taps: Sequence[Tap]) -> None:
    layers = file.trained.backbone.layers
    for layer, side in taps:
        if layer not in layers:
            raise BadInput(f"the network has no layer {layer} to tap; it has {', '.join(map(str, layers))}")
        if side == "raw" and file.architecture.kind == "conv4":
            raise BadInput("a conv-4 has no features before its ReLU; leave `raw=` out")


def embed_slab(
    file: BackboneFile,
    images: UInt8[np.ndarray, "image h w channel"],
    key: PRNGKeyArray,
    taps: tuple[Tap, ...],
    views: Views = "centre",
    flat: bool = False,
) -> list[Float16[np.ndarray, "image _"]]:
    """Embed any number of images in batches of `BATCH`, or of a power of two if fewer, to limit recompilation."""
    parts: list[list[np.ndarray]] = [[] for _ in taps]
    size = min(BATCH, 1 << (len(images) - 1).bit_length())
    for start in range(0, len(images), size):
        batch = images[start : start + size]
        pixels, batch_key = padded(batch, size), jax.random.fold_in(key, start)
        found = embed_batch(file.trained, pixels, batch_key, file.architecture, taps, views, flat, file.mirrors)
        for part, values in zip(parts, found, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                part.append(np.asarray(values)[: len(batch)].astype(np.float16))
            if not np.isfinite(part[-1]).all():
                raise BadInput("the network's features are not finite, or too large: its file may be damaged")
    return [np.concatenate(part) for part in parts]


@dataclasses.dataclass(frozen=True)
class Export:
    """What to embed, and how."""

    taps: tuple[Tap, ...]
    views: Views = "centre"
    flat: bool = False
    """Whether to use all activations of a layer instead of their average over height and width."""
    augmented: int = 0
    """Number of random views of each training image to add to its view in `views`."""
    training_images: Literal["all", "held-out"] = "all"
    """Which images of training classes to embed: all, or those held out from the network's training."""
    together: bool = False
    """Whether to add the vectors of all taps, each scaled to length one, into one vector."""
    seed: int = 0

    def passes(self, images: Images, file: BackboneFile) -> list[tuple[Views, Int[np.ndarray, " row"]]]:
        """List the views and the rows to embed in each: all rows once, then random views of the training images."""
        config = file.header.get("config", {})
        training = split_training(images, config.get("hold_out", 0.0), config.get("seed", 0))
        every = np.arange(len(images))
        if self.training_images == "held-out":
            names = [name for name, split in zip(images.class_names, images.splits, strict=True) if split == "train"]
            if names != list(file.header.get("classes", ())) or not training.held_out.any():
                raise BadInput("the network held out no images of these training classes; leave `held_out=` out")
            every = np.setdiff1d(every, training.rows[~training.held_out])
        again = np.intersect1d(every, training.rows)
        return [(self.views, every), *(("random", again) for _ in range(self.augmented))]


def embed(
    images: Images, file: BackboneFile, export: Export, targets: Sequence[Path], report: Callable[[int], None]
) -> int:
    """Write a feature file per tap, or one if `export.together`; return the number of rows in each.

    Each slab is first saved in a folder beside the first target, so that a killed export resumes with the next slab.
    """
    check_taps(file, export.taps)
    parts = targets[0].with_name(f".{targets[0].name}.parts")
    with owned(parts):
        count = embed_in_parts(images, file, export, targets, parts, report)
    shutil.rmtree(parts, ignore_errors=True)
    return count


def embed_in_parts(
    images: Images,
    file: BackboneFile,
    export: Export,
    targets: Sequence[Path],
    parts: Path,
    report: Callable[[int], None],
) -> int:
    """`embed`, with a folder `parts` for the slabs that no other process writes to."""
    plan = {"export": dataclasses.asdict(export), "images": zlib.crc32("\n".join(images.names).encode())}
    plan |= {"network": file.header.get("config"), "weights": checksum(file.trained)}
    plan = json.loads(json.dumps(plan))
    if read_json(parts / "plan.json") != plan:
        for path in parts.glob("*.npz"):
            path.unlink()
        write_text(parts / "plan.json", json.dumps(plan))
    key, done, slabs = jax.random.key(export.seed), 0, []
    for turn, (views, rows) in enumerate(export.passes(images, file)):
        for start in range(0, len(rows), SLAB):
            chosen, path = rows[start : start + SLAB], parts / f"{turn}-{start}.npz"
            if not path.is_file():
                pixels, readable = images.read(chosen)
                slab_key = jax.random.fold_in(jax.random.fold_in(key, turn), start)
                found = embed_slab(file, pixels, slab_key, export.taps, views, export.flat)
                found = [added(found)] if export.together else found
                with atomic_write(path) as temporary, open(temporary, "wb") as target:
                    arrays = {str(index): values[readable] for index, values in enumerate(found)}
                    np.savez(target, allow_pickle=False, rows=chosen[readable], **arrays)
            slabs.append(path)
            done += len(chosen)
            report(done)
    rows = np.concatenate([read_part(path, "rows") for path in slabs])
    if not len(rows):
        raise BadInput("none of the images could be read")
    header = {
        "class_names": json.dumps(images.class_names),
        "split": json.dumps(images.splits),
        "metaleo-features": json.dumps(plan),
    }
    for index, target in enumerate(targets):
        features = np.concatenate([read_part(path, str(index)) for path in slabs])
        labels = images.labels[rows].astype(np.int64)
        with atomic_write(target) as temporary:
            safetensors.numpy.save_file({"features": features, "labels": labels}, temporary, header)
    return len(rows)


def checksum(trained: TrainedBackbone) -> int:
    """Return a checksum of the weights, in which alone two networks of the same run differ."""
    return functools.reduce(
        lambda total, leaf: zlib.crc32(np.asarray(leaf).tobytes(), total), jax.tree.leaves(trained), 0
    )


def added(parts: list[Float16[np.ndarray, "image _"]]) -> Float16[np.ndarray, "image _"]:
    """Scale all vectors to length one and add them up."""
    if len({part.shape for part in parts}) > 1:
        sizes = ", ".join(str(part.shape[1]) for part in parts)
        raise BadInput(f"layers of {sizes} numbers cannot be added together")
    wide = [part.astype(np.float32) for part in parts]
    lengths = [np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-6) for part in wide]
    return np.sum([part / length for part, length in zip(wide, lengths, strict=True)], axis=0).astype(np.float16)


def read_part(path: Path, name: str) -> np.ndarray:
    with np.load(path, allow_pickle=False) as archive:
        return archive[name]
