"""The CUDA kernels against XLA, without a GPU: compiled for the CPU, every thread of a cluster being a fiber."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from metaleo._jax.random import key_words, normals
from metaleo.engines.closed_form import ClosedForm
from metaleo.learners.base import WEIGHTS
from metaleo.learners.leo_noise import Noise
from metaleo.tasks.task import Batch

from metaleo_kernels import Cuda, CudaMany, engines, launching
from problems import check_close, losses_and_gradient, make_learner, make_runs

FOLDER = Path(__file__).parent
CONSTANTS = {
    "few_runs": ("WAY", "EXAMPLES", "LATENT", "DIM", "LATENT_STEPS", "FINETUNE_STEPS", "OFFICIAL"),
    "judge_queries": ("WAY", "EXAMPLES", "DIM"),
    "draw_normals": (),
}
CONSTANTS["many_runs"] = CONSTANTS["few_runs"]
SOURCES = {"judge_queries": "queries", "draw_normals": "noise"}
ORDERS = "forwards", "backwards", "uneven"
CASES = {  # engine, tasks, way, examples, latent, dim, latent steps, fine-tuning steps
    "four blocks": (Cuda, 2, 3, 3, 32, 128, 3, 3),
    "two blocks": (Cuda, 2, 3, 3, 16, 32, 2, 3),
    "one block": (Cuda, 2, 2, 3, 16, 16, 3, 2),
    "examples in several parts": (Cuda, 2, 2, 19, 32, 64, 2, 2),
    "more classes than eight": (Cuda, 2, 9, 10, 32, 64, 2, 2),
    "one step": (Cuda, 2, 3, 3, 16, 64, 1, 1),
    "wide": (Cuda, 2, 5, 5, 64, 192, 2, 2),
    "three tasks and one": (CudaMany, 4, 5, 5, 64, 128, 3, 3),
    "two tasks of eight classes and shots": (CudaMany, 2, 8, 19, 16, 64, 2, 3),
    "a task of many classes": (CudaMany, 2, 11, 12, 48, 64, 1, 1),
    "in two passes": (CudaMany, 16, 4, 4, 16, 64, 2, 2),
    "in passes that are not even": (CudaMany, 13, 5, 5, 16, 64, 1, 2),
    "fewer tasks than a block takes": (CudaMany, 2, 2, 3, 16, 192, 2, 2),
}
ROUNDING = 3e-5


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The kernel of a name, which has the numbers of its problem."""
    compiler, folder = shutil.which("c++"), tmp_path_factory.mktemp("kernels")
    if compiler is None:
        pytest.skip("there is no C++ compiler")

    @functools.cache
    def library(source, definitions):
        path = folder / f"{hash((source, definitions))}.so"
        flags = "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-xc++", "-include", FOLDER / "on_cpu.h", "-DFULL=2"
        subprocess.run([compiler, *flags, *definitions, FOLDER.parent / f"csrc/{source}.cu", "-o", path], check=True)
        return ctypes.CDLL(path)

    def kernel(name):
        kind = next(kind for kind in CONSTANTS if name.startswith(kind))
        numbers = name.split("_")[-len(CONSTANTS[kind]) :]
        definitions = (f"-D{constant}={number}" for constant, number in zip(CONSTANTS[kind], numbers, strict=False))
        function = getattr(library(SOURCES.get(kind, kind), tuple(definitions)), name)
        function.restype = ctypes.c_bool
        return function

    return kernel


@pytest.fixture(params=ORDERS[:1])
def on_fibers(request, compiled, monkeypatch):
    """Instead of launches on a GPU; what has been launched."""
    launched = []

    def call(name, results):
        kernel, (runs, tasks, *_) = compiled(name), results[0].shape

        def run(*arrays):
            launched.append(name)
            inputs = [np.ascontiguousarray(array) for array in arrays]
            assert {array.dtype.itemsize for array in inputs} == {4}
            outputs = [np.full(result.shape, np.nan, np.float32) for result in results]
            pointers = [array.ctypes.data for array in (*inputs, *outputs)]
            addresses = (ctypes.c_void_p * len(pointers))(*pointers)
            sizes = ORDERS.index(request.param), runs, tasks, results[0].shape[-1], len(pointers)
            assert kernel(*sizes, addresses), "a deadlock"
            return tuple(outputs)

        return functools.partial(jax.pure_callback, run, results)

    monkeypatch.setattr(launching, "call", call)
    for module in ("inner_loop", "engines"):
        monkeypatch.setattr(f"metaleo_kernels.{module}.built", lambda name: True)
    return launched


@pytest.mark.parametrize("case", CASES)
def test_inner_loop(on_fibers, case):
    check_inner_loop(on_fibers, *CASES[case])


@pytest.mark.parametrize("case", ["four blocks", "three tasks and one", "in two passes"])
@pytest.mark.parametrize("on_fibers", ORDERS[1:], indirect=True)
def test_inner_loop_in_other_orders_of_threads(on_fibers, case):
    check_inner_loop(on_fibers, *CASES[case])


@pytest.mark.parametrize("case", ["four blocks", "three tasks and one"])
def test_inner_loop_with_official_scales(on_fibers, case):
    check_inner_loop(on_fibers, *CASES[case], official=True)


def check_inner_loop(launched, engine, tasks, way, examples, latent, dim, latent_steps, finetune_steps, official=False):
    """Results and gradients of all that is learned and of codes, one example being padding."""
    steps = {"latent_steps": latent_steps, "finetune_steps": finetune_steps}
    step_sizes = {"latent_step_size": 0.1, "finetune_step_size": 0.1}
    leo = make_learner(0, dim, latent, official=official, **steps, **step_sizes)
    generator = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(generator.normal(size=shape), jnp.float32)

    targets = jnp.broadcast_to(jnp.eye(way)[jnp.arange(examples) % way], (tasks, examples, way))
    mask = jnp.ones((tasks, examples), bool).at[0, -1].set(False)
    supports = jax.vmap(Batch)(0.5 * normal(tasks, examples, dim), targets, mask)
    masks = (normal(tasks, number, examples, dim) < 0.5 for number in steps.values())
    noise = Noise(None, normal(tasks, latent_steps + 1, way, dim), None, *masks, jnp.full(tasks, 0.7))

    def results(engine):
        descended, back = jax.vjp(lambda leo, code: engine.descend(leo, code, supports, noise), leo, code)
        return descended, back(of_results)

    code = normal(tasks, way, latent)
    of_results = normal(tasks, way, latent), normal(tasks, way, dim), normal(tasks, way, dim)
    check_close(results(engine()), results(ClosedForm()), ROUNDING)
    assert len(launched) == 2


@pytest.mark.parametrize("on_fibers", ORDERS, indirect=True)
def test_noise(on_fibers):
    keys = jax.random.split(jax.random.key(0), (2, 3))
    words = jax.vmap(jax.vmap(key_words))(keys)
    own = jax.vmap(lambda words: engines.normals(words, (3, 2, 2064)))(words)
    check_close(own, jax.vmap(jax.vmap(lambda key: normals(key, (2, 2064), WEIGHTS)))(keys), 1e-6)
    assert on_fibers == ["draw_normals"]


@pytest.mark.parametrize(("engine", "kernels"), [(Cuda, 2), (CudaMany, 4)])
def test_losses_and_meta_gradient_of_runs(on_fibers, engine, kernels):
    """Each run with a learner of its own, all launched at once; of many runs noise and query loss too."""
    sizes = {"way": 3, "shot": 1, "query": 7, "dim": 128, "latent": 16, "latent_steps": 2, "finetune_steps": 2}
    learner, tasks, *rest = make_runs(2, 2, **sizes)
    own, expected = (losses_and_gradient(one, tasks)(learner, *rest) for one in (engine(), ClosedForm()))
    check_close(own, expected, ROUNDING)
    assert len(on_fibers) == kernels


def test_what_is_not_built_is_left_to_xla():
    learner, tasks, *rest = make_runs(1, 2, way=2, shot=1, query=2, dim=16, latent=16)
    own, expected = (losses_and_gradient(one, tasks)(learner, *rest) for one in (CudaMany(), ClosedForm()))
    check_close(own, expected, ROUNDING)


def test_without_a_gpu_nothing_is_supported(monkeypatch):
    monkeypatch.setattr(launching, "has_clusters", lambda: False)
    learner = make_learner(0, 640)
    assert not any(engine().supports(learner, runs) for engine in (Cuda, CudaMany) for runs in (1, 100))


def test_number_of_runs_and_precision_decide(monkeypatch):
    monkeypatch.setattr(launching, "has_clusters", lambda: True)
    monkeypatch.setattr(launching, "library", lambda: True)
    learner = make_learner(0, 640)
    supported = [[engine().supports(learner, runs) for runs in (1, 6, 7)] for engine in (Cuda, CudaMany)]
    assert supported == [[True, True, False], [False, False, True]]
    with jax.default_matmul_precision("highest"):
        assert not Cuda().supports(learner, 1)


def test_arrays_that_are_too_long_are_launched_in_parts(monkeypatch):
    """Kernels count in 32 bits."""
    monkeypatch.setattr(launching, "MOST_NUMBERS", 8 * 2 * 64 - 1)
    run = jax.vmap(launching.launcher.__wrapped__("any", ((2, 64),)))
    traced = {runs: jax.make_jaxpr(run)(jnp.zeros((runs, 2, 3))) for runs in (1, 7, 8)}
    assert [str(traced[runs].jaxpr).count("ffi_call[") for runs in traced] == [1, 1, 2]
    assert [traced[runs].out_avals[0].shape for runs in traced] == [(runs, 2, 64) for runs in traced]


@pytest.mark.parametrize("axes", [(0, 0, None), (0, None, None), (0, 0, 0), (0, None, 0)])
def test_tables_that_are_mapped_over(monkeypatch, axes):
    """All runs are launched at once, with the one table they share or with all of theirs, one below the other."""

    def call(_name, results):
        def launched(weights, rows, table):
            assert [result.shape for result in results] == [weights.shape] == [rows.shape]
            return (weights * table[rows, 0],)

        return launched

    monkeypatch.setattr(launching, "call", call)
    weights, rows = np.random.default_rng(0).normal(size=(5, 4, 2, 3)), np.arange(120).reshape(5, 4, 2, 3) % 7
    arrays = map(jnp.asarray, (weights, rows, np.random.default_rng(1).normal(size=(5, 7, 1))))
    arrays = [array if axis == 0 else array[0] for array, axis in zip(arrays, axes, strict=True)]
    run = launching.launcher.__wrapped__("any", ((2, 3),), from_table=True)
    (own,) = jax.vmap(jax.vmap(run, (0, 0, None)), axes)(*arrays)
    for i in range(5):
        weights, rows, table = (array[i] if axis == 0 else array for array, axis in zip(arrays, axes, strict=True))
        np.testing.assert_allclose(own[i], weights * table[rows, 0], rtol=1e-6)
