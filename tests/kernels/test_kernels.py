"""The CUDA kernels against the same steps in JAX: compiled for the CPU, every thread of a cluster being a fiber."""

import ctypes
import dataclasses
import functools
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import close, fetch_from
from metaleo.kernels import inner_loop, launching, noise
from metaleo.kernels import queries as queries_kernels
from metaleo.kernels.adaptation import difference
from metaleo.kernels.inner_loop import Shapes, few_runs, many_runs
from metaleo.kernels.launching import Kernel, runs_at_once, trusted
from metaleo.learners import LEO, Hyper
from metaleo.learners.learner import QUERY, judge_linear
from metaleo.model.gaussian import Slopes
from metaleo.model.network import linear
from metaleo.outer_loop import meta_gradient

slow = pytest.mark.slow
ORDERS = "forwards", "backwards", "uneven"
CASES = {  # how tasks are cut, tasks, way, examples, latent, dim, latent steps, fine-tuning steps
    "four blocks": (few_runs, 2, 3, 3, 32, 128, 3, 3),
    "two blocks": (few_runs, 2, 3, 3, 16, 32, 2, 3),
    "one block": (few_runs, 2, 2, 3, 16, 16, 3, 2),
    "examples in several parts": (few_runs, 2, 2, 19, 32, 64, 2, 2),
    "more classes than eight": (few_runs, 2, 9, 10, 32, 64, 2, 2),
    "one step": (few_runs, 2, 3, 3, 16, 64, 1, 1),
    "wide": (few_runs, 2, 5, 5, 64, 192, 2, 2),
    "three tasks and one": (many_runs, 4, 5, 5, 64, 128, 3, 3),
    "two tasks of nine classes and shots": (many_runs, 2, 8, 19, 16, 64, 2, 3),
    "a task of many classes": (many_runs, 2, 11, 12, 48, 64, 1, 1),
    "in two passes": (lambda shapes: many_runs(shapes, 125), 16, 4, 4, 16, 64, 2, 2),
    "in passes that are not even": (lambda shapes: many_runs(shapes, 150), 10, 5, 5, 16, 64, 1, 2),
    "eight tasks": (many_runs, 8, 2, 3, 16, 192, 2, 2),
}


@pytest.fixture(scope="module")
def library(compiler, tmp_path_factory):
    """The kernels of some shapes, compiled for the CPU."""
    folder = tmp_path_factory.mktemp("kernels")
    prelude = (Path(__file__).parent / "on_cpu.h").read_text()
    libraries = {}

    def of_kernel(kernel):
        problem = kernel.sources, launching.constants(kernel)
        if problem not in libraries:
            text = folder / "kernels.cpp"
            text.write_text(prelude + launching.source(*kernel.sources))
            path = folder / f"{len(libraries)}.so"
            defined = [f"-D{name}={value!r}" for name, value in launching.constants(kernel)]
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", *defined]
            subprocess.run(["c++", *flags, str(text), "-o", str(path)], check=True)
            libraries[problem] = ctypes.CDLL(str(path))
        return libraries[problem]

    return of_kernel


@pytest.fixture(params=["forwards", *(pytest.param(order, marks=slow) for order in ORDERS[1:])])
def launch(request, library, monkeypatch):
    """Instead of the GPU's launches, these on the CPU."""

    def launcher(kernel):
        own = library(kernel)

        def run(*arrays):
            inputs = [np.ascontiguousarray(array) for array in arrays]
            assert {array.dtype.itemsize for array in inputs} == {4}
            outputs = [np.full(shape, np.nan, np.float32) for shape in kernel.results]
            pointers = [array.ctypes.data for array in (*inputs, *outputs)]
            arguments = (ctypes.c_void_p * 25)(*pointers, *[None] * (25 - len(pointers)))
            sizes = kernel.clusters, kernel.cluster, kernel.threads, kernel.shared_bytes
            own.launch.restype = ctypes.c_bool
            assert own.launch(getattr(own, kernel.name), *sizes, ORDERS.index(request.param), arguments), "a deadlock"
            return tuple(outputs)

        shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in kernel.results)
        return functools.partial(jax.pure_callback, run, shapes, vmap_method="sequential")

    monkeypatch.setattr(launching, "launcher", launcher)
    monkeypatch.setattr(launching, "has_clusters", lambda: True)


@pytest.mark.parametrize("case", [name if name == "one block" else pytest.param(name, marks=slow) for name in CASES])
@pytest.mark.parametrize("launch", ["forwards"], indirect=True)
def test_results_and_gradients(launch, case):
    """Of all that is learned, and of what lies before: codes and inputs."""
    check_case(case)


@slow
@pytest.mark.parametrize("case", ["four blocks", "three tasks and one", "in two passes"])
@pytest.mark.parametrize("launch", ORDERS[1:], indirect=True)
def test_results_in_other_orders_of_threads(launch, case):
    check_case(case)


@slow
@pytest.mark.parametrize("case", ["four blocks", "eight tasks"])
@pytest.mark.parametrize("launch", ["forwards"], indirect=True)
def test_results_with_official_scales(launch, case):
    check_case(case, official=True)


def check_case(case, official=False):
    way_to_cut, *sizes = CASES[case]
    assert difference(way_to_cut(Shapes(*sizes)), Slopes(official, 0.4)) < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "queries", "dim"),
    [(2, 3, 128), *(pytest.param(*sizes, marks=slow) for sizes in ((3, 13, 256), (5, 9, 640)))],
)
def test_query_loss(launch, way, queries, dim):
    """With its gradient, accuracy, padding, and dropout drawn as elsewhere."""
    own = queries_kernels.kernel(3, way, dim, queries, QUERY)
    assert queries_kernels.difference(judge_linear, own, queries) < 1e-5


@pytest.mark.parametrize("stream", [0, 3])
def test_noise(launch, stream):
    assert noise.difference(stream) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["forwards"], indirect=True)
def test_kernels_that_go_wrong_are_not_used(launch, monkeypatch):
    way_to_cut, *sizes = CASES["one step"]
    problem = difference, way_to_cut(Shapes(*sizes)), Slopes(False, 0.1)
    trusted.cache_clear()
    assert jax.jit(lambda x: x if trusted(*problem) else -x)(1.0) == 1  # asked for while something else is traced
    right = launching.launcher

    def wrong(kernel):
        run = right(kernel)

        def spoilt(*arrays):
            first, *rest = run(*arrays)
            return first.at[0, 0, 0].add(0.1 * jnp.abs(first).max()), *rest

        return spoilt if kernel.name == "adapt_backward" else run

    def broken(*_):
        raise RuntimeError("no such instruction\nat line 1")

    for launcher, message in ((wrong, "differ from XLA by 0.1 on"), (broken, r"do not work on this GPU \(no such")):
        monkeypatch.setattr(launching, "launcher", launcher)
        trusted.cache_clear()
        with pytest.warns(UserWarning, match=message):
            assert not trusted(*problem)
    trusted.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "kernels"), [(1, 2), (100, 4)])
@pytest.mark.parametrize("launch", ["forwards"], indirect=True)
def test_meta_gradient_with_kernels(launch, monkeypatch, runs, kernels):
    """From tasks and keys to the gradient of a learner, as in every meta-step; of many runs noise and queries too."""
    own = LEO.init(jax.random.key(0), linear(128), latent=16, latent_steps=2, finetune_steps=2)
    keys, table = jax.random.split(jax.random.key(1), 2), jax.random.normal(jax.random.key(2), (40, 128)) / 8

    fetch = fetch_from(table)
    monkeypatch.setattr(noise, "FEWEST", 1024)
    with runs_at_once(0):
        expected = jax.jit(lambda *arguments: meta_gradient(*arguments, fetch))(own, keys, Hyper(), keys)
    trusted.cache_clear()
    monkeypatch.setattr(launching.nvrtc, "library", lambda: True)
    once_more = jax.jit(lambda *arguments: meta_gradient(*arguments, fetch))  # or JAX remembers what it traced
    with runs_at_once(runs):
        assert str(once_more.trace(own, keys, Hyper(), keys).jaxpr).count("pure_callback[") == kernels
        assert close(once_more(own, keys, Hyper(), keys), expected, 3e-5)
    trusted.cache_clear()


def test_arrays_that_are_too_long_are_launched_in_parts(monkeypatch):
    """Kernels count in 32 bits."""
    cut = many_runs(Shapes(2, 2, 2, 16, 64, 1, 1), 8)
    monkeypatch.setattr(launching, "ptx", lambda *_: "")
    monkeypatch.setattr(launching, "MOST_NUMBERS", 8 * 2 * 64 - 1)
    launching.launcher.cache_clear()
    run = jax.vmap(launching.launcher(cut.kernel("adapt_forward", Slopes(False, 0.1), ((64,),))))
    traced = {runs: jax.make_jaxpr(run)(jnp.zeros((runs, 2, 3))) for runs in (1, 7, 8)}
    assert [str(traced[runs].jaxpr).count("ffi_call[") for runs in traced] == [1, 1, 2]
    assert [traced[runs].out_avals[0].shape for runs in traced] == [(runs, 2, 64) for runs in traced]
    launching.launcher.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, 0, None), (0, None, None), (0, 0, 0), (0, None, 0)])
def test_runs_and_tables_that_are_mapped_over(monkeypatch, axes):
    """All runs are launched at once, with the one table they share or with all of theirs, one below the other."""

    def call(_name, results):
        def launched(weights, rows, table, **_):
            assert weights.ndim == rows.ndim == 3
            assert [result.shape for result in results] == [(len(weights), 2, 3)]
            return (weights * table[rows, 0],)

        return launched

    monkeypatch.setattr(launching.jax.ffi, "ffi_call", call)
    monkeypatch.setattr(launching, "ptx", lambda *_: "")
    kernel = Kernel("of_rows", (), (), 2, 1, 32, 0, ((2, 3),), from_table=True)
    weights, rows = np.random.default_rng(0).normal(size=(5, 4, 2, 3)), np.arange(120).reshape(5, 4, 2, 3) % 7
    table = jnp.asarray(np.random.default_rng(1).normal(size=(5, 7, 1)))
    weights, rows = jnp.asarray(weights), jnp.asarray(rows)
    run, arrays = launching.launcher.__wrapped__(kernel), (weights, rows, table)
    arrays = tuple(array if axis == 0 else array[0] for array, axis in zip(arrays, axes, strict=True))
    (own,) = jax.vmap(jax.vmap(run, (0, 0, None)), axes)(*arrays)
    for i in range(5):
        weights, rows, table = (array[i] if axis == 0 else array for array, axis in zip(arrays, axes, strict=True))
        np.testing.assert_allclose(own[i], weights * table[rows, 0], rtol=1e-6)


def test_which_shapes_fit():
    paper = Shapes(12, 5, 5, 64, 640, 5, 5)
    for way_to_cut in (few_runs, many_runs):
        assert way_to_cut(paper)
        assert way_to_cut(dataclasses.replace(paper, examples=25))
        for change in ({"dim": 100}, {"latent": 60}, {"latent": 128}, {"latent_steps": 0}, {"finetune_steps": 0},
                       {"dim": 4096}, {"examples": 200}):  # fmt: skip
            assert way_to_cut(dataclasses.replace(paper, **change)) is None, change
    assert few_runs(dataclasses.replace(paper, way=17, examples=17, latent_steps=2, finetune_steps=2))
    assert many_runs(dataclasses.replace(paper, way=17, examples=17, latent_steps=2, finetune_steps=2)) is None


def test_when_kernels_are_used(monkeypatch):
    paper, single = Shapes(12, 5, 5, 64, 640, 5, 5), jnp.dtype(jnp.float32)
    monkeypatch.setattr(launching, "has_clusters", lambda: True)
    monkeypatch.setattr(launching.nvrtc, "library", lambda: True)
    assert inner_loop.cut(paper, single) == few_runs(paper)
    assert inner_loop.cut(paper, jnp.dtype(jnp.float64)) is None
    with runs_at_once(0):
        assert inner_loop.cut(paper, single) is None
    with runs_at_once(256):
        assert inner_loop.cut(paper, single) == many_runs(paper, 256)
    with jax.default_matmul_precision("highest"):
        assert inner_loop.cut(paper, single) is None
    assert inner_loop.cut(paper, single) == few_runs(paper)
