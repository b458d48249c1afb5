"""Metaleo: meta-learning with Latent Embedding Optimization (Rusu et al., ICLR 2019)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaleo.engines import use_engine
    from metaleo.estimator import LEOClassifier, LEORegressor

__version__ = "0.1.0"
__all__ = ["LEOClassifier", "LEORegressor", "use_engine"]


def __getattr__(name: str) -> Any:
    """What is public is imported when it is asked for: `metaleo --help` need not wait for scikit-learn."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("metaleo.engines" if name == "use_engine" else "metaleo.estimator"), name)
