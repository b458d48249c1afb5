"""Feature rows: of length one, and the same wherever they are kept."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import make_metaset
from metaleo.data import MetaSet, load_data, save_data
from metaleo.tasks import Episodes
from metaleo.tasks.episodes import DeviceRows, HostRows, place_rows
from metaleo.tasks.preparation import whiten
from metaleo.tasks.task import normalise


def some_metaset(scale=None) -> MetaSet:
    """8 classes of 6 images; image 0 of class 0 is zero."""
    features = (
        np.random.default_rng(0).normal(scale=30, size=(8, 6, 5)).astype(np.float32 if scale is None else np.int8)
    )
    features[0, 0] = 0
    return MetaSet.from_classes(features, tuple("abcdefgh"), ("train",) * 6 + ("val",) * 2, scale)


@pytest.fixture(params=["memory", "npz", "safetensors", "quantised"])
def metaset(request, tmp_path) -> MetaSet:
    """The same numbers in host memory and mapped from files; and small integers with a scale."""
    if request.param == "memory":
        return some_metaset()
    if request.param == "quantised":
        return some_metaset(scale=np.array([1, 0.5, 2, 0.1, 3], np.float32))
    path = tmp_path / f"features.{request.param}"
    save_data(some_metaset(), path)
    loaded = load_data(path)
    assert isinstance(loaded.features, np.memmap)
    return loaded


def expected(metaset: MetaSet) -> np.ndarray:
    vectors = metaset.features.astype(np.float64) * (1 if metaset.scale is None else metaset.scale)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5)])
def test_normalise_gives_unit_rows(shape):
    vectors = jnp.asarray(np.random.default_rng(0).normal(scale=100, size=shape), jnp.float32)
    unit = normalise(vectors)
    lengths = jnp.linalg.norm(unit, axis=-1)
    np.testing.assert_allclose(lengths, np.ones(shape[:-1]), rtol=1e-6)
    np.testing.assert_allclose(unit * jnp.linalg.norm(vectors, axis=-1, keepdims=True), vectors, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-7, 1e-20, 2e-38, 1e13, 1e25])
def test_normalise_takes_rows_of_any_size(size):
    """Squares of these would vanish or overflow."""
    rows = np.array([[3, 4, 0], [0, 0, -5]], np.float32) / 5
    np.testing.assert_allclose(normalise(rows * np.float32(size)), rows, rtol=1e-6)
    jacobian = jax.jacobian(normalise)(jnp.asarray(rows[0] * np.float32(size)))
    expected = (np.eye(3) - np.outer(rows[0], rows[0])) / size  # of x / |x|
    np.testing.assert_allclose(np.asarray(jacobian, np.float64) * size, expected * size, atol=1e-5)


def test_normalise_keeps_zeros_and_their_gradient_finite():
    zeros = jnp.zeros((2, 3))
    np.testing.assert_array_equal(normalise(zeros), np.zeros((2, 3)))
    assert jnp.isfinite(jax.grad(lambda x: normalise(x).sum())(zeros)).all()


@pytest.mark.parametrize("on_device", [True, False])
def test_take(metaset, on_device):
    rows = place_rows(metaset, on_device)
    assert isinstance(rows, DeviceRows if on_device else HostRows)
    assert rows.dim == 5
    index = jnp.array([[47, 0, 3], [3, 3, 12]])
    np.testing.assert_allclose(rows.take(index), expected(metaset)[index], atol=1e-6)


@pytest.mark.parametrize("on_device", [True, False])
def test_take_inside_transformations(on_device):
    """Every row by its number: compiled, mapped over, scanned over, and all at once."""
    metaset = some_metaset()
    rows, index = place_rows(metaset, on_device), jnp.arange(48)[::-1]
    wanted = expected(metaset)[::-1]

    def scan(index):
        return jax.lax.scan(lambda _, row: (None, rows.take(row)), None, index)[1]

    for take in (
        jax.jit(lambda index: rows.take(index)),
        jax.vmap(rows.take),
        scan,
    ):
        np.testing.assert_allclose(take(index), wanted, atol=1e-6)
    both = jax.jit(jax.vmap(scan))(index.reshape(4, 12))
    np.testing.assert_allclose(both, wanted.reshape(4, 12, 5), atol=1e-6)


def test_rows_may_be_an_argument_of_compiled_code():
    metaset = some_metaset()
    take = jax.jit(lambda rows, index: rows.take(index))
    index = jnp.array([5, 7])
    np.testing.assert_allclose(
        take(place_rows(metaset, True), index), take(place_rows(metaset, False), index), atol=1e-6
    )


def test_small_data_go_to_the_device():
    assert isinstance(place_rows(some_metaset()), DeviceRows)


def test_the_same_tasks_from_device_and_host(tmp_path):
    save_data(some_metaset(), tmp_path / "features.npz")
    metaset = load_data(tmp_path / "features.npz")
    assert isinstance(metaset.features, np.memmap)
    on_device, on_host = (
        Episodes.over(metaset.subset("train"), 3, 2, None, place_rows(metaset, where)) for where in (True, False)
    )

    def both(key):
        return on_device.sample(key), on_host.sample(key)

    one, other = jax.jit(jax.vmap(both), compiler_options={"xla_backend_optimization_level": 0})(
        jax.random.split(jax.random.key(0), 4)
    )
    np.testing.assert_allclose(jnp.linalg.norm(one.query.inputs[:, 1:], axis=-1).max(), 1, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.fixture
def large_file(tmp_path):
    """20 MB: 200 classes of 100 images."""
    features = np.ones((200, 100, 250), np.float32)
    names, splits = tuple(map(str, range(200))), ("train",) * 200
    save_data(MetaSet.from_classes(features, names, splits), tmp_path / "features.safetensors")
    return tmp_path / "features.safetensors"


def traced_bytes(function) -> int:
    """The most that a call holds at a time on the host, mapped files and JAX's arrays left out."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("on_device", [True, False])
def test_memory_is_bounded_however_large_the_file(large_file, on_device):
    place_rows(load_data(large_file), on_device)  # what is compiled and imported is not counted
    size = large_file.stat().st_size
    assert size > 20e6
    assert traced_bytes(lambda: place_rows(load_data(large_file), on_device)) < size / 5


def test_a_task_reads_its_own_rows_only(monkeypatch):
    """Rows left on the host: as many are read as the tasks have examples."""
    metaset, read = some_metaset(), []
    episodes = Episodes.over(metaset.subset("train"), 3, 1, 2, place_rows(metaset, False))
    actual = MetaSet.read
    monkeypatch.setattr(MetaSet, "read", lambda self, rows: read.append(rows) or actual(self, rows))
    keys = jax.random.split(jax.random.key(0), 4)
    tasks = jax.block_until_ready(jax.jit(jax.vmap(episodes.sample))(keys))
    assert sum(rows.size for rows in read) == 4 * 3 * (1 + 2)
    assert tasks.support.inputs.shape == (4, 3, 5)


@pytest.mark.parametrize("on_device", [True, False])
def test_rows_are_prepared_wherever_they_are(on_device):
    metaset = make_metaset()
    (preparation,) = whiten(metaset, (0.25,))
    rows = place_rows(metaset, on_device, preparation)
    wanted = jnp.array([[3, 40], [7, 0]])
    found = jax.jit(lambda rows, wanted: rows.take(wanted))(rows, wanted)
    np.testing.assert_allclose(found, preparation(jnp.asarray(metaset.read(np.asarray(wanted)))), atol=1e-6)
