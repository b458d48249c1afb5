"""Crops, mirrors, turns and colours, for a batch at once, on the device.

Every crop and every change of size is two matrix products per image: rows of `resampling` weights for its height,
and for its width. So a random crop, a centre crop and the four corners are one function of a box.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

Boxes = Float[Array, "image 4"]
"""Top, left, height and width of a part of each image, as shares of its side."""


def scaled(images: UInt8[Array, "image h w channel"]) -> Float[Array, "image h w channel"]:
    """Pixels from 0 to 255, as numbers from 0 to 1."""
    return images.astype(jnp.float32) / 255


def resampling(
    start: Float[Array, ""], length: Float[Array, ""], inputs: int, outputs: int
) -> Float[Array, "{outputs} {inputs}"]:
    """Weights that turn `inputs` pixels into `outputs` which cover the share from start to start + length.

    Linear interpolation; where several pixels fall on one, their average (a triangle as wide as the step).
    """
    step = length * inputs / outputs
    centres = start * inputs + (jnp.arange(outputs, dtype=jnp.float32) + 0.5) * step - 0.5
    distance = jnp.abs(centres[:, None] - jnp.arange(inputs, dtype=jnp.float32)[None])
    weights = jnp.maximum(1 - distance / jnp.maximum(step, 1.0), 0)
    return weights / weights.sum(1, keepdims=True)


def crop(
    images: Float[Array, "image h w channel"], boxes: Boxes, side: int
) -> Float[Array, "image {side} {side} channel"]:
    """The part of each image in its box, resized to side x side; boxes lie inside the images."""
    _, height, width, _ = images.shape

    def one(image: Array, box: Array) -> Array:
        rows = resampling(box[0], box[2], height, side)
        columns = resampling(box[1], box[3], width, side)
        return jnp.einsum("ah,hwc,bw->abc", rows, image, columns)

    return jax.vmap(one)(images, boxes)


def mirror(images: Float[Array, "image h w channel"], which: Array) -> Float[Array, "image h w channel"]:
    return jnp.where(which[:, None, None, None], images[:, :, ::-1], images)


def turn(
    images: Float[Array, "image h w channel"], quarters: Int[Array, " image"]
) -> Float[Array, "image h w channel"]:
    """Each square image turned left by 0, 1, 2 or 3 quarters."""
    quarters = quarters[:, None, None, None]
    images = jnp.where(quarters >= 2, images[:, ::-1, ::-1], images)
    return jnp.where(quarters % 2 == 1, images.transpose(0, 2, 1, 3)[:, ::-1], images)


def random_boxes(key: PRNGKeyArray, count: int, least_area: float | Float[Array, ""]) -> Boxes:
    """As in the Inception pipeline: an area of `least_area` to all of the image, an aspect of 3/4 to 4/3, any place."""
    keys = jax.random.split(key, 4)
    area = jax.random.uniform(keys[0], (count,), minval=least_area, maxval=1.0)
    aspect = jnp.exp(jax.random.uniform(keys[1], (count,), minval=jnp.log(0.75), maxval=jnp.log(4 / 3)))
    height = jnp.minimum(jnp.sqrt(area / aspect), 1.0)
    width = jnp.minimum(jnp.sqrt(area * aspect), 1.0)
    top = jax.random.uniform(keys[2], (count,)) * (1 - height)
    left = jax.random.uniform(keys[3], (count,)) * (1 - width)
    return jnp.stack([top, left, height, width], axis=1)


def distort(
    key: PRNGKeyArray, images: Float[Array, "image h w channel"], strength: float | Float[Array, ""]
) -> Float[Array, "image h w channel"]:
    """Brightness, contrast and saturation, each times 1 ± strength; a grey image has no saturation."""
    factors = jax.random.uniform(key, (3, len(images), 1, 1, 1), minval=1 - strength, maxval=1 + strength)
    images = images * factors[0]
    middle = images.mean((1, 2, 3), keepdims=True)
    images = middle + (images - middle) * factors[1]
    if images.shape[-1] == 3:
        grey = (images * jnp.array([0.299, 0.587, 0.114])[None, None, None]).sum(-1, keepdims=True)
        images = grey + (images - grey) * factors[2]
    return jnp.clip(images, 0, 1)


def view_boxes(share: float, multi: bool) -> Float[Array, "view 4"]:
    """The centre crop of this share of the side; with `multi` the four corners too."""
    free = 1 - share
    places = [(0.5, 0.5), (0, 0), (0, 1), (1, 0), (1, 1)] if multi else [(0.5, 0.5)]
    return jnp.array([[top * free, left * free, share, share] for top, left in places])
