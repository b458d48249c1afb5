"""Make the embedded sample from a full feature file: `python tools/make_sample.py FEATURES.npz [--out FILE]`.

100 images of each class, drawn with seed 0; each of the 640 numbers stored in 8 bits, in units of 1/255 of its
largest value in the sample.
"""

import argparse
from pathlib import Path

import numpy as np

from metaleo.data import MetaSet, load_data, save_data

IMAGES = 100
TARGET = Path(__file__).parent.parent / "src/metaleo/assets/data/miniimagenet.safetensors"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("features")
parser.add_argument("--out", type=Path, default=TARGET, help="write elsewhere than into the package")
given = parser.parse_args()
whole = load_data(given.features)
random = np.random.default_rng(0)
rows = np.concatenate(
    [
        whole.rows[start + np.sort(random.choice(count, IMAGES, replace=False))]
        for start, count in zip(whole.starts, whole.counts, strict=True)
    ]
)
features = whole.read(rows)
scale = features.max(0) / 255
quantised = np.round(features / scale).astype(np.uint8).reshape(len(whole.counts), IMAGES, whole.dim)
save_data(MetaSet.from_classes(quantised, whole.class_names, whole.splits, scale), given.out)
error = np.abs(quantised.reshape(-1, whole.dim) * scale - features).max()
print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB, largest error {error:.4f}")
