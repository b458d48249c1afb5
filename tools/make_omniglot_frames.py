"""Make the images that the embedded Omniglot network learned from: `python tools/make_omniglot_frames.py FILE`.

The drawings inside the package, each in the frame of `metaleo.features.drawings`, as a packed file. Training classes
come also turned by 90, 180 and 270 degrees, as classes of their own: which way a symbol points matters. The alphabets
in HELD_OUT move from val to test, since it is their pen strokes that the network is tested on.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np

from metaleo.features.datasets import open_images
from metaleo.features.drawings import framed
from metaleo.features.images import PackedImages, TurnedImages, pack

HELD_OUT = ("Sanskrit", "Tagalog")

drawings = open_images("omniglot-sample")
pixels, _ = drawings.read(slice(None))
drawings = dataclasses.replace(
    drawings,
    pixels=np.stack([framed(image) for image in pixels]),
    splits=tuple(
        "test" if name.split("/")[0] in HELD_OUT else split
        for name, split in zip(drawings.class_names, drawings.splits, strict=True)
    ),
)
training, others = TurnedImages.of(drawings.subset("train")), drawings.subset("val+test")
together = PackedImages(
    labels=np.concatenate([training.labels, others.labels + np.int32(len(training.class_names))]),
    class_names=training.class_names + others.class_names,
    splits=training.splits + others.splits,
    names=[*training.names, *others.names],
    side=drawings.side,
    channels=drawings.channels,
    source="omniglot-sample, framed",
    pixels=np.concatenate([training.read(slice(None))[0], others.read(slice(None))[0]]),
)
print(f"{sys.argv[1]}: {pack(together, Path(sys.argv[1])).describe()}")
