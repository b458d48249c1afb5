"""Episodes: N-way K-shot tasks sampled from a MetaSet, without replacement.

Sampling is pure and jittable, and its cost does not depend on the amount of data. Compiled code reads feature rows by
row number, from device memory or from host memory.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from metaleo.data.metaset import MetaSet
from metaleo.errors import BadInput
from metaleo.tasks.preparation import Preparation
from metaleo.tasks.task import Batch, Task, Tasks, normalise

Prepare = Callable[[Float[Array, "*batch dim"]], Float[Array, "*batch dim"]]
"""What is done to vectors before any learner sees them."""


def as_they_are(vectors: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Nothing: for learners that take rows as they are in the file."""
    return vectors


class Rows(eqx.Module):
    """Storage of feature rows."""

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Numbers per row."""

    @abc.abstractmethod
    def take(self, rows: Int[Array, "*index"]) -> Float[Array, "*index dim"]:
        """The rows with these numbers, prepared."""


class DeviceRows(Rows):
    """All rows in device memory, prepared once."""

    features: Float[Array, "row dim"]

    @property
    def dim(self) -> int:
        return self.features.shape[1]

    def take(self, rows: Int[Array, "*index"]) -> Float[Array, "*index dim"]:
        return self.features.at[rows].get(mode="promise_in_bounds")


class HostRows(Rows):
    """Rows that stay in host memory, or in a mapped file larger than it; each `take` reads only its own rows."""

    metaset: MetaSet = eqx.field(static=True)
    plain: Prepare | None = eqx.field(static=True, default=normalise)
    prepare: Preparation | None = None  # instead of a plain function

    @property
    def dim(self) -> int:
        return self.metaset.dim

    def take(self, rows: Int[Array, "*index"]) -> Float[Array, "*index dim"]:
        shape = jax.ShapeDtypeStruct((*rows.shape, self.metaset.dim), jnp.float32)
        read = HostRows(self.metaset)._read  # without arrays, which cannot be hashed
        vectors = jax.pure_callback(read, shape, rows, vmap_method="broadcast_all")
        return vectors if (prepare := self.prepare or self.plain) is None else prepare(vectors)

    def _read(self, rows: Int[Array, "*index"]) -> Float32[np.ndarray, "*index dim"]:
        return self.metaset.read(np.asarray(rows))


def place_rows(metaset: MetaSet, on_device: bool = True, prepare: Prepare = normalise) -> Rows:
    """Place the features where tasks read them: in device memory, or on the host if they do not fit there.

    `prepare` is the `preparation` of the learner that they are for; usually it scales vectors to length one.
    """
    if not on_device:
        return HostRows(metaset, None, prepare) if isinstance(prepare, Preparation) else HostRows(metaset, prepare)
    features = jnp.zeros(metaset.features.shape, jnp.float32)
    for start, slab in metaset.slabs():  # no second copy of the features, and no slabs read ahead
        features = jax.block_until_ready(with_slab(features, PREPARED(prepare, slab), start))
    return DeviceRows(features)


def prepared(prepare: Prepare, slab: Float[Array | np.ndarray, "slab dim"]) -> Float[Array, "slab dim"]:
    return prepare(jnp.asarray(slab))


PREPARED = eqx.filter_jit(prepared)


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


class MixedIndices(eqx.Module):
    """A task of any way and shot as row numbers: those of the support set and of the query set."""

    support: Int[Array, " support"]
    support_class: Int[Array, " support"]
    support_present: Bool[Array, " support"]
    query: Int[Array, " query"]
    query_class: Int[Array, " query"]
    query_present: Bool[Array, " query"]


class MixedEpisodes(Episodes):
    """Tasks of many ways and shots, also with different shots of their classes, in arrays of one shape.

    Way and shot are drawn log-uniformly between the fewest and the most. As many shots as fit into `support_rows` are
    possible, so tasks of many ways have few shots. In a share `UNEVEN` of the tasks, each class has a number of shots
    of its own, up to that of the task. Classes and rows that a task does not have are padding.
    """

    fewest_way: int = eqx.field(static=True, default=2)
    fewest_shot: int = eqx.field(static=True, default=1)

    @classmethod
    def between(
        cls, metaset: MetaSet, ways: tuple[int, int], shots: tuple[int, int], query: int, rows: Rows | None = None
    ) -> "MixedEpisodes":
        """Tasks over the classes of a meta-set, with at most as many ways and shots as it allows."""
        (fewest_way, way), (fewest_shot, shot) = ways, shots
        check_classes(metaset, fewest_way, fewest_shot, 1)
        smallest = int(metaset.counts.min())
        query = max(1, min(query, smallest // 2, smallest - fewest_shot))
        way, shot = min(way, len(metaset.counts)), min(shot, smallest - query)
        plain = Episodes.over(metaset, way, shot, query, rows)
        fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        return cls(**fields, fewest_way=fewest_way, fewest_shot=fewest_shot)

    @property
    def support_rows(self) -> int:
        """Rows of every support set."""
        return max(min(SUPPORT_ROWS, self.way * self.shot), self.way * self.fewest_shot)

    @property
    def query_rows(self) -> int:
        return (self.query or 1) * min(QUERY_WAY, self.way)

    def sample_indices(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key: PRNGKeyArray
    ) -> MixedIndices:
        """Draw a way, a shot, distinct classes, and distinct examples of each."""
        way_key, shot_key, uneven_key, count_key, class_key, image_key = jax.random.split(key, 6)
        way = log_uniform(way_key, self.fewest_way, self.way)
        fit = jnp.maximum(self.fewest_shot, jnp.minimum(self.shot, self.support_rows // way))
        shot = log_uniform(shot_key, self.fewest_shot, fit)
        uneven = jax.random.bernoulli(uneven_key, UNEVEN)
        counts = jnp.where(uneven, jax.random.randint(count_key, (self.way,), self.fewest_shot, shot + 1), shot)
        classes = sample_without_replacement(class_key, len(self.counts), self.way)
        keys = jax.random.split(image_key, self.way)
        needed = self.shot + (self.query or 1)
        images = jax.vmap(sample_without_replacement, (0, 0, None))(keys, self.counts[classes], needed)
        rows = self.row_of[self.starts[classes][:, None] + images]  # (way, shots and queries)

        def spread(length: int) -> tuple[Int[Array, " row"], Int[Array, " row"]]:
            """The class of each row, in turn, and how many rows of the class come before it."""
            number = jnp.arange(length, dtype=jnp.int32)
            return number % way, number // way

        own, before = spread(self.support_rows)
        query_class, query = spread(self.query_rows)
        return MixedIndices(
            rows[own, jnp.minimum(before, self.shot - 1)], own, before < counts[own],
            rows[query_class, self.shot + jnp.minimum(query, (self.query or 1) - 1)], query_class,
            query < (self.query or 1),
        )  # fmt: skip

    def gather(self, indices: MixedIndices) -> Task:  # pyright: ignore[reportIncompatibleMethodOverride]
        def batch(rows: Array, classes: Array, present: Array) -> Batch:
            inputs = self.rows.take(rows)
            targets = jax.nn.one_hot(classes, self.way, dtype=inputs.dtype)
            return Batch(inputs, targets * present[:, None].astype(inputs.dtype), present)

        return Task(
            batch(indices.support, indices.support_class, indices.support_present),
            batch(indices.query, indices.query_class, indices.query_present),
        )


UNEVEN = 0.3
SUPPORT_ROWS = 60
"""Rows of a support set at most, unless it needs more for one example per class: all pairs of them are compared."""
QUERY_WAY = 5
"""Query rows are as many as a task of so many ways has; those of more ways have fewer per class."""


def log_uniform(key: PRNGKeyArray, least: int, most: int | Int[Array, ""]) -> Int[Array, ""]:
    """A whole number between the two, each included; the logarithm is uniform."""
    share = jax.random.uniform(key)
    drawn = least * jnp.exp(share * jnp.log((most + 1) / least))
    return jnp.clip(jnp.floor(drawn).astype(jnp.int32), least, most)


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
