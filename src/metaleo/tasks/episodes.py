"""N-way K-shot sampling without replacement: pure, jittable, at a cost that ignores how much data there is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from metaleo.data.metaset import MetaSet
from metaleo.data.rows import Rows, place
from metaleo.errors import BadInput
from metaleo.tasks.task import Batch, Task, Tasks


class Picks(eqx.Module):
    """A task before its features are fetched: row numbers. `present` is false where a class has run out."""

    support: Int[Array, "way shot"]
    query: Int[Array, "way query"]
    present: Bool[Array, "way query"]


class Episodes(Tasks):
    """The tasks p(T) over some classes: `sample(key)` is one of them.

    `query` images per class are drawn; None means all the rest, as the paper validates and tests.
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
        """Tasks over the classes of a meta-set, or of a part of it whose whole is already in `rows`."""
        check(metaset, way, shot, query)
        return cls(
            place(metaset) if rows is None else rows,
            jnp.asarray(metaset.rows, jnp.int32),
            jnp.asarray(metaset.starts, jnp.int32),
            jnp.asarray(metaset.counts, jnp.int32),
            way,
            shot,
            query,
            int(metaset.counts.max()),
        )

    def sample(self, key: PRNGKeyArray) -> Task:
        return self.fetch(self.pick(key))

    def pick(self, key: PRNGKeyArray) -> Picks:
        """Distinct classes in random order, and distinct images of each."""
        class_key, image_key = jax.random.split(key)
        classes = choose(class_key, len(self.counts), self.way)
        starts, counts = self.starts[classes], self.counts[classes]
        image_keys = jax.random.split(image_key, self.way)
        if self.query is None:
            support = jax.vmap(choose, (0, 0, None))(image_keys, counts, self.shot)
            query = jnp.broadcast_to(jnp.arange(self.largest, dtype=jnp.int32), (self.way, self.largest))
            taken = (query[:, :, None] == support[:, None, :]).any(-1)
            present = (query < counts[:, None]) & ~taken
            query = jnp.minimum(query, counts[:, None] - 1)
        else:
            images = jax.vmap(choose, (0, 0, None))(image_keys, counts, self.shot + self.query)
            support, query = images[:, : self.shot], images[:, self.shot :]
            present = jnp.ones(query.shape, bool)
        return Picks(self.row_of[starts[:, None] + support], self.row_of[starts[:, None] + query], present)

    def fetch(self, picks: Picks) -> Task:
        def batch(rows, present):
            inputs = self.rows.take(rows.reshape(-1))  # (way * image, dim)
            targets = jnp.repeat(jnp.eye(self.way, dtype=inputs.dtype), rows.shape[1], axis=0)
            return Batch(inputs, targets, present.reshape(-1))

        return Task(batch(picks.support, jnp.ones(picks.support.shape, bool)), batch(picks.query, picks.present))


def choose(key: PRNGKeyArray, total: int | Int[Array, ""], count: int) -> Int[Array, " {count}"]:
    """`count` distinct integers below `total`, in random order.

    A Fisher-Yates shuffle that remembers only the cells it has written, so `total` may be any size: at step i
    a cell j below total - i is drawn, its content is the result, and the last cell's content moves there.
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


def check(metaset: MetaSet, way: int, shot: int, query: int | None) -> None:
    """Every class must be able to fill its part of a task."""
    for name, number in (("way", way), ("shot", shot), ("query", 1 if query is None else query)):
        if number < (2 if name == "way" else 1):
            raise BadInput(f"--{name} must be at least {2 if name == 'way' else 1}, not {number}")
    splits = "/".join(sorted(set(metaset.splits))) or "chosen"
    if len(metaset.counts) < way:
        raise BadInput(f"{way}-way tasks need {way} classes; the {splits} split has {len(metaset.counts)}")
    need = shot + (1 if query is None else query)
    small = np.flatnonzero(metaset.counts < need)
    if len(small):
        shown = ", ".join(f"{metaset.class_names[i]} has {metaset.counts[i]}" for i in small[:5])
        raise BadInput(
            f"{shot} shots and {'at least 1 query' if query is None else f'{query} queries'} need {need} images per "
            f"class; of the {splits} split {shown}{', …' if len(small) > 5 else ''}"
        )
