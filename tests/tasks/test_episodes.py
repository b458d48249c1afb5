"""N-way K-shot sampling: fair, without repeats, and at a cost that ignores how much data there is."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.small import make_metaset
from metaleo.data import MetaSet
from metaleo.errors import BadInput
from metaleo.tasks import Episodes
from metaleo.tasks.episodes import MixedEpisodes, place_rows, sample_without_replacement

COUNTS = (4, 9, 5, 6, 4, 7)
CLASS_OF = np.random.default_rng(0).permutation(np.repeat(np.arange(6), COUNTS))
"""Rows of the classes mixed."""


def unbalanced() -> MetaSet:
    features = np.random.default_rng(1).normal(size=(len(CLASS_OF), 3)).astype(np.float32)
    return MetaSet.from_labels(features, CLASS_OF, np.where(CLASS_OF < 4, "train", "val"))


def equal_classes(classes: int, images: int) -> MetaSet:
    features = np.zeros((classes, images, 2), np.float32)
    return MetaSet.from_classes(features, tuple(f"c{i}" for i in range(classes)), ("train",) * classes)


def keys(count: int):
    return jax.random.split(jax.random.key(0), count)


def quickly_compiled(function, **options):
    """Compiled in a hurry: these tests call once."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


draw = quickly_compiled(sample_without_replacement, static_argnums=2)  # so `total` is traced


# choose


def draw_many(draws: int, total: int, count: int) -> np.ndarray:
    many = quickly_compiled(jax.vmap(sample_without_replacement, (0, None, None)), static_argnums=2)
    return np.asarray(many(keys(draws), total, count))


@pytest.mark.parametrize(("total", "count", "bound"), [(5, 3, 98.3), (4, 4, 49.7)])
def test_every_ordered_choice_is_equally_likely(total, count, bound):
    """Bounds are the 99.9 % points of chi-square for 59 and 23 degrees of freedom; the key is fixed."""
    choices = math.perm(total, count)
    seen = np.unique(draw_many(1000 * choices, total, count), axis=0, return_counts=True)[1]
    assert len(seen) == choices
    assert ((seen - 1000) ** 2 / 1000).sum() < bound


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 7]), st.one_of(st.integers(0, 3), st.integers(0, 2**30)), st.integers(0, 2**31 - 1))
def test_no_repeats(count, more, seed):
    total = count + more
    chosen = np.asarray(draw(jax.random.key(seed), total, count))
    assert len(set(chosen.tolist())) == count
    assert chosen.min() >= 0
    assert chosen.max() < total


def test_all_of_them_is_a_permutation():
    chosen = draw_many(50, 20, 20)
    np.testing.assert_array_equal(np.sort(chosen, axis=1), np.tile(np.arange(20), (50, 1)))


def test_total_may_be_a_number_or_traced():
    key = jax.random.key(3)
    np.testing.assert_array_equal(sample_without_replacement(key, 11, 2), draw(key, 11, 2))


# Episodes

WHOLE = "train+val"


class Drawn:
    """Many tasks, both before and after their features were fetched."""

    def __init__(self, splits: str, way: int, shot: int, query: int | None):
        whole = unbalanced()
        self.classes = np.unique(CLASS_OF) if splits == WHOLE else np.array([4, 5])
        self.episodes = Episodes.over(whole.subset(splits), way, shot, query, place_rows(whole))
        self.draw = quickly_compiled(
            jax.vmap(lambda key: (self.episodes.sample_indices(key), self.episodes.sample(key)))
        )
        self.indices, self.tasks = jax.tree.map(np.asarray, self.draw(keys(3000)))


SIZES = [(WHOLE, 3, 2, 2), (WHOLE, 6, 1, 3), (WHOLE, 6, 3, None), ("val", 2, 1, None)]


@pytest.fixture(scope="module", params=SIZES, ids=str)
def drawn(request) -> Drawn:
    """Two of them use up the smallest classes; one is over a part of the rows."""
    return Drawn(*request.param)


def test_rows_of_a_task(drawn):
    """Each line of a task is one class, another for each line; no image is in it twice."""
    indices, episodes = drawn.indices, drawn.episodes
    assert indices.support.shape == (3000, episodes.way, episodes.shot)
    for support, query, present in zip(indices.support[:100], indices.query, indices.present, strict=False):
        classes = CLASS_OF[support[:, 0]]
        assert len(set(classes)) == episodes.way
        assert set(classes) <= set(drawn.classes)
        np.testing.assert_array_equal(CLASS_OF[support], np.broadcast_to(classes[:, None], support.shape))
        np.testing.assert_array_equal(CLASS_OF[query], np.broadcast_to(classes[:, None], query.shape))
        used = np.concatenate([support.ravel(), query[present]])
        assert len(set(used)) == len(used)
        if episodes.query is None:  # all the rest
            assert set(used) == set(np.flatnonzero(np.isin(CLASS_OF, classes)))
        else:
            assert present.all()
            assert query.shape == (episodes.way, episodes.query)


def test_features_and_targets_of_a_task(drawn):
    """The label of an example is the line of its class, and its features are those of its row."""
    vectors = unbalanced().features
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for index in range(20):
        indices, task = jax.tree.map(lambda leaf, index=index: leaf[index], (drawn.indices, drawn.tasks))
        classes = CLASS_OF[indices.support[:, 0]]
        for batch, rows in ((task.support, indices.support.ravel()), (task.query, indices.query.ravel())):
            np.testing.assert_allclose(batch.inputs, vectors[rows], atol=1e-6)
            np.testing.assert_array_equal(np.sort(batch.targets, axis=1)[:, -2:], [[0, 1]] * len(rows))
            np.testing.assert_array_equal(classes[batch.targets.argmax(1)], CLASS_OF[rows])
            assert batch.way == drawn.episodes.way
        assert task.support.mask.all()
        np.testing.assert_array_equal(task.query.mask, indices.present.ravel())


def test_every_image_is_support_about_as_often(drawn):
    """The classes are equally likely, then the images of each."""
    seen = np.bincount(drawn.indices.support.ravel(), minlength=len(CLASS_OF))
    share = drawn.episodes.way / len(drawn.classes) * np.isin(CLASS_OF, drawn.classes)
    wanted = 3000 * share * drawn.episodes.shot / np.array(COUNTS)[CLASS_OF]
    assert (np.abs(seen - wanted) <= 4.5 * np.sqrt(wanted)).all()


def test_classes_come_in_random_order(drawn):
    """Else a learner could tell classes by their place."""
    first = np.bincount(CLASS_OF[drawn.indices.support[:, 0, 0]], minlength=6)[drawn.classes]
    wanted = 3000 / len(drawn.classes)
    assert (np.abs(first - wanted) < 4.5 * np.sqrt(wanted)).all()


def test_the_same_key_gives_the_same_task(drawn):
    again = drawn.draw(keys(3000))
    jax.tree.map(np.testing.assert_array_equal, again, (drawn.indices, drawn.tasks))
    assert not np.array_equal(drawn.indices.support[0], drawn.indices.support[1])


@pytest.mark.parametrize("query", [3, None])
def test_integers_of_one_width(float64, query):
    """In JAX's 64 bit mode row numbers do not mix silently with what is narrower."""
    episodes = Episodes.over(unbalanced(), 3, 1, query)
    task = jax.eval_shape(episodes.sample, jax.random.key(0))
    assert task.support.inputs.shape == (3, 3)


def operations(metaset: MetaSet, query: int | None) -> float:
    """Of one pick, as it goes to the compiler."""
    episodes, sample_indices = (
        Episodes.over(metaset, 3, 2, query),
        jax.jit(lambda episodes, key: episodes.sample_indices(key)),
    )
    return sample_indices.lower(episodes, jax.random.key(0)).cost_analysis()["flops"]


def test_cost_ignores_the_amount_of_data():
    few = operations(equal_classes(10, 10), 4)
    assert few > 0
    assert operations(equal_classes(1000, 1000), 4) == few


def test_cost_with_all_the_rest_ignores_the_number_of_classes():
    assert operations(equal_classes(10, 10), None) == operations(equal_classes(1000, 10), None)


# What cannot be sampled is refused.


@pytest.mark.parametrize(
    ("way", "shot", "query", "expected"),
    [
        (1, 1, 1, "way=1 must be at least 2"),
        (0, 1, None, "way=0 must be at least 2"),
        (2, 0, 1, "shot=0 must be at least 1"),
        (2, -3, None, "shot=-3 must be at least 1"),
        (2, 1, 0, "query=0 must be at least 1"),
        (7, 1, 1, "7-way tasks need 7 classes; the train/val split has 6"),
        (2, 3, 2, "2 queries need 5 examples per class; of the train/val split 0 has 4, 4 has 4"),
        (2, 4, None, "at least 1 query need 5 examples per class; of the train/val split 0 has 4, 4 has 4"),
    ],
)
def test_impossible_tasks(way, shot, query, expected):
    with pytest.raises(BadInput) as caught:
        Episodes.over(unbalanced(), way, shot, query)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_impossible_tasks_of_many_small_classes_name_a_few():
    with pytest.raises(BadInput, match=r"c0 has 2, c1 has 2, c2 has 2, c3 has 2, c4 has 2, …$"):
        Episodes.over(equal_classes(9, 2), 2, 1, 2)


def test_a_split_without_classes():
    with pytest.raises(BadInput, match="2-way tasks need 2 classes; the chosen split has 0"):
        Episodes.over(unbalanced().subset("test"), 2, 1, 1)


def draw_mixed(tasks, count=200):
    drawn = jax.tree.map(np.asarray, jax.jit(jax.vmap(tasks.sample))(jax.random.split(jax.random.key(0), count)))
    return [jax.tree.map(lambda leaf, i=i: leaf[i], drawn) for i in range(count)]


def test_mixed_tasks_have_many_ways_and_shots():
    tasks = MixedEpisodes.between(make_metaset(), (2, 6), (1, 5), query=3)
    assert (tasks.way, tasks.shot, tasks.query) == (6, 5, 3)
    ways, shots, uneven = set(), set(), 0
    for task in draw_mixed(tasks):
        counts = task.support.targets.sum(0)
        present = counts > 0
        ways.add(int(present.sum()))
        shots.add(int(counts.max()))
        uneven += len(set(counts[present].tolist())) > 1
        assert (counts.astype(int)[: present.sum()] > 0).all()
        asked = task.query.targets.sum(0)
        assert ((asked > 0) == present).all()
        assert asked.max() <= 3
        assert (task.support.targets.sum(1) == task.support.mask).all()
    assert ways == {2, 3, 4, 5, 6}
    assert shots == {1, 2, 3, 4, 5}
    assert 10 <= uneven <= 60


def test_rows_of_a_mixed_task_are_distinct_and_of_its_classes():
    metaset = make_metaset()
    tasks = MixedEpisodes.between(metaset, (2, 6), (1, 5), query=3)
    class_of = np.repeat(np.arange(len(metaset.counts)), metaset.counts)
    for key in jax.random.split(jax.random.key(1), 20):
        drawn = jax.tree.map(np.asarray, tasks.sample_indices(key))
        support, query = drawn.support[drawn.support_present], drawn.query[drawn.query_present]
        assert len({*support.tolist(), *query.tolist()}) == len(support) + len(query)
        pairs = [*zip(drawn.support_class[drawn.support_present], class_of[support], strict=True),
                 *zip(drawn.query_class[drawn.query_present], class_of[query], strict=True)]  # fmt: skip
        assert len(set(pairs)) == len({own for own, _ in pairs}) == len({true for _, true in pairs})


def test_mixed_tasks_have_no_more_than_the_data_allow():
    tasks = MixedEpisodes.between(make_metaset(classes=(3, 3, 3), images=6).subset("train"), (2, 20), (1, 20), query=15)
    assert (tasks.way, tasks.shot, tasks.query) == (3, 3, 3)
    assert tasks.sample(jax.random.key(0)).support.inputs.shape == (9, 8)


def test_tasks_of_many_ways_keep_one_example_of_each():
    tasks = MixedEpisodes.between(make_metaset(classes=(80, 3, 3)).subset("train"), (70, 80), (1, 5), query=2)
    for task in draw_mixed(tasks, 5):
        assert ((task.support.targets.sum(0) >= 1).sum()) >= 70
