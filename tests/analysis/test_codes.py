"""How codes stand apart: every number by hand, on points that can be drawn on paper."""

import dataclasses

import jax
import numpy as np
import pytest
from sklearn.decomposition import PCA

from helpers.small import DIM, make_candidate, make_metaset, message
from metaleo.analysis.codes import (
    NEIGHBOURS,
    Codes,
    apart,
    chance,
    collect_codes,
    describe_codes,
    label_names,
    principal_paths,
    project,
    purity,
    shares_example,
    silhouettes,
    spread,
    typical_class,
)
from metaleo.data.metaset import MetaSet
from metaleo.evaluation.evaluate import task_key
from metaleo.learners.registry import Structure
from metaleo.reporting.findings import AnalysisSettings, analyse_codes
from metaleo.tasks import Episodes
from metaleo.tasks.sines_and_lines import SinesAndLines
from metaleo.tasks.task import normalise

SIZES = {"latent": 4, "latent_steps": 2, "finetune_steps": 1, "latent_step_size": 0.5, "finetune_step_size": 0.3}
TAIL = (2, 2, 2, 8)
LINE = np.array([0, 1, 2.1, 10, 11, 12.1])[:, None]
SIDES = np.array([0, 0, 1, 1, 1, 0])


def alone(count):
    """Every code of an example of its own."""
    return np.arange(count)[:, None]


def make_codes(before, after, labels, rows=None, names=None):
    paths = np.stack([np.asarray(before, np.float64), np.asarray(after, np.float64)], 1)
    labels = np.asarray(labels)
    names = tuple(f"class{i}" for i in range(labels.max() + 1)) if names is None else names
    return Codes(paths, labels, alone(len(labels)) if rows is None else rows, names)


def random_codes(count=40, latent=3, points=2, seed=0):
    random = np.random.default_rng(seed)
    return Codes(
        random.normal(size=(count, points, latent)), random.integers(4, size=count), alone(count), tuple("abcd")
    )


# Neighbours


@pytest.mark.parametrize(("neighbours", "expected"), [(1, 4 / 6), (2, 2 / 6)])
def test_purity_by_hand(neighbours, expected):
    """0 and 1 have each other, so have 10 and 11; 2.1 and 12.1 have those of the other kind."""
    assert purity(LINE, SIDES, alone(6), neighbours) == pytest.approx(expected)


def test_codes_of_a_common_example_are_no_neighbours():
    """0 and 1 are of an example in common: 2.1 is next to both."""
    rows = np.array([[50, 60], [60, 70], [80, 81], [82, 83], [84, 85], [86, 87]])
    assert purity(LINE, SIDES, rows, 1, even=False) == pytest.approx(2 / 6)
    related = shares_example(rows).toarray()
    expected = [[bool(set(a) & set(b)) for b in rows] for a in rows]
    np.testing.assert_array_equal(related, expected)


def test_where_too_few_are_left_those_count():
    """Of four codes the first has one neighbour left, two have two."""
    rows = np.array([[1, 2], [1, 3], [2, 4], [9, 8]])
    points = np.array([[0.0, 0], [0, 1], [1, 0], [5, 5]])
    assert purity(points, np.array([0, 0, 1, 0]), rows, 3, even=False) == pytest.approx((1 + 1 / 2 + 0 + 2 / 3) / 4)


def test_where_none_is_left_there_is_no_purity():
    assert np.isnan(purity(LINE, SIDES, np.zeros((6, 1), int), 2))
    rows = np.array([[0], [0], [0], [0], [0], [1]])  # only the last has neighbours, and is one
    assert purity(LINE, SIDES, rows, 2, even=False) == pytest.approx((2 * 1 + 3 * 0 + 0) / 6)


@pytest.mark.parametrize(("images", "shot"), [(400, 1), (100, 5), (40, 10)])
def test_codes_without_structure_are_pure_by_chance(images, shot):
    """However many examples the codes of a class have in common: as many others are left out, blindly."""
    random = np.random.default_rng(1)
    labels = np.repeat(np.arange(5), 300)
    rows = labels[:, None] * images + random.integers(images, size=(1500, shot))
    ours = purity(random.normal(size=(1500, 8)), labels, rows)
    assert ours == pytest.approx(chance(labels), abs=0.012)
    if shot == 10:
        assert purity(random.normal(size=(1500, 8)), labels, rows, even=False) < 0.5 * chance(labels)


def test_without_examples_all_are_neighbours():
    assert purity(LINE, SIDES, np.zeros((6, 0), int), 1) == pytest.approx(4 / 6)


@pytest.mark.parametrize("shot", [0, 2])
def test_purity_of_many_codes_one_at_a_time(shot):
    """More than are compared at a time, many of them related, or none; no code is its own neighbour."""
    random = np.random.default_rng(0)
    codes, labels = random.normal(size=(1100, 3)), random.integers(3, size=1100)
    codes[:, 0] += labels
    rows = random.integers(400, size=(1100, shot))
    shares = []
    for own in range(1100):
        others = ~(rows[:, :, None] == rows[own]).any((1, 2)) & (np.arange(1100) != own)
        order = np.argsort(np.where(others, np.linalg.norm(codes - codes[own], axis=1), np.inf))[:10]
        shares.append(np.mean(labels[order] == labels[own]))
    assert purity(codes, labels, rows, even=False) == pytest.approx(np.mean(shares))
    assert NEIGHBOURS == 10


def test_chance_by_hand():
    """Of all pairs of six, three and one are of a kind; and so it is for neighbours drawn blindly."""
    labels = np.array([0, 5, 0, 1, 1, 0])
    assert chance(labels) == pytest.approx((3 + 1) / 15)
    blind = np.random.default_rng(0).normal(size=(6, 2))
    assert purity(blind, labels, alone(6), 5) == pytest.approx(chance(labels))  # all others


# Distances


def test_silhouettes_by_the_formula():
    random = np.random.default_rng(0)
    labels = np.repeat([0, 3, 4], [4, 6, 5])
    codes = random.normal(size=(15, 3)) + labels[:, None]
    expected = []
    for own, label in enumerate(labels):
        distances = np.array([np.sqrt(((codes[own] - other) ** 2).sum()) for other in codes])
        inner = distances[labels == label].sum() / ((labels == label).sum() - 1)
        outer = min(distances[labels == other].mean() for other in (0, 3, 4) if other != label)
        expected.append((outer - inner) / max(inner, outer))
    np.testing.assert_allclose(silhouettes(codes, labels), expected, rtol=1e-9)


def test_spread_by_hand():
    assert spread(np.array([[0.0, 0], [2, 0], [0, 4], [2, 4]]) + 7) == pytest.approx(np.sqrt(5))


def test_apart_is_a_half_if_nothing_has_changed():
    """Each neighbour is there twice, once on each side; a code's own twin is of the same example."""
    points = np.random.default_rng(0).normal(size=(30, 3))
    assert apart(make_codes(points, points, np.arange(30) % 3)) == pytest.approx(0.5)
    without = apart(make_codes(points, points, np.arange(30) % 3, np.zeros((30, 0), int)))
    assert 0.4 <= without <= 0.5


def test_apart_is_one_if_all_have_gone_far_away():
    points = np.random.default_rng(0).normal(size=(30, 3))
    assert apart(make_codes(points, points + 100, np.arange(30) % 3)) == 1


def test_typical_class_is_the_middle_one():
    """Of a tight one, one that is strewn over both others, and one in between."""
    random = np.random.default_rng(0)
    labels = np.repeat([1, 4, 7], 8)
    after = np.concatenate([
        5 + 0.1 * random.normal(size=(8, 2)), -5 + 2 * random.normal(size=(8, 2)), 6 * random.normal(size=(8, 2)),
    ])  # fmt: skip
    order = random.permutation(24)
    codes = make_codes(np.zeros((24, 2)), after[order], labels[order])
    values = silhouettes(codes.after, codes.labels)
    means = [values[codes.labels == label].mean() for label in (1, 4, 7)]
    assert means[0] > means[1] > means[2]
    assert typical_class(codes) == 4


def test_description_by_hand():
    random = np.random.default_rng(0)
    labels = np.arange(24) % 3
    before = random.normal(size=(24, 2))
    after = before + np.linspace(1, 3, 24)[:, None] * np.array([[0.6, 0.8]])
    codes = make_codes(before, after, labels)
    told = describe_codes(codes)
    assert (told["codes"], told["classes"]) == (24, 3)
    for name, points in (("before", before), ("after", after)):
        expected = {
            "silhouette": silhouettes(points, labels).mean(),
            "purity": purity(points, labels, codes.rows, 10),
            "spread": np.sqrt(points.var(0).sum()),
        }
        assert told[name] == pytest.approx(expected)
    assert told["moved"] == pytest.approx({"mean": 2, "5 %": 1.1, "median": 2, "95 %": 2.9})
    assert told["apart"] == pytest.approx(apart(codes))
    assert told["chance_purity"] == pytest.approx(7 / 23)


# Names


def test_classes_are_named_in_words(tmp_path):
    """Those of the split, in its order."""
    _, suite = subject_and_bench(tmp_path)
    assert label_names(suite, "val") == tuple(f"class{i}" for i in range(8, 13))
    names = ("n02129165", *suite.metaset.class_names[1:])
    suite.metaset = dataclasses.replace(suite.metaset, class_names=names)
    assert label_names(suite, "train")[:2] == ("lion", "class1")


def test_an_unknown_class_is_refused_before_any_work(tmp_path):
    candidate, suite = subject_and_bench(tmp_path)
    look = AnalysisSettings(suite, "test", 0, 20, lambda name, tasks, work: pytest.fail("work was done"))
    said = message(lambda: analyse_codes(candidate, look, "class3"))  # of another split
    assert "'class3'" in said
    assert "class13, class14, class15, class16, class17" in said


# Pictures


def test_projection_is_of_both_sides_and_the_same_again():
    codes = random_codes(20)
    codes = dataclasses.replace(codes, paths=codes.paths + np.array([0.0, 30])[None, :, None])
    first, again = project(codes, 0), project(codes, 0)
    assert first.shape == (2, 20, 2)
    np.testing.assert_array_equal(first, again)
    centre = first.mean((0, 1))
    before, after = (side @ (first[1].mean(0) - first[0].mean(0)) for side in first - centre)
    assert before.max() < after.min()  # what is far apart stays so


def test_principal_paths_agree_with_sklearn():
    codes = random_codes(20, 5, 3)
    paths, shares = principal_paths(codes)
    reference = PCA(2, svd_solver="full").fit(codes.paths.reshape(-1, 5))
    expected = reference.transform(codes.paths.reshape(-1, 5)).reshape(20, 3, 2)
    signs = np.sign((paths * expected).sum((0, 1)))
    np.testing.assert_allclose(paths, expected * signs, atol=1e-9)
    np.testing.assert_allclose(shares, reference.explained_variance_ratio_, rtol=1e-9)


# Codes of a model


def subject_and_bench(tmp_path, name="leo", **changes):
    return make_candidate(tmp_path, Structure(**{"learner": name, "dim": DIM, "way": 3, **SIZES, **changes}))


def shuffled() -> MetaSet:
    """Rows of all classes and splits in any order, classes of different sizes."""
    whole, random = make_metaset(), np.random.default_rng(5)
    order = random.permutation(len(whole.features))[:-20]
    classes = order // 12
    labels = np.array([f"class{i:02}" for i in classes])
    return MetaSet.from_labels(whole.features[order], labels, np.array(whole.splits)[classes])


@jax.jit
def traced(learner, tasks, seed_key, index):
    own = jax.random.fold_in(seed_key, index)
    return learner.adapt(tasks.sample(own).support).trace


@jax.jit
def sample_indices(tasks, key):
    return tasks.sample_indices(key)


@pytest.mark.parametrize("changes", [{}, pytest.param({"tail": TAIL}, marks=pytest.mark.slow)], ids=["plain", "joint"])
def test_collected_codes_are_those_of_adaptation(tmp_path, changes):
    """Task by task, on the tasks of evaluation, class by class in order; also behind a tail."""
    candidate, suite = subject_and_bench(tmp_path, **changes)
    heard = []
    codes = collect_codes(candidate, suite, "val", 4, 20, heard.append)
    assert heard[-1] == 20
    assert codes.paths.shape == (60, 3, 4)
    tasks = Episodes.over(make_metaset().subset("val"), 3, 2, None, suite.tasks(candidate, "val").rows)
    for index in (0, 7, 19):
        trace, part = traced(candidate.learner, tasks, task_key(4), index), slice(3 * index, 3 * index + 3)
        np.testing.assert_allclose(codes.before[part], trace.code, atol=1e-5)
        np.testing.assert_allclose(codes.after[part], trace.adapted_code, atol=1e-5)
        support = sample_indices(tasks, jax.random.fold_in(task_key(4), index)).support
        np.testing.assert_array_equal(codes.rows[part], support)
        names = [codes.names[label] for label in codes.labels[part]]
        assert names == [f"class{row // 12}" for row in np.asarray(support)[:, 0]]  # twelve rows a class


def test_labels_are_the_classes_of_the_rows(tmp_path):
    """Wherever the rows of a class are; only classes of the split, all examples of a code of one."""
    candidate, suite = subject_and_bench(tmp_path)
    suite.metaset = metaset = shuffled()
    codes = collect_codes(candidate, suite, "test", 0, 20)
    class_of = {}
    starts = metaset.starts
    for index, name in enumerate(metaset.class_names):
        class_of |= dict.fromkeys(metaset.rows[starts[index] : starts[index] + metaset.counts[index]].tolist(), name)
    for label, rows in zip(codes.labels, codes.rows, strict=True):
        assert {class_of[row] for row in rows.tolist()} == {codes.names[label]}
        assert len(set(rows.tolist())) == 2
    assert codes.names == tuple(f"class{i}" for i in range(13, 18))
    assert len(np.unique(codes.labels)) == 5


@pytest.mark.slow
def test_a_code_of_a_function_is_labelled_by_its_family(tmp_path):
    candidate, suite = subject_and_bench(
        tmp_path, dim=1, network="mlp", hidden=3, layers=2, codes="task", noise=0.3, width=5, max_grad_norm=5.0
    )
    codes = collect_codes(candidate, suite, "test", 1, 20)
    assert codes.names == ("line", "sine")
    assert codes.rows.shape == (20, 0)
    tasks = SinesAndLines(2, 100)
    families = jax.jit(jax.vmap(lambda index: tasks.draw(jax.random.fold_in(task_key(1), index))[0].is_sine))
    np.testing.assert_array_equal(codes.labels, families(np.arange(20)).astype(int))
    assert set(codes.labels) == {0, 1}
    trace = traced(candidate.learner, tasks, task_key(1), 3)
    np.testing.assert_allclose(codes.paths[3, [0, -1]], [trace.code[0], trace.adapted_code[0]], rtol=1e-4, atol=1e-5)
    assert describe_codes(codes)["classes"] == 2


def test_a_drawn_row_is_the_row_of_the_data(tmp_path):
    """Row numbers are those of the file, not of the split."""
    candidate, suite = subject_and_bench(tmp_path)
    tasks, own = suite.tasks(candidate, "test"), jax.random.fold_in(task_key(0), 2)
    rows = np.asarray(sample_indices(tasks, own).support).ravel()
    inputs = jax.jit(lambda key: tasks.sample(key))(own).support.inputs
    np.testing.assert_allclose(inputs, normalise(make_metaset().features[rows]), rtol=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("name", "words"), [("meta-sgd", "meta-sgd, which has no codes"), ("leo-generator", "no steps on its codes")]
)
def test_models_without_codes_that_move_are_refused(tmp_path, name, words):
    candidate, suite = subject_and_bench(tmp_path, name)
    said = message(lambda: collect_codes(candidate, suite, "test", 0, 20))
    assert words in said
    assert str(candidate.path) in said


def test_too_few_tasks_are_refused(tmp_path):
    candidate, suite = subject_and_bench(tmp_path)
    assert "tasks=19 must be at least 20" in message(lambda: collect_codes(candidate, suite, "test", 0, 19))


def test_too_few_classes_are_refused(tmp_path):
    candidate, suite = subject_and_bench(tmp_path)
    suite.way = 6
    assert "the test split has 5" in message(lambda: collect_codes(candidate, suite, "test", 0, 20))


@pytest.mark.slow
def test_a_code_for_all_classes_is_of_no_class(tmp_path):
    """One line, not codes with the labels of others."""
    candidate, suite = subject_and_bench(tmp_path, network="mlp", hidden=2, layers=2, codes="task")
    assert str(candidate.path) in message(lambda: collect_codes(candidate, suite, "test", 0, 20))
