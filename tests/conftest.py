"""Every shape annotation of the package is checked, and dtypes and ranks may not mix silently, in every test."""

import pytest
from jaxtyping import install_import_hook

with install_import_hook("metaleo", "beartype.beartype"):
    import metaleo.cli  # noqa: F401

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "warn")  # a warning is an error, see pyproject.toml


@pytest.fixture
def float64():
    """Double precision for the length of a test."""
    with jax.enable_x64(True):
        yield
