"""Pen strokes to images, and drawings of unseen alphabets named by the models in the package."""

import importlib.resources
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image, ImageDraw

from metaleo.checkpoints import load_model
from metaleo.errors import BadInput
from metaleo.estimators.examples import read_examples
from metaleo.features.backbone_files import load_backbone
from metaleo.features.datasets import open_images
from metaleo.features.drawings import SHARE, framed, from_picture, rasterise
from metaleo.features.embed import embed_slab
from metaleo.tasks.task import labelled, normalise

HELD_OUT = json.loads((Path(__file__).parent.parent / "data/held-out-strokes.json").read_text())
MODELS = Path(str(importlib.resources.files("metaleo") / "assets" / "models"))
LETTER = [[[0.2, 0.3], [0.4, 0.25], [0.6, 0.5]], [[0.3, 0.7], [0.35, 0.4]]]


def moved(strokes, scale, x, y):
    return [[[scale * point[0] + x, scale * point[1] + y] for point in stroke] for stroke in strokes]


def box(image):
    """Height and width of what is not nearly black."""
    rows, columns = np.nonzero(image[..., 0] > 25)
    return np.ptp(rows) + 1, np.ptp(columns) + 1


def test_place_and_size_on_the_canvas_do_not_matter():
    image = rasterise(LETTER)
    for other in (moved(LETTER, 1, 0.3, -0.2), moved(LETTER, 0.3, 0, 0), moved(LETTER, 1.4, 0, 0.1)):
        assert np.abs(rasterise(other).astype(int) - image).mean() < 0.5  # of 255: rounding of the pen's way


def test_lines_are_white_and_fill_the_frame():
    image = rasterise([[[0.1, 0.2], [0.9, 0.2], [0.9, 0.6]]])
    assert (image.shape, image.dtype, image.max()) == ((28, 28, 1), np.uint8, 255)
    assert image[0].max() == image[-1].max() == image[:, 0].max() == image[:, -1].max() == 0
    assert abs(box(image)[1] - 28 * SHARE) <= 2
    assert abs(np.average(np.arange(28), weights=image.max((0, 2)) > 127) - 13.5) <= 0.5


def test_up_is_up():
    rows = rasterise([[[0.2, 0.1], [0.8, 0.1]], [[0.5, 0.1], [0.5, 0.9]]]).sum((1, 2)).argmax()  # a T
    assert rows < 10


@pytest.mark.parametrize("strokes", [[[[0.5, 0.5]]], [[[0.9, 0.1], [0.905, 0.1]]], [[[0.3, 0.3]] * 5]])
def test_a_dot_stays_a_dot(strokes):
    image = rasterise(strokes)
    assert image.max() > 127
    assert max(box(image)) <= 5


def test_a_straight_line_stays_thin():
    height, width = box(rasterise([[[0.2, 0.5], [0.6, 0.5]]]))
    assert height <= 4
    assert abs(width - 28 * SHARE) <= 2


def test_neither_the_order_of_strokes_nor_the_number_of_points_matters():
    image = rasterise(LETTER)
    assert (rasterise(LETTER[::-1]) == image).all()
    dense = []
    for line in LETTER:
        places = np.linspace(0, len(line) - 1, 200)
        dense.append(np.stack([np.interp(places, range(len(line)), axis) for axis in np.transpose(line)], axis=1))
    assert np.abs(rasterise(dense).astype(int) - image).mean() < 1.5
    assert (rasterise([*LETTER, []]) == image).all()


@pytest.mark.parametrize("strokes", [[], [[]], [[], []]])
def test_an_empty_drawing_is_refused(strokes):
    with pytest.raises(BadInput, match="empty"):
        rasterise(strokes)


@pytest.mark.parametrize("stroke", [[[0.1]], [[0.1, float("nan")]], [[0.1, 0.2], [0.1]], [["a", "b"]], [1.0], 3, None])
def test_what_is_no_stroke_is_refused(stroke):
    with pytest.raises(BadInput, match="a stroke is a list of points"):
        rasterise([stroke])


def test_images_come_into_the_same_frame():
    image = np.zeros((28, 28, 1), np.uint8)
    image[3:13, 20:24] = 255
    height, width = box(framed(image))
    assert abs(height - 28 * SHARE) <= 3
    assert abs(width - 28 * SHARE * 0.4) <= 3
    shifted = np.roll(image, (10, -15), (0, 1))
    assert (framed(shifted) == framed(image)).all()
    with pytest.raises(BadInput, match="empty"):
        framed(np.zeros((28, 28, 1), np.uint8))


def test_strokes_look_like_the_scanned_drawing():
    """Drawing 1 of each held-out character is in the package as an image too."""
    scans = open_images("omniglot-sample")
    likeness = []
    for name, drawings in HELD_OUT.items():
        pixels, _ = scans.read(np.array([scans.names.index(f"{name}/01")]))
        pair = np.stack([framed(pixels[0]).ravel(), rasterise(drawings[0]).ravel()])
        likeness.append(np.corrcoef(pair)[0, 1])
    assert np.mean(likeness) > 0.85


@pytest.mark.slow
def test_drawings_of_unseen_alphabets_are_named():
    """5-way 1-shot, from strokes to names; neither network nor LEO has learned from these two alphabets."""
    network, leo = load_backbone(MODELS / "omniglot-network.safetensors"), load_model(MODELS / "omniglot.safetensors")
    images = np.stack([rasterise(drawing) for drawings in HELD_OUT.values() for drawing in drawings])
    taps = ((network.architecture.layer, "rectified"),)
    (rows,) = embed_slab(network, images, jax.random.key(0), taps, "multi")
    vectors = normalise(rows.astype(np.float32)).reshape(len(HELD_OUT), 4, -1)
    random, right = np.random.default_rng(0), []
    for _ in range(50):
        classes = random.choice(len(HELD_OUT), 5, replace=False)
        drawn = vectors[classes][:, random.permutation(4)]
        head = leo.learner.adapt(labelled(drawn[:, 0], np.arange(5), 5)).head
        found = jax.vmap(jax.vmap(head))(drawn[:, 1:]).argmax(-1)
        right.append(np.mean(found == np.arange(5)[:, None]))
    assert np.mean(right) >= 0.9


def picture(strokes, paper, ink, scale=150):
    """A sheet on which somebody drew, not in the middle."""
    image = Image.new("L", (200, 200), paper)
    for stroke in strokes:
        ImageDraw.Draw(image).line([(10 + scale * x, 20 + scale * y) for x, y in stroke], fill=ink, width=8)
    return np.asarray(image)[..., None]


@pytest.mark.parametrize(("paper", "ink"), [(255, 0), (0, 255), (230, 20), (40, 250)])
def test_a_picture_of_ink_is_taken_as_if_drawn(paper, ink):
    found, drawn = from_picture(picture(LETTER, paper, ink)).astype(int), rasterise(LETTER).astype(int)
    assert np.corrcoef(found.reshape(-1), drawn.reshape(-1))[0, 1] > 0.9
    assert max(box(found)) == pytest.approx(max(box(drawn)), abs=2)
    assert found.max() > 150


@pytest.mark.usefixtures("loose_dtypes")
def test_pictures_in_folders_go_where_strokes_go(tmp_path):
    """The network tells them apart as it does the strokes that they were made of."""
    letters = {name: HELD_OUT[name][0] for name in list(HELD_OUT)[:3]}
    for name, strokes in letters.items():
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        Image.fromarray(picture(strokes, 255, 0)[..., 0]).convert("RGB").save(folder / "one.jpg")
    table = read_examples(tmp_path, "omniglot", "multi")
    network = load_backbone(Path("omniglot"))
    drawn = np.stack([rasterise(strokes) for strokes in letters.values()])
    (vectors,) = embed_slab(network, drawn, jax.random.key(0), ((4, "rectified"),), "multi")
    likeness = np.asarray(normalise(table.vectors)) @ np.asarray(normalise(vectors.astype(np.float32))).T
    assert table.labels == [name.replace("/", "-") for name in letters]
    assert (likeness.argmax(1) == np.arange(3)).all()
