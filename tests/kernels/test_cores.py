"""What a CPU's cores run, against the same in JAX."""

import dataclasses
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import close, fetch_from
from metaleo.kernels import inner_loop, native, noise
from metaleo.kernels import queries as queries_kernels
from metaleo.kernels.adaptation import adaptation, difference
from metaleo.kernels.inner_loop import Shapes, cores
from metaleo.kernels.joining import joined
from metaleo.kernels.launching import runs_at_once
from metaleo.learners import LEO, Hyper
from metaleo.learners.learner import QUERY, judge_linear
from metaleo.model.gaussian import Slopes
from metaleo.model.network import linear
from metaleo.outer_loop import make_optimiser, meta_gradient
from metaleo.randomness import masks, normals

compiled = pytest.mark.usefixtures("on_cores")
slow = pytest.mark.slow
PAPER = Shapes(6, 5, 5, 64, 640, 5, 5)
CASES = {  # tasks, way, examples, latent, dim, latent steps, fine-tuning steps
    "a single task of the paper": (1, 5, 5, 64, 640, 5, 5),
    "five shots": (2, 5, 25, 64, 192, 2, 2),
    "vectors that no panel has": (3, 3, 4, 48, 80, 3, 2),
    "rows that no tile has": (7, 7, 8, 16, 16, 2, 3),
    "two classes": (2, 2, 2, 16, 64, 1, 1),
    "more than fit into registers": (2, 9, 13, 16, 112, 2, 2),
}


@compiled
@pytest.mark.parametrize(
    ("case", "official"),
    [("two classes", False), *(pytest.param(case, n % 2 == 0, marks=slow) for n, case in enumerate(CASES))],
)
def test_results_and_gradients(case, official):
    """Of all that is learned, and of what lies before: codes and inputs."""
    assert difference(cores(Shapes(*CASES[case])), Slopes(official, 0.4)) < 3e-5


@compiled
@pytest.mark.parametrize(
    ("way", "queries", "dim"),
    [(2, 3, 16), *(pytest.param(*sizes, marks=slow) for sizes in ((5, 75, 640), (3, 13, 80), (11, 10, 48)))],
)
def test_query_loss(way, queries, dim):
    """With its gradient, accuracy, padding, and dropout drawn as elsewhere."""
    own = queries_kernels.kernel(3, way, dim, queries, QUERY)
    assert queries_kernels.difference(judge_linear, own, queries) < 1e-5


@compiled
@pytest.mark.parametrize("stream", [0, 3])
def test_noise(stream):
    assert noise.difference(stream) < 1e-6


@slow
@compiled
def test_noise_of_tasks_and_runs():
    keys = jax.random.split(jax.random.key(7), (2, 3))
    own = jax.jit(jax.vmap(jax.vmap(lambda key: noise.many_normals(key, (64, 128), 1))))(keys)
    expected = jax.jit(jax.vmap(jax.vmap(lambda key: normals(key, (64, 128), 1))))(keys)
    np.testing.assert_allclose(own, expected, atol=5e-6)


def scales(raw, official):
    """σ(r), as weights that are decoded with noise of one from a code that S makes r of."""
    shapes, nothing, one = Shapes(1, 1, 1, 16, 256, 1, 1), jnp.zeros, jnp.ones
    arrays = (
        nothing((1, 1, 16)).at[0, 0, 0].set(1), nothing((16, 256)), nothing((16, 256)).at[0].set(raw), nothing(16),
        nothing(256), nothing((1, 1, 1, 256)), nothing((1, 1, 1, 256)), nothing((1, 1, 1, 16)), one((1, 2, 1, 256)),
        one((1, 1, 1)), one((1, 1)),
    )  # fmt: skip
    return inner_loop.adapt_forward(cores(shapes), Slopes(official, 0.1), *arrays)[1][0, 0]


@slow
@compiled
def test_scales_far_from_zero():
    raw = np.linspace(-120, 80, 256).astype(np.float32)
    exact = raw.astype(float)
    np.testing.assert_allclose(scales(raw, False), 0.1 * np.logaddexp(0, exact) / np.log(2), rtol=2e-6, atol=1e-37)
    np.testing.assert_allclose(scales(raw, True), np.maximum(np.exp(exact) - 0.9, 1e-10), rtol=4e-6, atol=2e-7)
    assert not np.isfinite(scales(np.full(256, 200, np.float32), True)).any()


@slow
@compiled
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_task(poison):
    shapes = dataclasses.replace(PAPER, tasks=3)
    draw = np.random.default_rng(0).normal

    def adapt(spoilt):
        inputs = 0.5 * jnp.asarray(np.random.default_rng(1).normal(size=(3, 5, 5, 640)), jnp.float32)
        inputs = inputs.at[1, 2, 3, 4].set(poison) if spoilt else inputs
        return jax.vmap(adaptation(Slopes(False, 0.1), 5), (0, *[None] * 4, *[0] * 5))(code, *shared, inputs, *rest)

    code, *shared = (
        jnp.asarray(0.1 * draw(size=size), jnp.float32) for size in ((3, 5, 64), (64, 640), (64, 640), (64,), (640,))
    )
    rest = (
        jnp.asarray(draw(size=(3, 5, 5, 640)), jnp.float32), jnp.asarray(draw(size=(3, 6, 5, 640)), jnp.float32),
        jnp.broadcast_to(jnp.eye(5), (3, 5, 5)), jnp.ones((3, 5), bool),
    )  # fmt: skip
    assert inner_loop.cut(shapes, jnp.dtype(jnp.float32))
    for own, expected in zip(adapt(True), adapt(False), strict=True):
        np.testing.assert_array_equal(own[np.array([0, 2])], expected[np.array([0, 2])])
    assert not np.isfinite(adapt(True)[2][1]).any()


def in_a_row(gradients, by_kernels):
    """Directions and the final state of an optimiser that gets these."""

    def step(state, gradient):
        direction, state = optimiser.update(gradient, state)
        return state, direction

    optimiser = make_optimiser()
    with runs_at_once(int(by_kernels)):
        state, directions = jax.lax.scan(step, optimiser.init(jax.tree.map(lambda g: g[0], gradients)), gradients)
    return directions, state


@compiled
@pytest.mark.usefixtures("loose_dtypes")
def test_optimiser():
    """Clipped by value, by norm and not at all; without steps where the gradient is not finite."""
    generator = np.random.default_rng(0)
    sizes = jnp.asarray([1e-4, 0.5, 1e-3, 30, 1e-3, 1e-3], jnp.float32)
    gradients = {
        name: jnp.asarray(generator.normal(size=(6, *shape)), jnp.float32) * sizes.reshape(-1, *[1] * len(shape))
        for name, shape in {"a": (3, 32), "b": (16,), "c": (128,)}.items()
    }
    gradients["b"] = gradients["b"].at[2, 5].set(jnp.nan)
    gradients["c"] = gradients["c"].at[4:, 77].set(-jnp.inf)
    own, expected = (in_a_row(gradients, by_kernels) for by_kernels in (True, False))
    assert own[1].total_notfinite == 3
    assert own[1].notfinite_count == 2
    assert not np.any(own[0]["a"][2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), own, expected)

    runs = jax.tree.map(lambda g: jnp.stack([g, jnp.nan_to_num(-2 * g)]), gradients)  # the second takes all steps
    together = jax.vmap(lambda g: in_a_row(g, True))(runs)
    for run in range(2):
        alone = in_a_row(jax.tree.map(lambda g: g[run], runs), True)  # noqa: B023
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[run], b), together, alone)  # noqa: B023


@compiled
def test_joined():
    arrays = [jnp.arange(6.0).reshape(2, 3), jnp.float32(7), jnp.arange(8.0, 10)]
    text = str(jax.make_jaxpr(lambda *arrays: joined(list(arrays)))(*arrays))
    assert "ffi_call" in text
    np.testing.assert_array_equal(joined(arrays), [0, 1, 2, 3, 4, 5, 7, 8, 9])
    with runs_at_once(0):
        np.testing.assert_array_equal(joined(arrays), [0, 1, 2, 3, 4, 5, 7, 8, 9])


def gradient_of(dim, latent):
    """That of a learner, from tasks and keys, as in every meta-step; and how it comes about."""
    own = LEO.init(jax.random.key(0), linear(dim), latent=latent, latent_steps=2, finetune_steps=2)
    keys, table = jax.random.split(jax.random.key(1), 2), jax.random.normal(jax.random.key(2), (40, dim)) / 8

    fetch = fetch_from(table)
    function = jax.jit(lambda *arguments: meta_gradient(*arguments, fetch))
    arguments = own, keys, Hyper(), keys
    return function(*arguments), str(function.trace(*arguments).jaxpr).count("ffi_call[")


@compiled
def test_meta_gradient(monkeypatch):
    monkeypatch.setattr(noise, "FEWEST", 1024)
    with runs_at_once(0):
        expected, kernels = gradient_of(128, 16)
    assert kernels == 0
    own, kernels = gradient_of(128, 16)
    assert kernels == 4  # there, back, queries, noise
    assert close(own, expected, 3e-5)


@slow
@compiled
@pytest.mark.parametrize(("dim", "latent", "kernels"), [(120, 16, 0), (128, 12, 1)])
def test_what_vectors_do_not_divide_is_left_to_xla(dim, latent, kernels):
    assert gradient_of(dim, latent)[1] == kernels


@compiled
def test_when_they_are_used():
    single = jnp.dtype(jnp.float32)
    assert inner_loop.cut(PAPER, single) == cores(PAPER)
    assert inner_loop.cut(PAPER, jnp.dtype(jnp.float64)) is None
    with runs_at_once(0):
        assert inner_loop.cut(PAPER, single) is None
    for change in ({"dim": 100}, {"latent": 60}, {"latent_steps": 0}, {"finetune_steps": 0}):
        assert cores(dataclasses.replace(PAPER, **change)) is None, change


@pytest.mark.slow
@compiled
def test_keeping_every_feature_drops_none():
    assert masks(jax.random.key(0), 1.0, (1000,)).all()
    kernel = queries_kernels.kernel(1, 2, 16, 3, QUERY)
    table, weights = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), jnp.float32), jnp.ones((1, 2, 16))
    weights, targets = weights.at[0, 1].set(-1), jnp.eye(2)[jnp.array([[0, 1, 0]])]
    arguments = jnp.zeros((1, 2), jnp.uint32), jnp.ones(1), targets, jnp.ones((1, 3), bool), jnp.array([[2, 0, 1]])
    losses, _ = queries_kernels.judge_tasks(kernel, weights, *arguments, table)
    logits = table[jnp.array([2, 0, 1])] @ weights[0].T
    expected = -jnp.sum(targets[0] * jax.nn.log_softmax(logits)) / 3
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)


# Compiling


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Where a user without a cache keeps the library; `load` is that of a new process, of which XLA hears nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(native.jax.ffi, "register_ffi_target", lambda *_, **__: None)
    return tmp_path / "metaleo/cores"


load = native.library.__wrapped__


@slow
@compiled
def test_compiled_once_and_kept(fresh, monkeypatch):
    commands = []

    def run(*command):
        commands.append(command)
        return true_run(*command)

    true_run = native.run
    monkeypatch.setattr(native, "run", run)
    assert load()
    assert [path.suffix for path in fresh.iterdir()] == [".so"]
    assert len(commands) == 2
    assert load()
    assert len(commands) == 3  # what processor it is
    monkeypatch.setattr(native, "CONSTANTS", native.CONSTANTS | {"GOLDEN": 5})
    assert load()
    assert len(list(fresh.iterdir())) == 2


@slow
@compiled
def test_nothing_is_run_from_a_folder_that_others_can_write_to(fresh):
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert load()
    assert not list(fresh.iterdir())


def test_without_a_compiler(fresh, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh))
    assert load() is None
    monkeypatch.setattr(native, "library", load)
    assert inner_loop.cut(PAPER, jnp.dtype(jnp.float32)) is None


@pytest.mark.skipif(os.name != "posix", reason="a compiler in two lines of shell")
def test_with_a_compiler_that_fails(fresh, tmp_path, monkeypatch):
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'x.cpp: In function f:' >&2\necho 'x.cpp:1: error: no vectors' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} --careful")
    with pytest.warns(UserWarning, match=r"do not compile here \(x.cpp:1: error: no vectors\): going on without them"):
        assert load() is None
    monkeypatch.setattr(native.subprocess, "run", late)
    with pytest.warns(UserWarning, match="timed out"):
        assert load() is None


def late(*_, **__):
    raise subprocess.TimeoutExpired("cxx", 120)
