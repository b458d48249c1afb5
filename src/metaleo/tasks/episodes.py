"""Episodes: N-way K-shot tasks sampled from a MetaSet, without replacement.

Sampling is pure and jittable, and its cost does not depend on the amount of data. Compiled code reads feature rows by
row number, from device memory or from host memory.
"""

import abc
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from metaleo.data.metaset import MetaSet
from metaleo.errors import BadInput
from metaleo.tasks.task import Batch, Task, Tasks, normalise


class Rows(eqx.Module):
    """Storage of feature rows."""

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Numbers per row."""

    @abc.abstractmethod
    def take(self, rows: Int[Array, "*index"]) -> Float[Array, "*index dim"]:
        """The rows with these numbers, normalised unless raw rows were requested."""


class DeviceRows(Rows):
    """All rows in device memory, normalised once or not at all."""

    features: Float[Array, "row dim"]

    @property
    def dim(self) -> int:
        return self.features.shape[1]

    def take(self, rows: Int[Array, "*index"]) -> Float[Array, "*index dim"]:
        return self.features.at[rows].get(mode="promise_in_bounds")


class HostRows(Rows):
    """Rows that stay in host memory, or in a mapped file larger than it; each `take` reads only its own rows."""

    metaset: MetaSet = eqx.field(static=True)
    normalised: bool = eqx.field(static=True, default=True)

    @property
    def dim(self) -> int:
        return self.metaset.dim

    def take(self, rows: Int[Array, "*index"]) -> Float[Array, "*index dim"]:
        shape = jax.ShapeDtypeStruct((*rows.shape, self.metaset.dim), jnp.float32)
        vectors = jax.pure_callback(self._read, shape, rows, vmap_method="broadcast_all")
        return normalise(vectors) if self.normalised else vectors

    def _read(self, rows: Int[Array, "*index"]) -> Float32[np.ndarray, "*index dim"]:
        return self.metaset.read(np.asarray(rows))


def place_rows(metaset: MetaSet, on_device: bool = True, *, normalised: bool = True) -> Rows:
    """Place the features where tasks read them: in device memory, or on the host if they do not fit there.

    With `normalised=False`, vectors stay as they are in the file instead of being scaled to length one.
    """
    if not on_device:
        return HostRows(metaset, normalised)
    prepare = jax.jit(normalise) if normalised else jnp.asarray
    features = jnp.zeros(metaset.features.shape, jnp.float32)
    for start, slab in metaset.slabs():  # no second copy of the features, and no slabs read ahead
        features = jax.block_until_ready(with_slab(features, prepare(slab), start))
    return DeviceRows(features)


@functools.partial(jax.jit, donate_argnums=0)
def with_slab(features: Float[Array, "row dim"], slab: Float[Array, "slab dim"], start: Int[Array, ""]):
    """The same features, with a slab of rows written at `start`."""
    return jax.lax.dynamic_update_slice(features, slab, (start, 0))


class EpisodeIndices(eqx.Module):
    """A task as row numbers, before its features are read. `present` is false for padding."""

    support: Int[Array, "way shot"]
    query: Int[Array, "way query"]
    present: Bool[Array, "way query"]


class Episodes(Tasks):
    """N-way K-shot tasks over a set of classes: `sample(key)` draws one. Create them with `Episodes.over`.

    Examples:
        >>> import jax
        >>> from metaleo import Episodes, load_data
        >>> episodes = Episodes.over(load_data("sample").subset("train"), way=5, shot=1, query=15)
        >>> episodes.sample(jax.random.key(0)).query.inputs.shape
        (75, 640)
    """

    rows: Rows
    row_of: Int[Array, " image"]
    starts: Int[Array, " class"]
    counts: Int[Array, " class"]
    way: int = eqx.field(static=True)
    shot: int = eqx.field(static=True)
    query: int | None = eqx.field(static=True)
    largest: int = eqx.field(static=True)

    @classmethod
    def over(cls, metaset: MetaSet, way: int, shot: int, query: int | None, rows: Rows | None = None) -> "Episodes":
        """Tasks over the classes of a meta-set.

        Args:
            metaset: The classes, for instance `load_data(file).subset("train")`.
            way: Classes per task.
            shot: Support examples per class.
            query: Query examples per class; None means all the rest, as in the paper's validation and test.
            rows: The features, if several subsets share them; by default they are copied to the device.

        Returns:
            A distribution over tasks.
        """
        check_classes(metaset, way, shot, query)
        return cls(
            place_rows(metaset) if rows is None else rows,
            jnp.asarray(metaset.rows, jnp.int32),
            jnp.asarray(metaset.starts, jnp.int32),
            jnp.asarray(metaset.counts, jnp.int32),
            way,
            shot,
            query,
            int(metaset.counts.max()),
        )

    def sample(self, key: PRNGKeyArray) -> Task:
        return self.gather(self.sample_indices(key))

    def sample_indices(self, key: PRNGKeyArray) -> EpisodeIndices:
        """Draw distinct classes in random order, and distinct examples of each."""
        class_key, image_key = jax.random.split(key)
        classes = sample_without_replacement(class_key, len(self.counts), self.way)
        starts, counts = self.starts[classes], self.counts[classes]
        image_keys = jax.random.split(image_key, self.way)
        if self.query is None:
            support = jax.vmap(sample_without_replacement, (0, 0, None))(image_keys, counts, self.shot)
            query = jnp.broadcast_to(jnp.arange(self.largest, dtype=jnp.int32), (self.way, self.largest))
            taken = (query[:, :, None] == support[:, None, :]).any(-1)
            present = (query < counts[:, None]) & ~taken
            query = jnp.minimum(query, counts[:, None] - 1)
        else:
            images = jax.vmap(sample_without_replacement, (0, 0, None))(image_keys, counts, self.shot + self.query)
            support, query = images[:, : self.shot], images[:, self.shot :]
            present = jnp.ones(query.shape, bool)
        return EpisodeIndices(self.row_of[starts[:, None] + support], self.row_of[starts[:, None] + query], present)

    def gather(self, indices: EpisodeIndices) -> Task:
        """Read the features of these row numbers, and build the task."""

        def batch(rows, present):
            inputs = self.rows.take(rows.reshape(-1))  # (way * image, dim)
            targets = jnp.repeat(jnp.eye(self.way, dtype=inputs.dtype), rows.shape[1], axis=0)
            return Batch(inputs, targets, present.reshape(-1))

        return Task(
            batch(indices.support, jnp.ones(indices.support.shape, bool)), batch(indices.query, indices.present)
        )


def sample_without_replacement(key: PRNGKeyArray, total: int | Int[Array, ""], count: int) -> Int[Array, " {count}"]:
    """`count` distinct integers below `total`, in random order.

    A Fisher-Yates shuffle that stores only the cells it has written, so `total` may be any size. Step i draws a cell j
    below total - i, returns its content, and moves the content of the last remaining cell to j.
    """
    left = total - jnp.arange(count, dtype=jnp.int32)
    draws = jax.random.randint(key, (count,), 0, left, jnp.int32)

    def step(written, i):
        cells, contents = written

        def content(cell):
            hits = jnp.where(cells == cell, jnp.arange(count), -1)  # the latest write to a cell counts
            latest = hits.max()
            return jnp.where(latest < 0, cell, contents[latest])

        result = content(draws[i])
        written = cells.at[i].set(draws[i]), contents.at[i].set(content(left[i] - 1))
        return written, result

    nothing = jnp.full((count,), -1, jnp.int32)
    return jax.lax.scan(step, (nothing, nothing), jnp.arange(count))[1]


def check_classes(metaset: MetaSet, way: int, shot: int, query: int | None) -> None:
    """Raise `BadInput` if there are too few classes, or too few examples in a class, for a task."""
    for name, number, least in (("way", way, 2), ("shot", shot, 1), ("query", 1 if query is None else query, 1)):
        if number < least:
            raise BadInput(f"{name}={number} must be at least {least}")
    splits = "/".join(sorted(set(metaset.splits))) or "chosen"
    if len(metaset.counts) < way:
        raise BadInput(f"{way}-way tasks need {way} classes; the {splits} split has {len(metaset.counts)}")
    need = shot + (1 if query is None else query)
    small = np.flatnonzero(metaset.counts < need)
    if len(small):
        shown = ", ".join(f"{metaset.class_names[i]} has {metaset.counts[i]}" for i in small[:5])
        raise BadInput(
            f"{shot} shots and {'at least 1 query' if query is None else f'{query} queries'} need {need} examples per "
            f"class; of the {splits} split {shown}{', …' if len(small) > 5 else ''}"
        )


def check_enough(metaset: MetaSet, way: int) -> None:
    """Raise `BadInput`, with alternatives, if there are too few train or val classes for `way`-way tasks."""
    train, val = (metaset.splits.count(split) for split in ("train", "val"))
    if train and min(train, val) < way:
        most = min(train, val)
        smaller = f"try way={most}, or " if most >= 2 else ""
        raise BadInput(
            f"{way}-way tasks need {way} train and {way} val classes, and there are {train} and {val}: {smaller}"
            "adapt a model that was trained on other classes (`metaleo adapt`), or collect more classes"
        )


def advice(metaset: MetaSet, way: int) -> str | None:
    """A warning if there are barely enough train classes for `way`-way tasks, or None."""
    train = metaset.splits.count("train")
    if train < 4 * way:
        return (
            f"only {train} train classes: tasks repeat themselves, and LEO may learn them by heart; compare it "
            "with `metaleo compare --learner leo nearest-centroid logistic-regression`"
        )
    return None
