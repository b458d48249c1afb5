"""Crops, mirrors, turns and colours, against independent computations."""

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from metaleo.features.augment import crop, distort, mirror, random_boxes, scaled, turn, view_boxes


def some(count=2, side=12, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random((count, side, side, 3)), jnp.float32)


def test_the_whole_box_at_the_same_size_changes_nothing():
    images = some()
    boxes = jnp.tile(jnp.array([[0.0, 0.0, 1.0, 1.0]]), (2, 1))
    np.testing.assert_allclose(crop(images, boxes, 12), images, atol=1e-6)


def test_a_crop_of_whole_pixels_is_a_slice():
    images = some(side=8)
    boxes = jnp.array([[2 / 8, 1 / 8, 4 / 8, 4 / 8], [0.0, 4 / 8, 4 / 8, 4 / 8]])
    cropped = crop(images, boxes, 4)
    np.testing.assert_allclose(cropped[0], images[0, 2:6, 1:5], atol=1e-6)
    np.testing.assert_allclose(cropped[1], images[1, 0:4, 4:8], atol=1e-6)


def test_a_crop_equals_pillows():
    image = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    for box, side in (((3.0, 2.0, 15.0, 18.0), 8), ((4.0, 4.0, 12.0, 12.0), 20)):
        theirs = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR, box=box))
        left, top, right, bottom = (value / 20 for value in box)
        boxes = jnp.array([[top, left, bottom - top, right - left]])
        ours = 255 * crop(scaled(jnp.asarray(image[None])), boxes, side)[0]
        inside = slice(1, -1)  # at the rim we see the pixels around a box, Pillow does not
        assert np.abs(np.asarray(ours) - theirs)[inside, inside].max() < 1.6


def test_turns_are_numpys():
    images = some(count=4)
    turned = turn(images, jnp.arange(4, dtype=jnp.int32))
    for quarters in range(4):
        np.testing.assert_array_equal(turned[quarters], np.rot90(images[quarters], quarters))


def test_mirrors_only_where_asked():
    images = some()
    mirrored = mirror(images, jnp.array([True, False]))
    np.testing.assert_array_equal(mirrored[0], images[0, :, ::-1])
    np.testing.assert_array_equal(mirrored[1], images[1])


def test_random_boxes_lie_inside_and_have_the_areas_asked_for():
    boxes = np.asarray(random_boxes(jax.random.key(0), 5000, 0.2))
    top, left, height, width = boxes.T
    assert (boxes >= 0).all()
    assert (top + height <= 1 + 1e-6).all()
    assert (left + width <= 1 + 1e-6).all()
    area = height * width
    assert 0.19 < area.min() < 0.25
    assert area.max() > 0.95


def test_no_strength_no_change():
    images = some()
    np.testing.assert_allclose(distort(jax.random.key(0), images, 0.0), images, atol=1e-6)
    changed = distort(jax.random.key(0), images, 0.4)
    assert float(jnp.abs(changed - images).max()) > 0.05
    assert float(changed.min()) >= 0
    assert float(changed.max()) <= 1
    grey = distort(jax.random.key(0), images[..., :1], 0.4)  # one channel has no saturation
    assert grey.shape == (2, 12, 12, 1)


def test_views_are_the_centre_and_the_corners():
    (centre,) = np.asarray(view_boxes(80 / 92, multi=False))
    np.testing.assert_allclose(centre, [6 / 92, 6 / 92, 80 / 92, 80 / 92], rtol=1e-6)
    boxes = np.asarray(view_boxes(80 / 92, multi=True))
    assert {tuple(np.round(box[:2] * 92).astype(int)) for box in boxes} == {(6, 6), (0, 0), (0, 12), (12, 0), (12, 12)}
