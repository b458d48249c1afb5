"""Random splits of the classes into train, val and test, for data without given splits."""

from collections.abc import Sequence

import numpy as np

from metaleo.errors import BadInput

Shares = tuple[float, float, float]
SHARES: Shares = (0.64, 0.16, 0.2)
"""Shares of the classes for train, val and test, as in miniImageNet."""
FEWEST_CLASSES = 5
"""Minimum number of classes in val and in test, or a third of all if that is less; a 5-way task needs five."""


def split_classes(count: int, seed: int = 0, shares: Shares = SHARES) -> list[str]:
    """Assign a random split to each of `count` classes."""
    if count < 3:
        raise BadInput(
            f"{count} classes cannot be split into some to learn from, some to choose by and some to test on; "
            "a model that was trained on other classes can be adapted to them: `metaleo adapt`"
        )
    least = min(FEWEST_CLASSES, count // 3)
    val, test = (max(least, round(share * count)) for share in shares[1:])
    splits = ["train"] * (count - val - test) + ["val"] * val + ["test"] * test
    if splits.count("train") < 1:
        raise BadInput(f"{count} classes leave none to learn from with these shares")
    return [splits[place] for place in np.random.default_rng(seed).permutation(count)]


def split_names(names: Sequence[str], seed: int = 0, shares: Shares = SHARES) -> list[str]:
    """Assign a random split to each class, independent of the order of the names and of the file format."""
    order = sorted(range(len(names)), key=lambda place: names[place])
    splits = dict(zip(order, split_classes(len(names), seed, shares), strict=True))
    return [splits[place] for place in range(len(names))]
