"""Meta-trained models as scikit-learn estimators: `fit` adapts them to the few examples at hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from metaleo import adapted
from metaleo.adapted import Adapted, load_cached, pad, padded_length
from metaleo.checkpoint import Model
from metaleo.config import Structure
from metaleo.errors import BadInput
from metaleo.learners.learner import Learner
from metaleo.learners.leo import LEO
from metaleo.model.network import GeneratedHead
from metaleo.runs import model_paths
from metaleo.tasks.task import Batch


class LEOClassifier(ClassifierMixin, BaseEstimator):
    """A classifier from a few labelled examples of each class: `fit` adapts a meta-trained model to them.

    Any number of classes from 2 on, any number of examples of each. Nothing is trained from scratch: LEO encodes the
    examples to a code for each class, improves the codes by gradient steps and decodes them to a linear classifier.

    model: the name of a model in this package, a model file or run folder, a meta-trained `Learner` of your own, or one
        of the learners that need no training and take rows of any length: "nearest-centroid", "cl2n" and
        "logistic-regression".

    Rows are scaled to length one, as in meta-training, and must have as many numbers as there.

    >>> from metaleo.data import load_sample
    >>> test = load_sample().subset("test")
    >>> rows = test.read(test.rows[:200])  # 100 nematodes, 100 king crabs
    >>> classifier = LEOClassifier().fit(rows[[0, 1, 2, 100, 101]], ["worm", "worm", "worm", "crab", "crab"])
    >>> named, probabilities = classifier.predict(rows[50:60]), classifier.predict_proba(rows[150:160])
    >>> classifier = classifier.partial_fit(rows[102:105], ["crab", "crab", "crab"])  # three more
    """

    def __init__(self, model: str | Path | Learner = "miniimagenet"):
        self.model = model

    def fit(self, X: Any, y: Any) -> "LEOClassifier":  # noqa: N803
        """Adapt to these examples, and to nothing from before."""
        X, y = self.examples(X, y)  # noqa: N806
        return self.settle(X, y, adapted.adapt(self.resolved(X), X, y))

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "LEOClassifier":  # noqa: N803
        """Adapt to these examples and to all from before; a class may be new.

        `classes` is what other estimators need to know beforehand, and here is not needed.
        """
        del classes
        if not hasattr(self, "X_"):
            return self.fit(X, y)
        X, y = self.examples(X, y, reset=False)  # noqa: N806
        X, y = np.concatenate([self.X_, X]), np.concatenate([self.y_, y])  # noqa: N806
        return self.settle(X, y, adapted.adapt(self.resolved(X), X, y))

    def fit_many(self, tasks: Sequence[tuple[Any, Any]]) -> "list[LEOClassifier]":
        """A classifier for each pair of X and y, as many calls of `fit` would give it, but adapted side by side."""
        settings = self.get_params(deep=False)
        fresh = [type(self)(**settings) for _ in tasks]
        checked = check_together(tasks)
        if checked is None:  # or else one by one, which also says what is wrong with which
            checked = [one.examples(*task) for one, task in zip(fresh, tasks, strict=True)]
        if not checked:
            return []
        found = adapted.adapt_many(self.resolved(checked[0][0]), checked)
        return [one.settle(X, y, own) for one, (X, y), own in zip(fresh, checked, found, strict=True)]

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """The most probable class of each row."""
        best = self.logits(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Float[np.ndarray, "query way"]:  # noqa: N803
        """The probability of each class, calibrated by temperatures that were learned on meta-validation tasks.

        Learners without training have learned none, and their probabilities mean less.
        """
        return adapted.softmax(self.logits(X))

    def decision_function(self, X: Any) -> Float[np.ndarray, "query *way"]:  # noqa: N803
        """Logits, whose softmax is `predict_proba`; for two classes the difference of theirs."""
        logits = self.logits(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def sample_classifiers(self, n: int, random_state: int | np.random.RandomState | None = 0) -> "list[LEOClassifier]":
        """`n` classifiers that the model holds possible: each from codes and weights of its own, drawn as in
        meta-training and adapted by themselves. Of a learner that draws nothing, they are all the same."""
        check_is_fitted(self)
        if not isinstance(n, int | np.integer) or n < 1:
            raise BadInput(f"n must be a whole number of at least 1, not {n}")
        keys = jax.random.split(jax.random.key(check_random_state(random_state).randint(2**31)), n)
        found = adapted.sample_heads(self.resolved(self.X_), self.X_, self.y_, keys)
        samples = [self.fresh().settle(self.X_, self.y_, own) for own in found]
        for one in samples:
            vars(one).update({name: value for name, value in vars(self).items() if name == "feature_names_in_"})
        return samples

    def fresh(self) -> "LEOClassifier":
        return clone(self)  # type: ignore[return-value]

    def resolved(self, X: np.ndarray) -> Model:  # noqa: N803
        """The model to adapt."""
        if isinstance(self.model, Learner):
            return Model(self.model, Structure(dim=X.shape[1]), {})
        if not isinstance(self.model, str | Path):
            raise BadInput(f"model must be a name, a path or a Learner, not {type(self.model).__name__}")
        return adapted.find_model(self.model, X.shape[1])

    def examples(self, X: Any, y: Any, reset: bool = True) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
        X, y = validate_data(self, X, y, dtype=np.float32, reset=reset)  # noqa: N806
        check_classification_targets(y)
        return X, y

    def settle(self, X: np.ndarray, y: np.ndarray, found: Adapted) -> "LEOClassifier":  # noqa: N803
        self.X_, self.y_, self.classes_, self.adapted_ = X, y, np.array(found.classes, y.dtype), found
        self.n_features_in_ = X.shape[1]
        return self

    def logits(self, X: Any) -> Float[np.ndarray, "query way"]:  # noqa: N803
        check_is_fitted(self)
        return self.adapted_.logits(np.asarray(validate_data(self, X, dtype=np.float32, reset=False)))


def check_together(tasks: Sequence[tuple[Any, Any]]) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """The tasks as `LEOClassifier.examples` checks them, if they are arrays of one width with nothing to refuse."""
    pairs = [(X, np.asarray(y)) for X, y in tasks]
    shapes = {(X.ndim, X.shape[1:], X.dtype) for X, _ in pairs if isinstance(X, np.ndarray)}
    alike = len(shapes) == 1 and all(isinstance(X, np.ndarray) and y.shape == X.shape[:1] for X, y in pairs)
    if not alike or pairs[0][0].ndim != 2 or pairs[0][0].dtype.kind not in "fiu":
        return None
    if len({y.dtype.kind for _, y in pairs}) > 1 or pairs[0][1].dtype.kind not in "iuU" or not min(map(len, pairs)):
        return None
    found = [(np.asarray(X, np.float32), y) for X, y in pairs]
    return found if all(len(X) and np.isfinite(X).all() for X, _ in found) else None


class LEORegressor(RegressorMixin, BaseEstimator):
    """A distribution over functions from a handful of points.

    `fit` samples codes from what the encoder makes of the points, adapts each by gradient steps and decodes each to a
    network: `n_functions` functions that explain the points. They are kept; `predict` is their mean and standard
    deviation, and none of them is trained any further.

    model: a model file or run folder, a LEO of your own with a network of real targets (which cannot be pickled if the
        network is your own), or without it the model of sines and lines in this package, for points with x in [-5, 5].
    n_functions: how many functions are sampled.
    random_state: of the sampling, as everywhere in scikit-learn.

    >>> regressor = LEORegressor().fit([[-4.0], [-1.5], [0.5], [2.0], [4.5]], [1.1, -2.0, -0.2, 1.7, -2.2])
    >>> mean, std = regressor.predict([[-3.0], [3.0]], return_std=True)
    >>> functions = regressor.sample_y([[-3.0], [3.0]], n_samples=5)
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
        """Adapt to the points, any number of them."""
        leo = resolve(self.model)
        inputs, targets = leo.network.inputs, leo.network.targets
        assert targets is not None  # `resolve` has seen to it
        if not isinstance(self.n_functions, int | np.integer) or self.n_functions < 1:
            raise BadInput(f"n_functions must be a whole number of at least 1, not {self.n_functions}")
        X, y = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)  # noqa: N806
        self.check_width(X, inputs)
        self.targets_ndim_ = np.ndim(y)
        y = np.asarray(y, np.float32).reshape(len(X), -1)
        if y.shape[1:] != targets:
            raise BadInput(f"y has {y.shape[1]} numbers per example; the model was trained for {targets[0]}")
        seed = check_random_state(self.random_state).randint(2**31)
        padded = padded_length(len(X))
        support = Batch(pad(X, padded), pad(y, padded), jnp.arange(padded) < len(X))
        keys = jax.random.split(jax.random.key(seed), self.n_functions)
        self.parameters_ = np.asarray(adapt_many(leo, support, keys))
        if not np.isfinite(self.parameters_).all():
            raise BadInput(
                "the adapted networks are not finite: are the points of the kind that the model was trained for?"
            )
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        """The mean of the sampled functions at each x; with `return_std` also their standard deviation.

        That is the uncertainty about the function; the noise of an observation comes on top.
        """
        functions = self.evaluate(X)  # (function, example, target)
        mean = self.shaped(functions.mean(0))
        return (mean, self.shaped(functions.std(0))) if return_std else mean

    def sample_y(self, X: Any, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0) -> np.ndarray:  # noqa: N803
        """Values of functions drawn from the kept ones: (example, sample), or (example, target, sample).

        Without replacement as far as there are enough; each sample is one function, at all x.
        """
        functions = self.evaluate(X)
        if n_samples < 1:
            raise BadInput(f"n_samples must be at least 1, not {n_samples}")
        again = n_samples > len(functions)
        picks = check_random_state(random_state).choice(len(functions), n_samples, replace=again)
        return np.moveaxis(np.stack([self.shaped(one) for one in functions[picks]]), 0, -1)

    def evaluate(self, X: Any) -> np.ndarray:  # noqa: N803
        check_is_fitted(self)
        leo = resolve(self.model)
        X = validate_data(self, X, dtype=np.float32, reset=False)  # noqa: N806
        self.check_width(X, leo.network.inputs)
        padded = padded_length(len(X))
        return np.asarray(predict_many(leo, jnp.asarray(self.parameters_), pad(X, padded)))[:, : len(X)]

    def check_width(self, X: np.ndarray, inputs: tuple[int, ...]) -> None:  # noqa: N803
        if X.shape[1:] != inputs:
            raise BadInput(f"X has {X.shape[1]} features; the model was trained for {inputs[0]}")

    def shaped(self, values: np.ndarray) -> np.ndarray:
        """As y came: one number per example, or a row."""
        return values[:, 0] if self.targets_ndim_ == 1 else values


def resolve(model: str | Path | LEO | None) -> LEO:
    if not isinstance(model, str | Path | LEO | None):
        raise BadInput(f"model must be a LEO, a path or a name, not {type(model).__name__}")
    learner: Learner = model if isinstance(model, LEO) else load_learner(Path(model or "sines-and-lines"))
    if not isinstance(learner, LEO):
        raise BadInput(f"LEORegressor samples functions of a LEO; the model is {type(learner).__name__}")
    if learner.network.targets is None or learner.network.classifies:
        raise BadInput("the model classifies; LEORegressor needs one that was trained on real targets")
    if len(learner.network.inputs) != 1 or len(learner.network.targets) != 1:
        raise BadInput("LEORegressor needs a network from one row of numbers to another")
    return learner


def load_learner(model: Path) -> Learner:
    """The first seed's, where a run has several."""
    path = model_paths(model)[0]
    return load_cached(path, path.stat().st_mtime_ns).learner


@jax.jit
def adapt_many(leo: LEO, support: Batch, keys: PRNGKeyArray) -> Float[Array, "function code size"]:
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
