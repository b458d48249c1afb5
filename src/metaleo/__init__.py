"""Metaleo: meta-learning with Latent Embedding Optimization (Rusu et al., ICLR 2019)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaleo.estimator import LEOClassifier, LEORegressor

__version__ = "0.1.0"
__all__ = ["LEOClassifier", "LEORegressor"]


def __getattr__(name: str) -> Any:
    """Estimators are imported when they are asked for: `metaleo --help` need not wait for scikit-learn."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import metaleo.estimator

    return getattr(metaleo.estimator, name)
