"""Every shape annotation of the package is checked, and dtypes and ranks may not mix silently, in every test."""

import contextlib
import os
import tempfile

import pytest
from jaxtyping import install_import_hook

# Tests compile far more than they compute: leave the costly optimisations out, in child processes too.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
# Nor do they leave programs behind, or find any, in the cache of whoever runs them.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
if "PYTEST_XDIST_WORKER" not in os.environ:  # all processes of these tests keep the kernels of cores in one place
    os.environ["XDG_CACHE_HOME"] = (cache := tempfile.TemporaryDirectory()).name

with install_import_hook("metaleo", "beartype.beartype"):
    import metaleo.cli
    import metaleo.features.benchmarks
    import metaleo.features.run
    import metaleo.web.server  # noqa: F401

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "warn")  # a warning is an error, see pyproject.toml


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
