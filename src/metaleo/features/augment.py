"""Data augmentation of whole batches on the device: crops, mirroring, rotations and colour changes.

Every crop with its resizing is two matrix products per image, with `resampling` weights for the height and for the
width. Random, centre and corner crops are therefore one function, `crop`, of different boxes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

Boxes = Float[Array, "image 4"]
"""Top, left, height and width of a crop of each image, as shares of the image's side."""


def scaled(images: UInt8[Array, "image h w channel"]) -> Float[Array, "image h w channel"]:
    """Scale pixels from [0, 255] to [0, 1]."""
    return images.astype(jnp.float32) / 255


def resampling(
    start: Float[Array, ""], length: Float[Array, ""], inputs: int, outputs: int
) -> Float[Array, "{outputs} {inputs}"]:
    """Return weights that resample the range [start, start + length] of `inputs` pixels to `outputs` pixels.

    `start` and `length` are shares of the side. Enlarging is linear interpolation; reducing is a weighted average, with
    a triangular filter whose half-width is the step between output pixels.
    """
    step = length * inputs / outputs
    centres = start * inputs + (jnp.arange(outputs, dtype=jnp.float32) + 0.5) * step - 0.5
    distance = jnp.abs(centres[:, None] - jnp.arange(inputs, dtype=jnp.float32)[None])
    weights = jnp.maximum(1 - distance / jnp.maximum(step, 1.0), 0)
    return weights / weights.sum(1, keepdims=True)


def crop(
    images: Float[Array, "image h w channel"], boxes: Boxes, side: int
) -> Float[Array, "image {side} {side} channel"]:
    """Crop each image to its box and resize it to side x side; boxes must lie inside the images."""
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
    """Rotate each square image anticlockwise by 0, 1, 2 or 3 quarter turns."""
    quarters = quarters[:, None, None, None]
    images = jnp.where(quarters >= 2, images[:, ::-1, ::-1], images)
    return jnp.where(quarters % 2 == 1, images.transpose(0, 2, 1, 3)[:, ::-1], images)


def random_boxes(key: PRNGKeyArray, count: int, least_area: float | Float[Array, ""]) -> Boxes:
    """Draw crops as in the Inception pipeline: area share in [`least_area`, 1], aspect in [3/4, 4/3], any position."""
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
    """Multiply brightness, contrast and, for colour images, saturation by random factors in 1 ± strength."""
    factors = jax.random.uniform(key, (3, len(images), 1, 1, 1), minval=1 - strength, maxval=1 + strength)
    images = images * factors[0]
    middle = images.mean((1, 2, 3), keepdims=True)
    images = middle + (images - middle) * factors[1]
    if images.shape[-1] == 3:
        grey = (images * jnp.array([0.299, 0.587, 0.114])[None, None, None]).sum(-1, keepdims=True)
        images = grey + (images - grey) * factors[2]
    return jnp.clip(images, 0, 1)


def view_boxes(share: float, multi: bool) -> Float[Array, "view 4"]:
    """Return the box of the centre crop with this share of the side; with `multi`, also those of the four corners."""
    free = 1 - share
    places = [(0.5, 0.5), (0, 0), (0, 1), (1, 0), (1, 1)] if multi else [(0.5, 0.5)]
    return jnp.array([[top * free, left * free, share, share] for top, left in places])
