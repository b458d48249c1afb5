"""Models adapted to examples of one's own: nothing but `Learner.adapt`, whatever the padding, kept in a file."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from helpers.marks import by_default
from helpers.small import DIM, close, make_model, message
from metaleo.checkpoints import load_model, save_model
from metaleo.estimators.classifier import (
    AdaptedClassifier,
    adapt,
    adapt_many,
    find_model,
    load_task,
    padded_length,
    predict,
    sample_heads,
    softmax,
)
from metaleo.learners.linear import LogisticRegression
from metaleo.learners.registry import Structure
from metaleo.nn.heads import (
    AffineHead,
    AttentionHead,
    CentredHead,
    GeneratedHead,
    LinearHead,
    QuadraticHead,
    RelationHead,
)
from metaleo.tasks.task import labelled, normalise

KINDS = {
    "leo": ({}, LinearHead),
    "prototypical": ({}, AffineHead),
    "cl2n": ({}, CentredHead),
    "matching": ({}, AttentionHead),
    "relation": ({}, RelationHead),
    "metaqda": ({}, QuadraticHead),
    "feat": ({}, AffineHead),
    "protomaml": ({}, AffineHead),
    "logistic-regression": ({}, AffineHead),
    "leo-no-finetuning": ({"network": "gru", "channels": 4, "hidden": 3}, GeneratedHead),
    "leo-generator-finetuned": ({"network": "mlp", "hidden": 3, "layers": 2}, GeneratedHead),
    "leo-generator": ({"network": "mlp", "hidden": 3, "layers": 2, "codes": "task"}, GeneratedHead),
    "meta-sgd": ({}, LinearHead),
}
"""Learners by name, what they are made of, and the kind of head that they give."""
random = np.random.default_rng(0)


def some_rows(count, seed=0):
    """Of three classes in turn, not of length one."""
    rows = 3 * np.eye(DIM)[np.arange(count) % 3] + np.random.default_rng(seed).normal(size=(count, DIM))
    return rows.astype(np.float32), [("ant", "bee", "cat")[i % 3] for i in range(count)]


def model_of(name="nearest-centroid", **changes):
    return make_model(name, **{**KINDS.get(name, ({},))[0], **changes})


@jax.jit
def adapted_head(learner, support):
    return learner.adapt(support).head


def assert_same_bits(one, other):
    assert type(one) is type(other)
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


# Nothing but `Learner.adapt`.


@pytest.mark.parametrize("name", by_default(["leo", "cl2n", "matching", "leo-generator"], KINDS))
def test_adapt_is_the_learners_own_and_survives_a_file(name, tmp_path):
    """For every kind of head, of eight rows as they are; and the file has it bit for bit."""
    model, (rows, labels) = model_of(name), some_rows(8)
    found = adapt(model, rows, labels)
    inputs = jnp.asarray(rows) if model.structure.network == "gru" else normalise(rows)
    expected = adapted_head(model.learner, labelled(inputs, np.arange(8) % 3, 3))
    assert isinstance(found.head, KINDS[name][1])
    assert close(found.head, expected)
    assert found.classes == ("ant", "bee", "cat")
    assert found.about == {"learner": name, "examples": [3, 3, 2], "rows": 8, "calibrated": False}

    dataclasses.replace(found, about={**found.about, "model": "mine"}).save(tmp_path / "task.safetensors")
    again = load_task(tmp_path / "task.safetensors")
    assert_same_bits(again.head, found.head)
    assert (again.classes, again.temperature, again.structure) == (found.classes, 1.0, model.structure)
    assert again.about == {**found.about, "model": "mine"}
    np.testing.assert_array_equal(again.logits(rows), found.logits(rows))
    np.testing.assert_allclose(found.logits(rows), jax.vmap(found.head)(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [3, 5, 11])
def test_other_numbers_of_rows_are_padded(count):
    rows, labels = some_rows(count)
    length = padded_length(count)
    inputs = normalise(np.concatenate([rows, np.zeros((length - count, DIM), np.float32)]))
    numbers = np.concatenate([np.arange(count) % 3, np.zeros(length - count, int)])
    batch = labelled(inputs, numbers, 3, jnp.arange(length) < count)
    assert close(adapt(model_of(), rows, labels).head, adapted_head(model_of().learner, batch))


def test_padded_lengths():
    counts = (1, 7, 8, 9, 16, 17, 1000, 1024, 1025)
    assert [padded_length(count) for count in counts] == [8, 8, 8, 16, 16, 32, 1024, 1024, 2048]


@pytest.mark.parametrize("name", by_default(["leo"], ["leo", "matching"]))
def test_padding_changes_nothing(name):
    rows, labels = some_rows(11)
    model = model_of(name)
    expected = adapted_head(model.learner, labelled(normalise(rows), np.arange(11) % 3, 3))
    close(adapt(model, rows, labels).logits(rows), jax.vmap(expected)(normalise(rows)), 1e-4)


def test_the_order_of_examples_changes_nothing():
    model, (rows, labels) = model_of("leo"), some_rows(8)
    order = random.permutation(8)
    close(adapt(model, rows[order], [labels[i] for i in order]).logits(rows), adapt(model, rows, labels).logits(rows))


def test_other_names_for_the_classes_permute_the_answers():
    model, (rows, labels) = model_of("leo"), some_rows(8)
    renamed = adapt(model, rows, [{"ant": 30, "bee": 10, "cat": 20}[label] for label in labels])
    assert renamed.classes == (10, 20, 30)
    close(renamed.logits(rows)[:, [2, 0, 1]], adapt(model, rows, labels).logits(rows))


def test_lengths_of_rows_do_not_matter():
    model, (rows, labels) = model_of("leo"), some_rows(8)
    close(adapt(model, 7 * rows, labels).logits(0.1 * rows), adapt(model, rows, labels).logits(rows))


def test_many_tasks_at_once_are_as_one_by_one():
    """Of different lengths and numbers of classes, more than fit side by side, in their order."""
    model = model_of()
    tasks = [some_rows(count, seed) for seed, count in enumerate((5, 12, 8, 4, 6))]
    tasks.append((tasks[0][0], ["x", "y", "x", "y", "z"]))
    tasks.append((tasks[0][0], [1, 0, 1, 0, 1]))
    for own, (rows, labels) in zip(adapt_many(model, tasks), tasks, strict=True):
        alone = adapt(model, rows, labels)
        assert (own.classes, own.about, own.temperature) == (alone.classes, alone.about, alone.temperature)
        close(own.logits(rows), alone.logits(rows))
    assert adapt_many(model, []) == []


def test_more_tasks_than_fit_side_by_side(monkeypatch):
    monkeypatch.setattr("metaleo.estimators.classifier.SIDE_BY_SIDE", 2)
    tasks = [some_rows(5, seed) for seed in range(5)]
    for own, (rows, labels) in zip(adapt_many(model_of(), tasks), tasks, strict=True):
        close(own.logits(rows), adapt(model_of(), rows, labels).logits(rows))


def test_other_counts_within_a_length_compile_nothing(count_compilations):
    model = model_of()
    adapt(model, *some_rows(16)).probabilities(some_rows(9)[0])
    with count_compilations() as compilations:
        for count in (9, 12, 15):
            adapt(model, *some_rows(count)).probabilities(some_rows(count + 1)[0])
    assert compilations == []


def test_queries_in_parts_are_as_all_at_once(monkeypatch):
    rows, labels = some_rows(20)
    found = adapt(model_of(), rows, labels)
    whole = found.logits(rows)
    monkeypatch.setattr("metaleo.estimators.classifier.AT_ONCE", 8)
    np.testing.assert_allclose(found.logits(rows), whole, rtol=1e-5)
    assert whole.shape == (20, 3)


def test_samples_are_drawn_with_their_keys():
    rows, labels = some_rows(8)
    keys = jax.random.split(jax.random.key(0), 3)
    model = model_of("leo-generator")
    drawn = sample_heads(model, rows, labels, keys)
    expected = jax.jit(lambda key: model.learner.adapt(labelled(normalise(rows), np.arange(8) % 3, 3), None, key).head)
    for own, key in zip(drawn, keys, strict=True):
        close(own.head.parameters, expected(key).parameters, 1e-4)
    assert drawn[0].about == adapt(model, rows, labels).about


# Probabilities.


def test_probabilities_are_a_softmax_at_the_temperature_of_the_shots():
    rows, labels = some_rows(9)
    plain = adapt(model_of(), rows, labels)
    warm = adapt(model_of(header={"temperatures": [[1, 1.0], [9, 9.0]]}), rows, labels)  # 3 shots on average
    assert warm.temperature == pytest.approx(3)
    np.testing.assert_allclose(3 * warm.logits(rows), plain.logits(rows), rtol=1e-6)
    powers = np.exp(plain.logits(rows) / 3)
    np.testing.assert_allclose(warm.probabilities(rows), powers / powers.sum(1, keepdims=True), rtol=1e-6)


def test_softmax_of_large_logits():
    np.testing.assert_allclose(softmax(np.array([[1e4, 1e4 - np.log(3), -1e4]])), [[0.75, 0.25, 0]], rtol=1e-9)


def test_predictions_in_words():
    structure = Structure(dim=2)
    head = LinearHead(jnp.array([[np.log(3.0), 0.0], [0.0, np.log(9.0)]], jnp.float32))
    task = AdaptedClassifier((4, 7), head, 1.0, structure)
    sure, unsure = predict(task, np.array([[0, 5], [2, 0]], np.float32), 0.8)
    assert sure == {"class": 7, "probability": 0.9, "unsure": False, "probabilities": {"4": 0.1, "7": 0.9}}
    assert unsure == {"class": 4, "probability": 0.75, "unsure": True, "probabilities": {"4": 0.75, "7": 0.25}}


# Which model.


def save(folder, seed, name="model.safetensors", learner="prototypical"):
    model = model_of(learner)
    save_model(folder / name, model.learner, model.structure, {"seed": seed})
    return folder / name


def test_models_by_path_by_folder_and_by_name(tmp_path):
    for seed in (10, 9):
        save(tmp_path, seed, f"model-{seed}.safetensors")
    assert find_model(tmp_path).header["seed"] == 9
    assert find_model(str(tmp_path / "model-10.safetensors")).header["seed"] == 10
    assert find_model("miniimagenet").structure.dim == 640
    assert find_model("cl2n", 5).structure.dim == 5


def test_a_model_that_was_replaced_is_read_anew(tmp_path):
    path = save(tmp_path, 1)
    assert find_model(path) is find_model(path)
    save(tmp_path / "other", 2)
    shutil.copy(tmp_path / "other/model.safetensors", path)
    assert find_model(path).header["seed"] == 2


# What is refused.


def damaged(tmp_path, **changes):
    """A task file with another header."""
    path = tmp_path / "task.safetensors"
    adapt(model_of(), *some_rows(8)).save(path)
    with safetensors.safe_open(path, "np") as archive:
        header = json.loads(archive.metadata()["metaleo"])
    header = {name: value for name, value in {**header, **changes}.items() if value is not None}
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path, {"metaleo": json.dumps(header)})
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"classes": None}, "is a damaged task file"),
        ({"temperature": "warm"}, "is a damaged task file"),
        ({"about": {}}, "is a damaged task file"),
        ({"structure": {"dims": 3}}, "is a damaged task file"),
        ({"classes": ["a", "b"]}, "is a damaged task file (3 counts do not go with 2 classes)"),
        ({"structure": {"dim": 9}}, "does not fit"),
        ({"kind": "state"}, "is not a task file"),
        ({"classes": [["a"], "b", "c"]}, "is a damaged task file (classes.0 should be"),
        ({"temperature": float("nan")}, "temperature should be a finite number"),
        ({"temperature": 0}, "temperature=0.0 must be at least"),
        ({"about": {"rows": 2**40, "examples": [1, 1, 1]}}, "rows=1099511627776 must be at most"),
        ({"about": {"rows": 8, "examples": [1, 1, 1], "columns": "ab"}}, "about.columns should be a list"),
        ({"structure": {"dim": 8, "finetune_steps": 2**32}}, "finetune_steps=4294967296 must be at most"),
        ({"format": 99}, "has format 99"),
    ],
)
def test_damaged_task_files(tmp_path, changes, expected):
    path = damaged(tmp_path, **changes)
    text = message(lambda: load_task(path))
    assert expected in text
    assert str(path) in text


def test_task_files_of_logistic_regression_without_an_intercept_still_load(tmp_path):
    """As versions before the intercept wrote them; no other learner's file may lack a part."""
    model = find_model("logistic-regression", DIM)
    made = adapt(model._replace(learner=LogisticRegression(intercept=False)), *some_rows(8))
    made.save(tmp_path / "old.safetensors")
    assert_same_bits(load_task(tmp_path / "old.safetensors").head, made.head)
    assert isinstance(made.head, LinearHead)
    found = adapt(model, *some_rows(8))
    found.save(tmp_path / "new.safetensors")
    assert_same_bits(load_task(tmp_path / "new.safetensors").head, found.head)
    other = dataclasses.replace(made, structure=dataclasses.replace(made.structure, learner="prototypical"))
    other.save(tmp_path / "other.safetensors")
    assert "bias should be [3]" in message(lambda: load_task(tmp_path / "other.safetensors"))


def test_files_that_are_no_task_files(tmp_path):
    text = message(lambda: load_task(save(tmp_path, 0)))
    assert "is not a task file; `metaleo adapt` makes one of it" in text
    assert "does not exist" in message(lambda: load_task(tmp_path / "nothing.safetensors"))
    path = damaged(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    assert "truncated" in message(lambda: load_task(path))


def with_nan(rows):
    rows = rows.copy()
    rows[[2, 5], 1] = np.nan
    return rows


ROWS, NAMES = some_rows(8)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda: adapt(model_of(), ROWS[:, :5], NAMES), "rows have 5 numbers; the model was trained on rows of 8"),
        (lambda: adapt(model_of(), ROWS, ["ant"] * 8), "at least 2 classes; there is 1 class"),
        (lambda: adapt(model_of(), ROWS, NAMES[:7]), "8 examples need as many labels, not 7"),
        (lambda: adapt(model_of(), with_nan(ROWS), NAMES), "NaN or Inf in 2 of 8 rows, the first is row 2"),
        (lambda: adapt(model_of(), ROWS, NAMES).logits(with_nan(ROWS)), "NaN or Inf in 2 of 8 rows"),
        (lambda: adapt(model_of(), ROWS, NAMES).logits(ROWS[:, :3]), "rows have 3 numbers"),
        (lambda: adapt(model_of("meta-sgd"), ROWS, [0, 1] * 4), "trained for 3 classes, and there are 2"),
        (lambda: adapt(model_of("reptile"), ROWS, [0, 1] * 4), "trained for 3 classes, and there are 2"),
        (lambda: adapt(model_of("leo-generator"), ROWS, [0, 1] * 4), "trained for 3 classes, and there are 2"),
        (lambda: adapt_many(model_of(), [(ROWS, NAMES), (ROWS[:, :5], NAMES)]), "rows have 5 numbers"),
        (lambda: adapt_many(model_of("maml"), [(ROWS, NAMES), (ROWS, [0, 1] * 4)]), "and there are 2"),
        (lambda: find_model("nowhere"), "nowhere does not exist"),
        (lambda: find_model("cl2n"), "rows of any length, but of which one is not known"),
        (lambda: find_model("sines-and-lines"), "predicts numbers; a model of classes is needed"),
    ],
)
def test_bad_input(act, expected):
    assert expected in message(act)


def test_an_adaptation_that_went_astray():
    model = model_of("leo-generator", codes="class", network="linear")
    broken = dataclasses.replace(model.learner, latent_step_size=jnp.full(4, jnp.nan))
    decoder = jax.tree.map(lambda leaf: leaf * jnp.inf, broken.decoder)
    model = model._replace(learner=dataclasses.replace(broken, decoder=decoder))
    assert "the adapted classifier is not finite" in message(lambda: adapt(model, ROWS, NAMES))


def test_an_anchored_model_prepares_rows_by_itself(tmp_path):
    """Centring and whitening are in the model and in the task file: neither `fit` nor `predict` is told of them."""
    model = make_model("leo-anchored")
    random, labels = np.random.default_rng(0), [0, 0, 0, 1, 1, 1, 2, 2, 2]
    rows, asked = (3 + random.normal(size=(count, DIM)).astype(np.float32) for count in (9, 5))
    task = adapt(model, rows, labels)
    support = labelled(model.learner.preparation(jnp.asarray(rows)), jnp.asarray(labels), 3)
    expected = jax.vmap(model.learner.adapt(support).head)(model.learner.preparation(jnp.asarray(asked)))
    np.testing.assert_allclose(task.logits(asked), expected, rtol=1e-3, atol=1e-3)
    task.save(tmp_path / "task.safetensors")
    np.testing.assert_array_equal(load_task(tmp_path / "task.safetensors").logits(asked), task.logits(asked))
    save_model(tmp_path / "model.safetensors", model.learner, model.structure, {})
    again = adapt(load_model(tmp_path / "model.safetensors"), rows, labels)
    np.testing.assert_array_equal(again.logits(asked), task.logits(asked))
