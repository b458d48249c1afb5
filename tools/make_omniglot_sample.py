"""Make the embedded drawings from Omniglot: `python tools/make_omniglot_sample.py FOLDER [--out FILE]`.

FOLDER is as for `omniglot-lake:FOLDER`. Every drawing at 28 × 28 pixels, each pixel in two bits: how many thirds of it
are ink.
"""

import argparse
from pathlib import Path

import numpy as np

from metaleo.features.datasets import open_images

TARGET = Path(__file__).parent.parent / "src/metaleo/assets/drawings/omniglot.npz"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder")
parser.add_argument("--out", type=Path, default=TARGET, help="write elsewhere than into the package")
given = parser.parse_args()
images = open_images(f"omniglot-lake:{given.folder}")
order = np.argsort(images.labels, kind="stable")
pixels, readable = images.read(order)
assert readable.all(), images.unreadable
thirds = np.rint(pixels.reshape(len(images.class_names), -1, images.side**2) / 85).astype(np.uint8)
bits = np.stack([thirds >> 1, thirds & 1], axis=-1)  # (class, drawing, pixel, 2)
np.savez_compressed(
    given.out,
    ink=np.packbits(bits.reshape(*thirds.shape[:2], -1), axis=2),
    class_names=np.array(images.class_names),
    split=np.array(images.splits),
)
print(f"{given.out}: {images.describe()}, {given.out.stat().st_size / 1e6:.2f} MB")
