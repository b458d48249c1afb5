"""The CUDA kernels against the same steps in JAX: compiled for the CPU, every thread of a cluster being a fiber."""

import ctypes
import dataclasses
import functools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metaleo.kernels import inner_loop as kernels
from metaleo.kernels.adaptation import difference, trusted
from metaleo.kernels.inner_loop import Shapes
from metaleo.learners import LEO, Hyper, leo
from metaleo.model.gaussian import Slopes
from metaleo.model.network import linear
from metaleo.outer_loop import meta_gradient
from metaleo.tasks import Task
from metaleo.tasks.task import labelled
from small import close

TASKS = 2
ORDERS = "forwards", "backwards", "uneven"
CASES = {  # way, examples, latent, dim, latent steps, fine-tuning steps
    "four blocks": (3, 3, 32, 128, 3, 3),
    "two blocks": (3, 3, 16, 32, 2, 3),
    "one block": (2, 3, 16, 16, 3, 2),
    "examples in several parts": (2, 19, 32, 64, 2, 2),
    "more classes than eight": (9, 10, 32, 64, 2, 2),
    "one step": (3, 3, 16, 64, 1, 1),
    "wide": (5, 5, 64, 192, 2, 2),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernels of some shapes, compiled for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    prelude = (Path(__file__).parent / "on_cpu.h").read_text()
    (folder / "kernels.cpp").write_text(prelude + (kernels.FOLDER / "inner_loop.cu").read_text())
    libraries = {}

    def of_shapes(shapes, slopes):
        if (shapes, slopes) not in libraries:
            path = folder / f"{len(libraries)}.so"
            constants = shapes.constants() | {"OFFICIAL": int(slopes.official), "INITIAL": f"{slopes.initial!r}f"}
            defined = [f"-D{name}={value}" for name, value in constants.items()]
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", *defined]
            subprocess.run(["g++", *flags, str(folder / "kernels.cpp"), "-o", str(path)], check=True)
            libraries[shapes, slopes] = ctypes.CDLL(str(path))
        return libraries[shapes, slopes]

    return of_shapes


@pytest.fixture(params=ORDERS)
def launch(request, library, monkeypatch):
    """Instead of the GPU's launches, these on the CPU."""

    def launcher(name, shapes, slopes, results):
        own = library(shapes, slopes)

        def run(*arrays):
            inputs = [np.ascontiguousarray(array, np.float32) for array in arrays]
            outputs = [np.full((shapes.tasks, *shape), np.nan, np.float32) for shape in results]
            pointers = [array.ctypes.data for array in (*inputs, *outputs)]
            arguments = (ctypes.c_void_p * 24)(*pointers, *[None] * (24 - len(pointers)))
            sizes = shapes.tasks, shapes.cluster, shapes.threads, shapes.shared_bytes
            own.launch.restype = ctypes.c_bool
            assert own.launch(getattr(own, name), *sizes, ORDERS.index(request.param), arguments), "a deadlock"
            return tuple(outputs)

        shapes_of_results = tuple(jax.ShapeDtypeStruct((shapes.tasks, *shape), jnp.float32) for shape in results)
        return functools.partial(jax.pure_callback, run, shapes_of_results)

    monkeypatch.setattr(kernels, "launcher", launcher)


@pytest.mark.parametrize(("case", "official"), [*((case, False) for case in CASES), ("four blocks", True)])
def test_results_and_gradients(launch, case, official):
    """Of all that is learned, and of what lies before: codes and inputs."""
    assert difference(Shapes(TASKS, *CASES[case]), Slopes(official, 0.4)) < 3e-5


def test_kernels_that_go_wrong_are_not_used(launch, monkeypatch):
    problem = Shapes(TASKS, *CASES["one step"]), Slopes(False, 0.1)
    trusted.cache_clear()
    assert jax.jit(lambda x: x if trusted(*problem) else -x)(1.0) == 1  # asked for while something else is traced
    right = kernels.launcher

    def wrong(name, *arguments):
        run = right(name, *arguments)

        def spoilt(*arrays):
            first, *rest = run(*arrays)
            return first.at[0, 0, 0].add(0.1 * jnp.abs(first).max()), *rest

        return spoilt if name == "adapt_backward" else run

    def broken(*_):
        raise RuntimeError("no such instruction\nat line 1")

    for launcher, message in ((wrong, "differ from XLA by 0.1 on"), (broken, r"do not work on this GPU \(no such")):
        monkeypatch.setattr(kernels, "launcher", launcher)
        trusted.cache_clear()
        with pytest.warns(UserWarning, match=message):
            assert not trusted(*problem)
    trusted.cache_clear()


def test_meta_gradient_with_kernels(launch, monkeypatch):
    """From tasks and keys to the gradient of a learner, as in every meta-step."""
    learner = LEO.init(jax.random.key(0), linear(64), latent=16, latent_steps=2, finetune_steps=2)
    keys = jax.random.split(jax.random.key(1), 2)

    def batch(key, examples):
        inputs = jax.random.normal(key, (examples, 64)) / 8
        return labelled(inputs, np.arange(examples) % 3, 3, jnp.arange(examples) < examples - 1)

    tasks = jax.vmap(lambda key: Task(batch(key, 4), batch(jax.random.fold_in(key, 1), 7)))(keys)
    arguments = learner, tasks, Hyper(), keys
    expected = jax.jit(meta_gradient)(*arguments)
    trusted.cache_clear()
    monkeypatch.setattr(kernels, "has_clusters", lambda: True)
    monkeypatch.setattr(leo, "has_clusters", lambda: True)
    monkeypatch.setattr(kernels.nvrtc, "library", lambda: True)
    once_more = jax.jit(lambda *arguments: meta_gradient(*arguments))  # or JAX remembers what it traced
    assert str(once_more.trace(*arguments).jaxpr).count("pure_callback[") == 2
    assert close(once_more(*arguments), expected, 3e-5)
    trusted.cache_clear()


def test_which_shapes_fit():
    paper = Shapes(12, 5, 5, 64, 640, 5, 5)
    assert paper.fit
    assert dataclasses.replace(paper, examples=25).fit
    for change in ({"dim": 100}, {"latent": 60}, {"latent": 128}, {"latent_steps": 0}, {"finetune_steps": 0},
                   {"dim": 4096}, {"examples": 200}):  # fmt: skip
        assert not dataclasses.replace(paper, **change).fit, change


def test_when_kernels_are_used(monkeypatch):
    paper = Shapes(12, 5, 5, 64, 640, 5, 5)
    assert not kernels.usable(paper, jnp.dtype(jnp.float32))  # on a CPU
    monkeypatch.setattr(kernels, "has_clusters", lambda: True)
    monkeypatch.setattr(kernels.nvrtc, "library", lambda: True)
    assert kernels.usable(paper, jnp.dtype(jnp.float32))
    assert not kernels.usable(paper, jnp.dtype(jnp.float64))
    with kernels.switched_off():
        assert not kernels.usable(paper, jnp.dtype(jnp.float32))
    with jax.default_matmul_precision("highest"):
        assert not kernels.usable(paper, jnp.dtype(jnp.float32))
    assert kernels.usable(paper, jnp.dtype(jnp.float32))
