"""A classifier from a few labelled examples: a trained model, adapted to them.

`metaleo adapt` and the server use `AdaptedClassifier`; `LEOClassifier` is the scikit-learn estimator around it.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from metaleo._io.files import damaged, load_tree, save_tree, stored_names
from metaleo.checkpoints import TrainedModel, find_model, read_task_header
from metaleo.engines import Engine, choose_engine
from metaleo.errors import BadInput
from metaleo.learners.base import Learner
from metaleo.learners.linear import LogisticRegression
from metaleo.learners.registry import Structure
from metaleo.nn.heads import Head, PreparedHead
from metaleo.tasks.preparation import Preparation
from metaleo.tasks.task import Batch, normalise

Labels = Sequence[Hashable] | np.ndarray
Support = tuple[Any, Any, Any]
"""Inputs, targets and mask, as in `Batch`, but before normalisation."""
LEAST_ROWS = 8
LARGEST = 1e15
"""Maximum absolute value in a row; the squares of much larger numbers overflow single precision."""
MOST_PRODUCTS = 5e7
"""Maximum of classes × examples² for `LogisticRegression`; beyond it, fitting takes minutes and gigabytes."""
NO_EXAMPLES = -1e9
"""Logit of a class that has no examples yet: its probability is zero."""
AT_ONCE = 1024
"""Queries per compiled call."""


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedClassifier:
    """A classifier adapted to the user's classes."""

    classes: tuple[Any, ...]
    head: Head
    temperature: float
    """Divisor of the logits (see `evaluation.calibration`)."""
    structure: Structure
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further facts about its model and its examples, in JSON."""

    def logits(self, rows: Float[np.ndarray, "query dim"]) -> Float[np.ndarray, "query way"]:
        """Logits divided by the temperature; their softmax is `probabilities`. Rows need no normalisation."""
        check_rows(rows, self.structure)
        found = [np.zeros((0, len(self.classes)))]
        for start in range(0, len(rows), AT_ONCE):
            some = rows[start : start + AT_ONCE]
            inputs = as_inputs(pad(some, padded_length(len(some))), self.structure)
            found.append(np.asarray(apply_head(self.head, inputs))[: len(some)])
        logits = np.concatenate(found) / self.temperature
        if not np.isfinite(logits).all():
            raise BadInput("the classifier's answers are not finite: its weights, or these rows, are too large")
        return logits

    def probabilities(self, rows: Float[np.ndarray, "query dim"]) -> Float[np.ndarray, "query way"]:
        """The calibrated probability of each class."""
        return softmax(self.logits(rows))

    def save(self, path: Path) -> None:
        """Write a task file: all that predictions need, without the rest of the model."""
        header = {"kind": "task", "classes": list(self.classes), "temperature": self.temperature}
        save_tree(path, self.head, {**header, "structure": vars(self.structure), "about": self.about})


def predict(task: AdaptedClassifier, rows: Float[np.ndarray, "query dim"], unsure_below: float) -> list[dict[str, Any]]:
    """For each row: the class, its probability, whether that is below `unsure_below`, and all probabilities."""
    found = []
    for own in task.probabilities(rows):
        best = int(own.argmax())
        each = {str(name): round(float(one), 6) for name, one in zip(task.classes, own, strict=True)}
        unsure = bool(own[best] < unsure_below)
        found.append({"class": task.classes[best], "probability": round(float(own[best]), 6), "unsure": unsure,
                      "probabilities": each})  # fmt: skip
    return found


def softmax(logits: Float[np.ndarray, "*batch way"]) -> Float[np.ndarray, "*batch way"]:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def load_task(path: Path) -> AdaptedClassifier:
    """Load a file that `AdaptedClassifier.save` wrote."""
    header, structure = read_task_header(path)
    classes, about = tuple(header["classes"]), header["about"]
    with damaged(path, "task file"):
        check_way(len(classes), structure)
        learner = structure.blank()
        if isinstance(learner, LogisticRegression) and "bias" not in stored_names(path):
            learner = LogisticRegression(intercept=False)  # from a version that had no intercept
        like = blank_head(learner, structure, len(classes), about["rows"])
    head = load_tree(path, like)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(head)):
        raise BadInput(f"{path} is a damaged task file (it holds NaN or Inf)")
    return AdaptedClassifier(classes, head, header["temperature"], structure, about)


def blank_head(learner: Learner, structure: Structure, way: int, rows: int) -> Head:
    """The head that results from adapting to `rows` rows, with shapes in place of arrays."""
    inputs, targets = (jax.ShapeDtypeStruct((rows, width), jnp.float32) for width in (structure.dim, way))
    mask = jax.ShapeDtypeStruct((rows,), bool)

    def adapted(learner: Learner, *parts: Array) -> Head:
        return with_preparation(learner, learner.adapt(Batch(*parts)).head)

    return jax.eval_shape(adapted, learner, inputs, targets, mask)


def with_preparation(learner: Learner, head: Head) -> Head:
    """The head on rows of length one, whatever else the learner's rows are prepared by."""
    preparation = learner.preparation
    return PreparedHead(preparation, head) if isinstance(preparation, Preparation) else head


def adapt(model: TrainedModel, rows: Float[np.ndarray, "example dim"], labels: Labels) -> AdaptedClassifier:
    """Adapt the model to these examples; rows need no normalisation, and labels may be of any type."""
    return adapt_many(model, [(rows, labels)])[0]


def adapt_many(
    model: TrainedModel, tasks: Sequence[tuple[Float[np.ndarray, "_ dim"], Labels]]
) -> list[AdaptedClassifier]:
    """Adapt the model to each of several sets of examples; sets of the same shape are adapted together."""
    named = [number_classes(labels, len(rows)) for rows, labels in tasks]
    shapes: dict[tuple[int, int], list[int]] = {}
    sizes = Counter((len(classes), len(rows)) for (classes, _), (rows, _) in zip(named, tasks, strict=True))
    for index, ((classes, _), (rows, _)) in enumerate(zip(named, tasks, strict=True)):
        check_rows(rows, model.structure)
        check_way(len(classes), model.structure, len(rows))
        often = sizes[len(classes), len(rows)] >= OFTEN
        shapes.setdefault((len(classes), len(rows) if often else padded_length(len(rows))), []).append(index)
    engine = choose_engine(model.learner)
    started = []
    for (way, length), indices in shapes.items():
        most = max(1, min(SIDE_BY_SIDE, PAIRS // length**2))
        at_once = 1 << (most.bit_length() - 1)  # a power of two, so that batches need no filling
        for first in range(0, len(indices), at_once):
            some = indices[first : first + at_once]
            filled = some + some[:1] * ((1 << (len(some) - 1).bit_length()) - len(some))  # few sizes to compile
            supports = [make_support(tasks[i][0], named[i][1], way, length) for i in filled]
            stacked = tuple(map(np.stack, zip(*supports, strict=True)))
            heads = adapt_heads(model.learner, stacked, model.structure.normalised, engine)
            started.append((some, heads, length))  # JAX computes while the next are prepared
    found: dict[int, AdaptedClassifier] = {}
    for some, heads, length in started:
        for index, head in zip(some, unstack(heads), strict=False):
            classes, numbers = named[index]
            found[index] = make_adapted(model, classes, numbers, head, length)
    return [found[index] for index in range(len(tasks))]


SIDE_BY_SIDE, PAIRS = 64, 2**14
"""Maximum tasks adapted at once, and pairs of their examples: as many as fit in the CPU's caches."""
OFTEN = 32
"""From this many tasks on, a size gets its own compiled program; other tasks are padded to a shared size."""


def unstack(heads: Head) -> list[Head]:
    """The individual heads, in host memory."""
    leaves, structure = jax.tree.flatten(heads)
    return [structure.unflatten(each) for each in zip(*map(np.asarray, leaves), strict=True)]


def sample_heads(
    model: TrainedModel, rows: Float[np.ndarray, "example dim"], labels: Labels, keys: Key[Array, " sample"]
) -> list[AdaptedClassifier]:
    """Classifiers sampled from a stochastic learner, each adapted separately."""
    classes, numbers = number_classes(labels, len(rows))
    support = make_support(rows, numbers, len(classes), padded_length(len(rows)))
    heads = draw_heads(model.learner, support, model.structure.normalised, keys)
    return [make_adapted(model, classes, numbers, head, padded_length(len(rows))) for head in unstack(heads)]


def make_adapted(
    model: TrainedModel, classes: tuple[Any, ...], numbers: Int[np.ndarray, " example"], head: Head, length: int
) -> AdaptedClassifier:
    """The head with its classes and temperature; raises `BadInput` if its weights are not finite."""
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(head)):
        raise BadInput("the adapted classifier is not finite: are these rows of the kind the model was trained on?")
    counts = np.bincount(numbers, minlength=len(classes))
    head = with_preparation(model.learner, head)
    about = {
        "learner": model.structure.learner,
        "examples": counts.tolist(),
        "rows": length,
        "calibrated": bool(model.header.get("temperatures")),
    }
    return AdaptedClassifier(classes, head, model.temperature(counts.mean()), model.structure, about)


def number_classes(labels: Labels, rows: int) -> tuple[tuple[Any, ...], Int[np.ndarray, " example"]]:
    """The sorted classes, and the index of each example's class."""
    if len(labels) != rows:
        raise BadInput(f"{rows} examples need as many labels, not {len(labels)}")
    if not isinstance(labels, np.ndarray) and any(isinstance(label, str) and "\0" in label for label in labels):
        raise BadInput("a label holds a NUL character")  # NumPy would cut it off, and so merge two classes
    classes, numbers = np.unique(np.asarray(labels), return_inverse=True)
    if len(classes) < 2:
        raise BadInput(f"a classifier needs examples of at least 2 classes; there is {len(classes)} class")
    return tuple(classes.tolist()), numbers.reshape(-1)


def check_rows(rows: Float[np.ndarray, "example dim"], structure: Structure) -> None:
    if rows.shape[1] != structure.dim:
        raise BadInput(f"rows have {rows.shape[1]} numbers; the model was trained on rows of {structure.dim}")
    bad = np.flatnonzero(~np.isfinite(rows).all(1))
    if len(bad):
        raise BadInput(f"NaN or Inf in {len(bad)} of {len(rows)} rows, the first is row {bad[0]}")
    if len(rows) and np.abs(rows).max() > LARGEST:
        raise BadInput(f"rows hold numbers up to {np.abs(rows).max():.1g}; they may be {LARGEST:.0g} at most")


def check_way(way: int, structure: Structure, rows: int = 0) -> None:
    """Raise `BadInput` if the learner does not support this number of classes or, with it, of examples."""
    if structure.learner == "logistic-regression" and way * rows**2 > MOST_PRODUCTS:
        raise BadInput(
            f"{rows:,} examples of {way} classes are too many for our logistic-regression, which is made for few; "
            "scikit-learn's LogisticRegression takes any number"
        )
    fixed = structure.codes == "task" or structure.learner in ("maml", "fomaml", "meta-sgd", "reptile")
    if fixed and way != structure.way:
        raise BadInput(f"this {structure.learner} was trained for {structure.way} classes, and there are {way}")


def make_support(
    rows: Float[np.ndarray, "example dim"], numbers: Int[np.ndarray, " example"], way: int, length: int
) -> Support:
    """The examples, padded so that only few lengths are compiled; prepared on the host, where this is fast."""
    inputs, targets = np.zeros((length, rows.shape[1]), np.float32), np.zeros((length, way), np.float32)
    inputs[: len(rows)] = rows
    targets[np.arange(len(rows)), numbers] = 1
    return inputs, targets, np.arange(length) < len(rows)


def as_inputs(rows: Float[Array, "example dim"], structure: Structure) -> Float[Array, "example dim"]:
    return normalise(rows) if structure.normalised else rows


def padded_length(count: int) -> int:
    """The next power of two, at least `LEAST_ROWS`."""
    return max(LEAST_ROWS, 1 << (count - 1).bit_length())


def pad(rows: Float[np.ndarray, "example width"], length: int) -> Float[Array, "length width"]:
    return jnp.asarray(np.pad(rows, ((0, length - len(rows)), (0, 0))), jnp.float32)


@functools.partial(jax.jit, static_argnames=("normalised", "engine"))
def adapt_heads(learner: Learner, supports: Support, normalised: bool, engine: Engine) -> Head:
    return engine.adapt(learner, jax.vmap(lambda *support: as_batch(learner, support, normalised))(*supports))


def as_batch(learner: Learner, support: Support, normalised: bool) -> Batch:
    inputs, targets, mask = support
    return Batch(learner.preparation(inputs) if normalised else inputs, targets, mask)


@functools.partial(jax.jit, static_argnames="normalised")
def draw_heads(learner: Learner, support: Support, normalised: bool, keys: Key[Array, " sample"]) -> Head:
    batch = as_batch(learner, support, normalised)

    def one(key: PRNGKeyArray) -> Head:
        return learner.adapt(batch, None, key).head

    return jax.lax.map(one, keys, batch_size=100)


@jax.jit
def apply_head(head: Head, inputs: Float[Array, "query dim"]) -> Float[Array, "query way"]:
    return jax.vmap(head)(inputs)


class LEOClassifier(ClassifierMixin, BaseEstimator):
    """A classifier from a few labelled examples of each class: `fit` adapts a meta-trained model to them.

    There may be any number of classes from 2 on, and any number of examples of each. Nothing is trained from scratch:
    LEO encodes the examples to a code for each class, improves the codes by gradient steps and decodes them to a linear
    classifier. Rows are scaled to length one, and must have as many numbers, as in meta-training.

    Args:
        model: The name of a model in this package, a model file or run folder, a meta-trained `Learner` of your own, or
            one of the learners that need no training and take rows of any length: "nearest-centroid", "cl2n" and
            "logistic-regression".

    Examples:
        >>> from metaleo import LEOClassifier, load_data
        >>> test = load_data("sample").subset("test")
        >>> rows = test.read(test.rows[:200])  # 100 nematodes, 100 king crabs
        >>> classifier = LEOClassifier().fit(rows[[0, 1, 2, 100, 101]], ["worm", "worm", "worm", "crab", "crab"])
        >>> classifier.predict_proba(rows[150:160]).shape
        (10, 2)
        >>> classifier = classifier.partial_fit(rows[102:105], ["crab", "crab", "crab"])  # three more
    """

    @no_type_check  # as in scikit-learn, `fit` validates the parameters
    def __init__(self, model: str | Path | Learner = "miniimagenet"):
        self.model = model

    def fit(self, X: Any, y: Any) -> "LEOClassifier":  # noqa: N803
        """Adapt to these examples only; earlier ones are discarded."""
        X, y = self._validate(X, y)  # noqa: N806
        vars(self).pop("all_classes_", None)
        return self._remember(X, y, adapt(self._resolve(X), X, y))

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "LEOClassifier":  # noqa: N803
        """Adapt to these examples and to all earlier ones; there may be new classes.

        `classes` in the first call, as of other estimators, names all classes to come: then there may be examples of
        one class only, and a class without any has probability 0. Later calls may repeat it.
        """
        first = not hasattr(self, "X_")
        X, y = self._validate(X, y, reset=first)  # noqa: N806
        known = None if classes is None else np.unique(classes)
        if first:
            vars(self).pop("all_classes_", None)
            if known is not None:
                self.all_classes_ = known
        else:
            if known is not None and not np.array_equal(known, getattr(self, "all_classes_", known)):
                raise BadInput("`classes=` is not the same as in the first call of partial_fit")
            X, y = np.concatenate([self.X_, X]), np.concatenate([self.y_, y])  # noqa: N806
        seen = np.unique(y)
        if hasattr(self, "all_classes_"):
            if strange := set(seen.tolist()) - set(self.all_classes_.tolist()):
                raise BadInput(f"label {min(strange)!r} is not among the `classes=` of the first call of partial_fit")
            if len(seen) == 1:
                return self._remember(X, y, None)
        return self._remember(X, y, adapt(self._resolve(X), X, y))

    def fit_many(self, tasks: Sequence[tuple[Any, Any]]) -> "list[LEOClassifier]":
        """One classifier per pair of X and y, as from separate calls of `fit`, but adapted together."""
        settings = self.get_params(deep=False)
        fresh = [type(self)(**settings) for _ in tasks]
        checked = check_together(tasks)
        if checked is None:  # check one by one, to report what is wrong with which task
            checked = [one._validate(*task) for one, task in zip(fresh, tasks, strict=True)]
        if not checked:
            return []
        found = adapt_many(self._resolve(checked[0][0]), checked)
        return [one._remember(X, y, own) for one, (X, y), own in zip(fresh, checked, found, strict=True)]

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """The most probable class of each row."""
        best = self._logits(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Float[np.ndarray, "query way"]:  # noqa: N803
        """The probability of each class, calibrated by temperatures learned on meta-validation tasks.

        Those of learners that need no training were learned on the features and sentences in this package.
        """
        return softmax(self._logits(X))

    def decision_function(self, X: Any) -> Float[np.ndarray, "query *way"]:  # noqa: N803
        """Logits, whose softmax is `predict_proba`; for two classes, the difference of the two logits."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def sample_classifiers(self, n: int, random_state: int | np.random.RandomState | None = 0) -> "list[LEOClassifier]":
        """Sample `n` classifiers: each has its own codes and weights, drawn as in meta-training, and is adapted
        separately. For a learner that is not stochastic they are all the same."""
        check_is_fitted(self)
        if not isinstance(n, int | np.integer) or n < 1:
            raise BadInput(f"n must be a whole number of at least 1, not {n}")
        keys = jax.random.split(jax.random.key(check_random_state(random_state).randint(2**31)), n)
        found = sample_heads(self._resolve(self.X_), self.X_, self.y_, keys)
        samples = [self._fresh() for _ in found]
        kept = {name: value for name, value in vars(self).items() if name in ("feature_names_in_", "all_classes_")}
        for one, own in zip(samples, found, strict=True):
            vars(one).update(kept)
            one._remember(self.X_, self.y_, own)
        return samples

    def _fresh(self) -> "LEOClassifier":
        return clone(self)  # type: ignore[return-value]

    def _resolve(self, X: np.ndarray) -> TrainedModel:  # noqa: N803
        """The model to adapt."""
        if isinstance(self.model, Learner):
            return TrainedModel(self.model, Structure(dim=X.shape[1]), {})
        if not isinstance(self.model, str | Path):
            raise BadInput(f"model must be a name, a path or a Learner, not {type(self.model).__name__}")
        return find_model(self.model, X.shape[1])

    def _validate(self, X: Any, y: Any, reset: bool = True) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
        X, y = validate_data(self, X, y, dtype=np.float32, reset=reset)  # noqa: N806
        check_classification_targets(y)
        return X, y

    def _remember(self, X: np.ndarray, y: np.ndarray, found: AdaptedClassifier | None) -> "LEOClassifier":  # noqa: N803
        self.X_, self.y_, self.adapted_ = X, y, found
        self.classes_ = getattr(self, "all_classes_", np.unique(y))
        self.n_features_in_ = X.shape[1]
        return self

    def _logits(self, X: Any) -> Float[np.ndarray, "query way"]:  # noqa: N803
        check_is_fitted(self)
        X = np.asarray(validate_data(self, X, dtype=np.float32, reset=False))  # noqa: N806
        seen = np.isin(self.classes_, self.y_)
        if seen.all() and self.adapted_ is not None:
            return self.adapted_.logits(X)
        logits = np.full((len(X), len(self.classes_)), NO_EXAMPLES)
        logits[:, seen] = 0 if self.adapted_ is None else self.adapted_.logits(X)
        return logits


def check_together(tasks: Sequence[tuple[Any, Any]]) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """The tasks as `LEOClassifier._validate` returns them, or None unless all are valid arrays of one width."""
    pairs = [(X, np.asarray(y)) for X, y in tasks]
    shapes = {(X.ndim, X.shape[1:], X.dtype) for X, _ in pairs if isinstance(X, np.ndarray)}
    alike = len(shapes) == 1 and all(isinstance(X, np.ndarray) and y.shape == X.shape[:1] for X, y in pairs)
    if not alike or pairs[0][0].ndim != 2 or pairs[0][0].dtype.kind not in "fiu":
        return None
    if len({y.dtype.kind for _, y in pairs}) > 1 or pairs[0][1].dtype.kind not in "iuU" or not min(map(len, pairs)):
        return None
    found = [(np.asarray(X, np.float32), y) for X, y in pairs]
    return found if all(len(X) and np.isfinite(X).all() for X, _ in found) else None
