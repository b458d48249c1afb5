"""A model adapted to labelled examples: what `LEOClassifier`, `metaleo adapt` and the server have in common."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from metaleo.calibration import temperature_for
from metaleo.checkpoint import Model, load_model
from metaleo.config import UNTRAINED, Structure
from metaleo.data.rows import normalise
from metaleo.engines import Engine, choose
from metaleo.errors import BadInput
from metaleo.learners.learner import Learner
from metaleo.model.heads import Head
from metaleo.runs import model_paths
from metaleo.tasks.task import Batch
from metaleo.trees import load_tree, read_header, save_tree

Labels = Sequence[Hashable] | np.ndarray
Support = tuple[Any, Any, Any]
"""Inputs, targets and mask, as in `Batch`, but as they come."""
LEAST_ROWS = 8
LARGEST = 1e15
"""Numbers of a row; the squares of larger ones leave single precision."""
MOST_PRODUCTS = 5e7
"""Classes times the square of examples that our logistic regression takes; beyond, it takes minutes and gigabytes."""
AT_ONCE = 1024
"""Queries per compiled call."""


@dataclasses.dataclass(frozen=True, eq=False)
class Adapted:
    """A classifier for classes of one's own."""

    classes: tuple[Any, ...]
    head: Head
    temperature: float
    """What logits are divided by (see `calibration`)."""
    structure: Structure
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What else is known of it, in JSON: its model and its examples."""

    def logits(self, rows: Float[np.ndarray, "query dim"]) -> Float[np.ndarray, "query way"]:
        """Divided by the temperature: their softmax is `probabilities`. Rows are as they come."""
        check_rows(rows, self.structure)
        found = [np.zeros((0, len(self.classes)))]
        for start in range(0, len(rows), AT_ONCE):
            some = rows[start : start + AT_ONCE]
            inputs = as_inputs(pad(some, padded_length(len(some))), self.structure)
            found.append(np.asarray(apply_head(self.head, inputs))[: len(some)])
        return np.concatenate(found) / self.temperature

    def probabilities(self, rows: Float[np.ndarray, "query dim"]) -> Float[np.ndarray, "query way"]:
        """Of each class, calibrated."""
        return softmax(self.logits(rows))

    def save(self, path: Path) -> None:
        """A task file: all that predictions need, and nothing of the model besides."""
        header = {"kind": "task", "classes": list(self.classes), "temperature": self.temperature}
        save_tree(path, self.head, {**header, "structure": vars(self.structure), "about": self.about})


def predict(task: Adapted, rows: Float[np.ndarray, "query dim"], unsure_below: float) -> list[dict[str, Any]]:
    """For each row its class, how probable it is, whether that is too little to be sure, and all probabilities."""
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


def load_task(path: Path) -> Adapted:
    """What `save` has written."""
    header = read_header(path)
    if header.get("kind") != "task":
        hint = "; `metaleo adapt` makes one of it" if header.get("kind") == "model" else ""
        raise BadInput(f"{path} is not a task file{hint}")
    try:
        structure, classes = Structure.from_json(header["structure"]), tuple(header["classes"])
        temperature, about = float(header["temperature"]), dict(header["about"])
        like = blank_head(structure.blank(), structure, len(classes), int(about["rows"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is a damaged task file ({error})") from error
    return Adapted(classes, load_tree(path, like), temperature, structure, about)


def blank_head(learner: Learner, structure: Structure, way: int, rows: int) -> Head:
    """The head that adapting to so many rows gives, with shapes for its numbers."""
    inputs, targets = (jax.ShapeDtypeStruct((rows, width), jnp.float32) for width in (structure.dim, way))
    mask = jax.ShapeDtypeStruct((rows,), bool)
    return jax.eval_shape(lambda learner, *parts: learner.adapt(Batch(*parts)).head, learner, inputs, targets, mask)


def find_model(model: str | Path, dim: int | None = None) -> Model:
    """A model in this package by its name, that of a run folder (its first seed's) or of a file; or a learner that
    needs no training by its name, for rows of `dim` numbers."""
    if str(model) in UNTRAINED:
        if dim is None:
            raise BadInput(f"{model} is for rows of any length, but of which one is not known yet")
        structure = Structure(learner=str(model), dim=dim)
        return Model(structure.init(jax.random.key(0)), structure, {"kind": "model"})
    path = model_paths(Path(model))[0]
    found = load_cached(path, path.stat().st_mtime_ns)
    if found.structure.noise is not None:
        raise BadInput(f"{model} predicts numbers; a model of classes is needed")
    return found


@functools.lru_cache(maxsize=8)
def load_cached(path: Path, _modified: int) -> Model:
    return load_model(path)


def adapt(model: Model, rows: Float[np.ndarray, "example dim"], labels: Labels) -> Adapted:
    """The model, adapted to these examples; rows are as they come, labels of any kind."""
    return adapt_many(model, [(rows, labels)])[0]


def adapt_many(model: Model, tasks: Sequence[tuple[Float[np.ndarray, "_ dim"], Labels]]) -> list[Adapted]:
    """The model, adapted to each of several sets of examples; those of one shape side by side."""
    named = [number_classes(labels, len(rows)) for rows, labels in tasks]
    shapes: dict[tuple[int, int], list[int]] = {}
    sizes = Counter((len(classes), len(rows)) for (classes, _), (rows, _) in zip(named, tasks, strict=True))
    for index, ((classes, _), (rows, _)) in enumerate(zip(named, tasks, strict=True)):
        check_rows(rows, model.structure)
        check_way(len(classes), model.structure, len(rows))
        often = sizes[len(classes), len(rows)] >= OFTEN
        shapes.setdefault((len(classes), len(rows) if often else padded_length(len(rows))), []).append(index)
    engine = choose(model.learner)
    started = []
    for (way, length), indices in shapes.items():
        at_once = max(1, min(SIDE_BY_SIDE, PAIRS // length**2))
        for first in range(0, len(indices), at_once):
            some = indices[first : first + at_once]
            filled = some + some[:1] * ((1 << (len(some) - 1).bit_length()) - len(some))  # few numbers to compile
            supports = [make_support(tasks[i][0], named[i][1], way, length) for i in filled]
            stacked = tuple(map(np.stack, zip(*supports, strict=True)))
            heads = adapt_heads(model.learner, stacked, model.structure.normalised, engine)
            started.append((some, heads, length))  # JAX computes while the next are made ready
    found: dict[int, Adapted] = {}
    for some, heads, length in started:
        for index, head in zip(some, unstack(heads), strict=False):
            classes, numbers = named[index]
            found[index] = settle(model, classes, numbers, head, length)
    return [found[index] for index in range(len(tasks))]


SIDE_BY_SIDE, PAIRS = 64, 2**14
"""Tasks that are adapted to at once, and pairs of their examples: as many as caches hold."""
OFTEN = 32
"""Tasks of one size that are worth a program of their own; others are filled up to a size that many share."""


def unstack(heads: Head) -> list[Head]:
    """Each head by itself, in the memory of the host."""
    leaves, structure = jax.tree.flatten(heads)
    return [structure.unflatten(each) for each in zip(*map(np.asarray, leaves), strict=True)]


def sample_heads(
    model: Model, rows: Float[np.ndarray, "example dim"], labels: Labels, keys: Key[Array, " sample"]
) -> list[Adapted]:
    """Classifiers drawn from those that a stochastic learner holds possible, each adapted by itself."""
    classes, numbers = number_classes(labels, len(rows))
    support = make_support(rows, numbers, len(classes), padded_length(len(rows)))
    heads = draw_heads(model.learner, support, model.structure.normalised, keys)
    return [settle(model, classes, numbers, head, padded_length(len(rows))) for head in unstack(heads)]


def settle(
    model: Model, classes: tuple[Any, ...], numbers: Int[np.ndarray, " example"], head: Head, length: int
) -> Adapted:
    """The head with its classes and its temperature; refused if adaptation went astray."""
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(head)):
        raise BadInput("the adapted classifier is not finite: are these rows of the kind the model was trained on?")
    counts = np.bincount(numbers, minlength=len(classes))
    about = {
        "learner": model.structure.learner,
        "examples": counts.tolist(),
        "rows": length,
        "calibrated": bool(model.header.get("temperatures")),
    }
    return Adapted(classes, head, temperature_for(model.header, counts.mean()), model.structure, about)


def number_classes(labels: Labels, rows: int) -> tuple[tuple[Any, ...], Int[np.ndarray, " example"]]:
    """The classes in order, and each example's place among them."""
    if len(labels) != rows:
        raise BadInput(f"{rows} examples need as many labels, not {len(labels)}")
    if not isinstance(labels, np.ndarray) and any(isinstance(label, str) and "\0" in label for label in labels):
        raise BadInput("a label holds a NUL character")  # which NumPy would cut off, and so join two classes
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
    """Some learners keep something for each class, and are good for one number of them; one grows fast with both."""
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
    """The examples, padded so that few lengths are ever compiled; on the host, where that is quick."""
    inputs, targets = np.zeros((length, rows.shape[1]), np.float32), np.zeros((length, way), np.float32)
    inputs[: len(rows)] = rows
    targets[np.arange(len(rows)), numbers] = 1
    return inputs, targets, np.arange(length) < len(rows)


def as_inputs(rows: Float[Array, "example dim"], structure: Structure) -> Float[Array, "example dim"]:
    return normalise(rows) if structure.normalised else rows


def padded_length(count: int) -> int:
    """The next power of two."""
    return max(LEAST_ROWS, 1 << (count - 1).bit_length())


def pad(rows: Float[np.ndarray, "example width"], length: int) -> Float[Array, "length width"]:
    return jnp.asarray(np.pad(rows, ((0, length - len(rows)), (0, 0))), jnp.float32)


@functools.partial(jax.jit, static_argnames=("normalised", "engine"))
def adapt_heads(learner: Learner, supports: Support, normalised: bool, engine: Engine) -> Head:
    return engine.adapt(learner, jax.vmap(lambda *support: as_batch(support, normalised))(*supports))


def as_batch(support: Support, normalised: bool) -> Batch:
    inputs, targets, mask = support
    return Batch(normalise(inputs) if normalised else inputs, targets, mask)


@functools.partial(jax.jit, static_argnames="normalised")
def draw_heads(learner: Learner, support: Support, normalised: bool, keys: Key[Array, " sample"]) -> Head:
    batch = as_batch(support, normalised)

    def one(key: PRNGKeyArray) -> Head:
        return learner.adapt(batch, None, key).head

    return jax.lax.map(one, keys, batch_size=100)


@jax.jit
def apply_head(head: Head, inputs: Float[Array, "query dim"]) -> Float[Array, "query way"]:
    return jax.vmap(head)(inputs)
