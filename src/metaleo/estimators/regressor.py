"""Regression from a few points, as a scikit-learn estimator: `fit` adapts a trained model to them."""

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from metaleo.checkpoints import TrainedModel, load_cached, model_paths
from metaleo.errors import BadInput
from metaleo.estimators.classifier import pad, padded_length
from metaleo.learners.base import Learner
from metaleo.learners.leo import LEO
from metaleo.nn.heads import GeneratedHead
from metaleo.tasks import PROBLEMS
from metaleo.tasks.sines_and_lines import DOMAIN, TARGETS
from metaleo.tasks.task import Batch

DEFAULT = "sines-and-lines"


class LEORegressor(RegressorMixin, BaseEstimator):
    """A distribution over functions, given a handful of points.

    `fit` samples codes from the encoder's distribution for the points, adapts each by gradient steps and decodes each
    to a network: a function that explains the points. `predict` returns the mean and standard deviation of these
    functions, without further training.

    Args:
        model: A model file or run folder; a `LEO` whose network has real-valued targets (an estimator with a
            user-defined network cannot be pickled); or None for the model of sines and lines in this package. It is
            made for points with x in [-5, 5] and y in [-19, 19]: outside, its functions mean nothing, and `fit` and
            `predict` warn.
        n_functions: Number of functions to sample.
        random_state: Seed of the sampling, as in scikit-learn.

    Examples:
        >>> from metaleo import LEORegressor
        >>> regressor = LEORegressor().fit([[-4.0], [-1.5], [0.5], [2.0], [4.5]], [1.1, -2.0, -0.2, 1.7, -2.2])
        >>> mean, std = regressor.predict([[-3.0], [3.0]], return_std=True)
        >>> regressor.sample_y([[-3.0], [3.0]], n_samples=5).shape
        (2, 5)
    """

    def __init__(
        self,
        model: str | Path | LEO | None = None,
        n_functions: int = 100,
        random_state: int | np.random.RandomState | None = 0,
    ):
        self.model = model
        self.n_functions = n_functions
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "LEORegressor":  # noqa: N803
        """Adapt to any number of points."""
        leo = resolve_regressor(self.model)
        inputs, targets = leo.network.inputs, leo.network.targets
        assert targets is not None  # `resolve_regressor` has checked this
        if not isinstance(self.n_functions, int | np.integer) or self.n_functions < 1:
            raise BadInput(f"n_functions must be a whole number of at least 1, not {self.n_functions}")
        X, y = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)  # noqa: N806
        self._check_width(X, inputs)
        self.targets_ndim_ = np.ndim(y)
        y = np.asarray(y, np.float32).reshape(len(X), -1)
        if y.shape[1:] != targets:
            raise BadInput(f"y has {y.shape[1]} numbers per example; the model was trained for {targets[0]}")
        seed = check_random_state(self.random_state).randint(2**31)
        padded = padded_length(len(X))
        support = Batch(pad(X, padded), pad(y, padded), jnp.arange(padded) < len(X))
        keys = jax.random.split(jax.random.key(seed), self.n_functions)
        self.parameters_ = np.asarray(sample_parameters(leo, support, keys))
        if not np.isfinite(self.parameters_).all():
            raise BadInput(
                "the adapted networks are not finite: are the points of the kind that the model was trained for?"
            )
        self._warn_outside(x=X, y=y)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        """The mean of the sampled functions at each x; with `return_std` also their standard deviation.

        This is the uncertainty about the function; it does not include the noise of an observation.
        """
        functions = self._evaluate(X)  # (function, example, target)
        mean = self._shape(functions.mean(0))
        return (mean, self._shape(functions.std(0))) if return_std else mean

    def sample_y(self, X: Any, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0) -> np.ndarray:  # noqa: N803
        """Values of randomly chosen functions of the fit: (example, sample), or (example, target, sample).

        Each sample is one function at all x, drawn without replacement if there are at least `n_samples` functions.
        """
        functions = self._evaluate(X)
        if n_samples < 1:
            raise BadInput(f"n_samples must be at least 1, not {n_samples}")
        again = n_samples > len(functions)
        picks = check_random_state(random_state).choice(len(functions), n_samples, replace=again)
        return np.moveaxis(np.stack([self._shape(one) for one in functions[picks]]), 0, -1)

    def _evaluate(self, X: Any) -> np.ndarray:  # noqa: N803
        check_is_fitted(self)
        leo = resolve_regressor(self.model)
        X = validate_data(self, X, dtype=np.float32, reset=False)  # noqa: N806
        self._check_width(X, leo.network.inputs)
        self._warn_outside(x=X)
        padded = padded_length(len(X))
        return np.asarray(predict_many(leo, jnp.asarray(self.parameters_), pad(X, padded)))[:, : len(X)]

    def _check_width(self, X: np.ndarray, inputs: tuple[int, ...]) -> None:  # noqa: N803
        if X.shape[1:] != inputs:
            raise BadInput(f"X has {X.shape[1]} features; the model was trained for {inputs[0]}")

    def _warn_outside(self, **found: np.ndarray) -> None:
        """Warn if there are numbers such as the model has not seen in meta-training."""
        known = {} if isinstance(self.model, LEO) else trained_ranges(Path(self.model or DEFAULT))
        for name, (least, most) in known.items():
            values = found.get(name)
            if values is not None and (values.min() < least or values.max() > most):
                warnings.warn(
                    f"{name} goes from {values.min():g} to {values.max():g}, and the model was trained on {name} from "
                    f"{least:g} to {most:g}: beyond that its functions mean nothing; scale {name} to that range",
                    stacklevel=3,
                )

    def _shape(self, values: np.ndarray) -> np.ndarray:
        """Values in the format of y in `fit`: one number per example, or a row."""
        return values[:, 0] if self.targets_ndim_ == 1 else values


def resolve_regressor(model: str | Path | LEO | None) -> LEO:
    if not isinstance(model, str | Path | LEO | None):
        raise BadInput(f"model must be a LEO, a path or a name, not {type(model).__name__}")
    learner: Learner = model if isinstance(model, LEO) else load_regressor(Path(model or DEFAULT)).learner
    if not isinstance(learner, LEO):
        raise BadInput(f"LEORegressor samples functions of a LEO; the model is {type(learner).__name__}")
    if learner.network.targets is None or learner.network.classifies:
        raise BadInput("the model classifies; LEORegressor needs one that was trained on real targets")
    if len(learner.network.inputs) != 1 or len(learner.network.targets) != 1:
        raise BadInput("LEORegressor needs a network from one row of numbers to another")
    return learner


def load_regressor(model: Path) -> TrainedModel:
    """The model of this name or path; of a run with several seeds, the first."""
    path = model_paths(model)[0]
    return load_cached(path, path.stat().st_mtime_ns)


def trained_ranges(model: Path) -> dict[str, tuple[float, float]]:
    """The ranges of x and y in the tasks that a model was trained on, as far as they are known."""
    known = load_regressor(model).header.get("config", {}).get("data") in PROBLEMS
    return {"x": DOMAIN, "y": TARGETS} if known else {}


@jax.jit
def sample_parameters(leo: LEO, support: Batch, keys: PRNGKeyArray) -> Float[Array, "function code size"]:
    def one(key: PRNGKeyArray) -> Float[Array, "code size"]:
        head = leo.adapt(support, None, key).head
        assert isinstance(head, GeneratedHead)
        return head.parameters

    return jax.lax.map(one, keys, batch_size=100)


@jax.jit
def predict_many(
    leo: LEO, parameters: Float[Array, "function code size"], x: Float[Array, "example width"]
) -> Float[Array, "function example target"]:
    return jax.vmap(lambda one: jax.vmap(leo.network.head(one))(x))(parameters)
