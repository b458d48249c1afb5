"""MetaSet: feature vectors by class. Classes may differ in size; each belongs to train, val or test."""

import dataclasses
import json
import zlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, Int, Shaped

from metaleo.errors import BadInput

SPLITS = ("train", "val", "test")
SLAB = 8192
"""Number of rows read at a time when a whole file is processed; it bounds memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class MetaSet:
    """Feature vectors by class. Use `load_data` for files, and `from_labels` or `from_classes` for arrays.

    Attributes:
        features: All rows, possibly memory-mapped; vector i is `features[i]`, times `scale` if that is given.
        rows: Row numbers, grouped by class.
        counts: Number of examples of each class; their sum is the length of `rows`.
        class_names: The name of each class.
        splits: The split of each class: `train`, `val` or `test`.
        scale: A factor per dimension, for features that are stored as small integers.

    Examples:
        >>> import numpy as np
        >>> from metaleo import MetaSet
        >>> labels = np.repeat(["cat", "dog", "owl"], 4)
        >>> metaset = MetaSet.from_labels(np.ones((12, 8), np.float32), labels, np.repeat(["train", "val", "test"], 4))
        >>> metaset.subset("test").class_names
        ('owl',)
    """

    features: Shaped[np.ndarray, "row dim"]
    rows: Int[np.ndarray, " image"]
    counts: Int[np.ndarray, " class"]
    class_names: tuple[str, ...]
    splits: tuple[str, ...]
    scale: Float32[np.ndarray, " dim"] | None = None

    @classmethod
    def from_classes(
        cls,
        features: Shaped[np.ndarray, "class image dim"],
        class_names: tuple[str, ...],
        splits: tuple[str, ...],
        scale: Float32[np.ndarray, " dim"] | None = None,
    ) -> "MetaSet":
        """Make a set from classes of equal size."""
        ways, images, dim = features.shape
        counts = np.full(ways, images)
        return cls(features.reshape(-1, dim), np.arange(ways * images), counts, class_names, splits, scale).checked()

    @classmethod
    def from_labels(
        cls,
        features: Shaped[np.ndarray, "image dim"],
        labels: Shaped[np.ndarray, " image"],
        splits: Shaped[np.ndarray, " image"],
        scale: Float32[np.ndarray, " dim"] | None = None,
    ) -> "MetaSet":
        """Make a set from rows in any order, each with a label (number or string) and its class's split."""
        names, first, classes, counts = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
        stray = np.flatnonzero(splits != splits[first][classes])
        if len(stray):
            row = stray[0]
            raise BadInput(
                f"class {labels[row]!s} is in two splits, {splits[first][classes[row]]} and {splits[row]} "
                f"(row {row}); a class belongs to one split, and `metaleo split --again` chooses one for each"
            )
        return cls(
            features,
            np.argsort(classes, kind="stable"),
            counts,
            tuple(str(name) for name in names),
            tuple(str(split) for split in splits[first]),
            scale,
        ).checked()

    @property
    def dim(self) -> int:
        return self.features.shape[1]

    @property
    def starts(self) -> Int[np.ndarray, " class"]:
        """The position in `rows` at which each class begins."""
        return np.cumsum(self.counts) - self.counts

    def checked(self) -> "MetaSet":
        """Return this set; raise `BadInput` if a split is unknown or a feature is not finite."""
        unknown = sorted(set(self.splits) - set(SPLITS))
        if unknown:
            raise BadInput(f"unknown split {unknown[0]!r}; a split is one of {', '.join(SPLITS)}")
        bad = [row for start, slab in self.slabs() for row in start + np.flatnonzero(~np.isfinite(slab).all(1))]
        if bad:
            shown = ", ".join(str(row) for row in bad[:5]) + (", …" if len(bad) > 5 else "")
            raise BadInput(f"features hold NaN or Inf in {len(bad)} of {len(self.features)} rows: {shown}")
        return self

    def slabs(self) -> Iterator[tuple[int, Float32[np.ndarray, "slab dim"]]]:
        """Yield all rows as float32, at most `SLAB` at a time, each slab with the number of its first row."""
        for start in range(0, len(self.features), SLAB):
            yield start, self.read(slice(start, start + SLAB))

    def read(self, rows: slice | Int[np.ndarray, "*index"]) -> Float32[np.ndarray, "*index dim"]:
        """Return the given rows as float32, multiplied by `scale`."""
        with np.errstate(over="ignore"):  # `checked` finds what is too large for float32
            values = np.asarray(self.features[rows], dtype=np.float32)
            return values if self.scale is None else values * self.scale

    def subset(self, splits: str) -> "MetaSet":
        """Return the classes of one split, or of several joined by `+` (the paper's last stage trains on train+val)."""
        wanted = splits.split("+")
        unknown = sorted(set(wanted) - set(SPLITS))
        if unknown:
            raise BadInput(f"unknown split {unknown[0]!r}; a split is one of {', '.join(SPLITS)}")
        chosen = [index for index, split in enumerate(self.splits) if split in wanted]
        starts = self.starts
        return dataclasses.replace(
            self,
            rows=np.concatenate([self.rows[starts[i] : starts[i] + self.counts[i]] for i in chosen] or [self.rows[:0]]),
            counts=self.counts[chosen],
            class_names=tuple(self.class_names[i] for i in chosen),
            splits=tuple(self.splits[i] for i in chosen),
        )

    def checksum(self) -> int:
        """Return a checksum of features, classes and splits, to detect a file that has changed under the same name."""
        total = zlib.crc32(json.dumps([self.splits, self.counts.tolist()]).encode())
        total = zlib.crc32(np.asarray(self.rows, np.int64).tobytes(), total)
        for _, slab in self.slabs():
            total = zlib.crc32(slab.tobytes(), total)
        return total

    def describe(self) -> str:
        """Return a one-line summary."""
        per_split = ", ".join(f"{self.splits.count(split)} {split}" for split in SPLITS)
        sizes = f"{self.counts.min()}-{self.counts.max()}" if np.ptp(self.counts) else str(self.counts.min())
        return f"{len(self.counts)} classes ({per_split}), {sizes} examples each, {self.dim} numbers per example"
