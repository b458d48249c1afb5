"""Images and a network that every test can afford."""

import numpy as np

from metaleo.features.images import PackedImages
from metaleo.features.recipes import Architecture

CONV4 = Architecture("conv4", 0, 4, side=16, layer=4)


def make_images(classes=(4, 5, 5), each=12, side=18, seed=0):
    """Coloured noise: every class has its own colour."""
    random = np.random.default_rng(seed)
    total = sum(classes)
    labels = np.repeat(np.arange(total), each).astype(np.int32)
    colours = random.integers(0, 200, (total, 1, 1, 3))
    pixels = colours[labels] + random.integers(0, 56, (len(labels), side, side, 3))
    splits = [split for split, count in zip(("train", "val", "test"), classes, strict=True) for _ in range(count)]
    return PackedImages(
        labels=labels,
        class_names=tuple(f"class{i}" for i in range(total)),
        splits=tuple(splits),
        names=[f"{i}.png" for i in range(len(labels))],
        side=side,
        channels=3,
        pixels=pixels.astype(np.uint8),
    )
