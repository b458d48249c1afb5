"""The drawings inside the package."""

import numpy as np
import pytest

from metaleo.errors import BadInput
from metaleo.features.datasets import open_images

DRAWINGS = open_images("omniglot-sample")


def test_holds_all_of_omniglot():
    assert DRAWINGS.describe() == (
        "1,623 classes (813 train, 151 val, 659 test), 20 images each, 32,460 in all, 28 × 28 pixels, grey"
    )
    assert len(set(DRAWINGS.names)) == 32_460


def test_no_alphabet_is_in_two_splits():
    alphabets = {(name.split("/")[0], split) for name, split in zip(DRAWINGS.class_names, DRAWINGS.splits, strict=True)}
    assert len(alphabets) == len({alphabet for alphabet, _ in alphabets}) == 50


def test_every_drawing_is_light_ink_on_black():
    pixels, readable = DRAWINGS.read(slice(None))
    assert readable.all()
    assert np.unique(pixels).tolist() == [0, 85, 170, 255]
    ink = pixels.mean((1, 2, 3)) / 255
    assert 0.001 < ink.min() < ink.max() < 0.35  # one dot of Braille, and the densest drawing


def test_comes_in_one_size():
    with pytest.raises(BadInput, match="28 × 28 pixels and 1 channels"):
        open_images("omniglot-sample", side=84)
