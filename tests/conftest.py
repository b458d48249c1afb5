"""Every shape annotation of the package is checked, and dtypes and ranks may not mix silently, in every test."""

import contextlib
import gc
import importlib
import os
import tempfile

import pytest

# Tests compile far more than they compute: leave the costly optimisations out, in child processes too.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # as many processes as cores: threads would only wait
    os.environ.setdefault(name, "1")
# What one process of this test run compiles, the others need not; nor does the next run, if it is told where to look.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = (cache := tempfile.TemporaryDirectory()).name
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{cache.name}/compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax  # noqa: E402 (it reads some of these settings at once)
from jaxtyping import install_import_hook  # noqa: E402


def pytest_configure(config):
    """In every process that runs tests; not in the one that hands them out."""
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        with install_import_hook("metaleo", "beartype.beartype"):
            for module in ("features.datasets", "features.pretrain_run", "serve.server"):
                importlib.import_module(f"metaleo.{module}")
            cli = importlib.import_module("metaleo.cli")
            for name in cli.CLASSES:
                cli.command_class(name)
        gc.freeze()
        gc.set_threshold(200_000, 50, 1000)  # looking for garbage among all that JAX keeps took a sixth of the time
        jax.config.update("jax_numpy_dtype_promotion", "strict")
        jax.config.update("jax_numpy_rank_promotion", "warn")  # a warning is an error, see pyproject.toml


@pytest.fixture(scope="session", autouse=True)
def few_tasks():
    """Temperatures and baselines need hundreds of tasks in life; in tests, a few do."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("evaluation.calibration.TASKS", "training.baselines.TASKS", "training.baselines.LEVEL_TASKS"):
            patch.setattr(f"metaleo.{name}", 10)
        yield


@pytest.fixture
def float64():
    """Double precision for the length of a test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def loose_dtypes():
    """Optax mixes dtypes (never ours) on purpose."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def compilations_so_far():
    """A list that grows by one with every program that XLA compiles."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return compiled


@pytest.fixture
def count_compilations(compilations_so_far):
    """`with count_compilations() as compilations:` — afterwards, one entry per compilation inside."""

    @contextlib.contextmanager
    def count():
        inside = []
        before = len(compilations_so_far)
        yield inside
        inside.extend(compilations_so_far[before:])

    return count
