"""Render pen strokes as images like those of Omniglot, so that a network trained on Omniglot can classify them.

Size and position do not matter: drawn strokes and scanned images are normalised to the same frame.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

from metaleo.errors import BadInput

SHARE = 20 / 28
"""Longer side of a drawing, as a share of the frame's side; in Omniglot it is 19 of 28 pixels on average."""
PEN = 1.6 / 28
"""Width of a line, as a share of the frame's side."""
LEAST = 0.1
"""Share of the canvas below which a drawing counts as a dot; it is enlarged no more than one of this size."""
FINE = 8
"""Supersampling factor: images are drawn this many times as large, then reduced, for smooth edges."""


def rasterise(strokes: Sequence[Any], side: int = 28) -> UInt8[np.ndarray, "{side} {side} 1"]:
    """Draw strokes, each a list of points (x, y) in [0, 1] of the canvas with y downwards, as white lines on black.

    The bounding box of the strokes is centred, and its longer side is scaled to a fixed length.
    """
    lines = [line for line in map(points_of, strokes) if len(line)]
    if not lines:
        raise BadInput("the drawing is empty; draw at least one stroke")
    points = np.concatenate(lines)
    low, high = points.min(0), points.max(0)
    scale = (SHARE - PEN) / max(float((high - low).max()), LEAST)  # the pen extends half its width beyond the points
    big = side * FINE
    image = Image.new("L", (big, big))
    brush, radius = ImageDraw.Draw(image), big * PEN / 2
    for line in lines:
        way = (((line - (low + high) / 2) * scale + 0.5) * big).tolist()
        brush.line([tuple(point) for point in way], fill=255, width=round(2 * radius), joint="curve")
        for x, y in (way[0], way[-1]):
            brush.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    return np.asarray(image.reduce(FINE)).reshape(side, side, 1)


FAINT = 64
"""Grey levels below this count as paper, to remove camera noise and JPEG artefacts."""


def from_picture(image: UInt8[np.ndarray, "large large 1"], side: int = 28) -> UInt8[np.ndarray, "{side} {side} 1"]:
    """Convert a larger picture of ink, dark on light or light on dark, to an image like those of `rasterise`."""
    ink = image if np.median(image) < 128 else 255 - image
    ink = framed(np.where(ink < FAINT, 0, ink).astype(np.uint8))
    return np.asarray(Image.fromarray(ink[..., 0]).resize((side, side), Image.Resampling.BOX)).reshape(side, side, 1)


def points_of(stroke: Any) -> Float[np.ndarray, "point 2"]:
    """Convert a stroke to an array of points; raise `BadInput` if it is invalid."""
    try:
        points = np.asarray(stroke, np.float64)
    except (TypeError, ValueError):
        points = np.full((1, 1), np.nan)
    points = points.reshape(0, 2) if points.shape == (0,) else points
    if points.ndim != 2 or points.shape[1] != 2 or not np.isfinite(points).all():
        raise BadInput("a stroke is a list of points (x, y), each of two finite numbers")
    return points


def framed(image: UInt8[np.ndarray, "side side 1"]) -> UInt8[np.ndarray, "side side 1"]:
    """Move and resize an image of white ink on black so that the ink fills the frame as in `rasterise`."""
    side = len(image)
    rows, columns = np.nonzero(image[..., 0])
    if not len(rows):
        raise BadInput("the image is empty")
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    whole = max(height, width, LEAST * side) / SHARE  # side of the square that is resized to the frame
    top, left = rows.min() + (height - whole) / 2, columns.min() + (width - whole) / 2
    wide = Image.fromarray(np.pad(image[..., 0], side))  # padded so that the square lies inside
    box = (side + left, side + top, side + left + whole, side + top + whole)
    return np.asarray(wide.resize((side, side), Image.Resampling.BICUBIC, box)).reshape(side, side, 1)
