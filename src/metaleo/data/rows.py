"""Feature rows as the learner sees them: float32, of length one, fetched by row number inside compiled code."""

import abc
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from metaleo.compiling import memory_bytes
from metaleo.data.metaset import MetaSet


def normalise(vectors: Float[Array | np.ndarray, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """x / |x|, as the authors' code does before anything else; a zero vector stays zero."""
    vectors = jnp.asarray(vectors)
    squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))


class Rows(eqx.Module):
    """Where feature rows are kept."""

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Numbers per row."""

    @abc.abstractmethod
    def take(self, rows: Int[Array, "*index"]) -> Float[Array, "*index dim"]:
        """The rows of these numbers, normalised unless they are wanted as they are."""


class DeviceRows(Rows):
    """All rows in the device's memory, normalised once or not at all."""

    features: Float[Array, "row dim"]

    @property
    def dim(self) -> int:
        return self.features.shape[1]

    def take(self, rows: Int[Array, "*index"]) -> Float[Array, "*index dim"]:
        return self.features.at[rows].get(mode="promise_in_bounds")


class HostRows(Rows):
    """Rows left where they are, in host memory or in a mapped file larger than it; each fetch reads its own."""

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


def place(metaset: MetaSet, on_device: bool | None = None, *, normalised: bool = True) -> Rows:
    """Rows on the device where they fit in half of its memory, else on the host; not `normalised`: as they are."""
    if on_device is None:
        copies = jax.local_device_count() if jax.default_backend() == "cpu" else 1  # of one memory
        on_device = 4 * metaset.features.size * copies < memory_bytes() / 2
    if not on_device:
        return HostRows(metaset, normalised)
    prepare = jax.jit(normalise) if normalised else jnp.asarray
    features = jnp.zeros(metaset.features.shape, jnp.float32)
    for start, slab in metaset.slabs():  # nothing is held twice, nor are slabs read ahead of their turn
        features = jax.block_until_ready(with_slab(features, prepare(slab), start))
    return DeviceRows(features)


@functools.partial(jax.jit, donate_argnums=0)
def with_slab(features: Float[Array, "row dim"], slab: Float[Array, "slab dim"], start: Int[Array, ""]):
    """The same features, with a slab in its place."""
    return jax.lax.dynamic_update_slice(features, slab, (start, 0))
