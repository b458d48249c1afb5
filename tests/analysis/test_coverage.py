"""Paths are gradient descent, written out; lengths and singular values follow from them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.marks import by_default
from helpers.small import (
    DIM,
    adapt,
    close,
    make_batch,
    make_candidate,
    make_learner,
    make_metaset,
    make_structure,
    message,
    own_loss,
    shake,
)
from metaleo.analysis.coverage import Coverage, describe_coverage, lengths, look_at_steps, measure_coverage
from metaleo.analysis.paths import (
    code_path,
    decode,
    draw_labelled,
    inner_learner,
    map_over_tasks,
    parameters,
    steps_codes,
    unwrap_joint,
    weight_path,
)
from metaleo.evaluation.evaluate import score_learner, task_key
from metaleo.learners.registry import Structure
from metaleo.tasks import Episodes
from metaleo.tasks.sines_and_lines import SinesAndLines
from metaleo.tasks.task import key_apart

SIZES = {"latent": 4, "latent_steps": 2, "finetune_steps": 2, "latent_step_size": 0.5, "finetune_step_size": 0.3}
TAIL = (2, 2, 2, 8)
LIMIT = 0.4
KINDS = {
    "linear": {},
    "deep decoder": {"width": 5, "from_start": True},
    "limited": {"network": "mlp", "hidden": 2, "layers": 2, "max_grad_norm": LIMIT},
}


def own_path(loss, start, step_size, steps, limit=None):
    """x ← x - α ∘ g, with g cut to a length where there is a limit; in NumPy."""
    gradient, path = jax.jit(jax.grad(loss)), [np.asarray(start, np.float64)]
    for _ in range(steps):
        slope = np.asarray(gradient(jnp.asarray(path[-1], jnp.zeros(()).dtype)), np.float64)
        shorter = 1.0 if limit is None else min(1.0, limit / np.linalg.norm(slope))
        path.append(path[-1] - np.asarray(step_size) * shorter * slope)
    return np.stack(path)


def own_code_path(learner, support, start):
    def loss(code):
        return own_loss(learner.network, learner.decoder(code)[0], support)

    return own_path(loss, start, learner.latent_step_size, learner.latent_steps, learner.max_grad_norm)


def own_weight_path(learner, support, start, step_size, steps):
    return own_path(
        lambda theta: own_loss(learner.network, theta, support),
        start,
        step_size,
        steps,
        getattr(learner, "max_grad_norm", None),
    )


def subject_and_bench(tmp_path, name="leo", **changes):
    return make_candidate(tmp_path, Structure(**{"learner": name, "dim": DIM, "way": 3, **SIZES, **changes}))


def make_episodes(rows=None):
    return Episodes.over(make_metaset().subset("test"), 3, 2, None, rows)


@jax.jit
def support_of(tasks, seed_key, index):
    """Of a task that models are tested on."""
    return tasks.sample(jax.random.fold_in(seed_key, index)).support


# Paths


@pytest.mark.parametrize("kind", by_default(["deep decoder"], KINDS))
def test_codes_descend_through_the_decoder(kind, float64):
    """From the mean code to the adapted one, a gradient at a time."""
    learner, support = shake(make_learner(**{**SIZES, **KINDS[kind]})), make_batch(counts=(2, 1, 3))
    ours, trace = jax.jit(code_path)(learner, support), adapt(learner, support).trace
    assert ours.shape == (3, 3, 4)
    close(ours[0], trace.code_distribution.mean, 1e-12)
    close(ours[0], trace.code, 1e-12)
    close(ours[-1], trace.adapted_code, 1e-12)
    close(ours, own_code_path(learner, support, trace.code), 1e-9)
    assert np.abs(np.diff(ours, axis=0)).max((1, 2)).min() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", by_default(["limited"], ["linear", "limited"]))
def test_weights_of_leo_descend_from_those_decoded(kind, float64):
    learner, support = shake(make_learner(**{**SIZES, **KINDS[kind]})), make_batch(counts=(2, 1, 3))
    ours, adaptation = jax.jit(weight_path)(learner, support), adapt(learner, support)
    assert len(ours) == 3
    close(ours[0], adaptation.trace.decoded_weights, 1e-12)
    close(ours[-1], parameters(adaptation.head), 1e-12)
    expected = own_weight_path(learner, support, adaptation.trace.decoded_weights, learner.finetune_step_size, 2)
    close(ours, expected, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maml", "meta-sgd", "reptile"])
def test_weights_descend_from_the_learned_start(name, float64):
    learner, support = shake(make_learner(name, finetune_steps=3)), make_batch(counts=(2, 1, 3))
    ours = jax.jit(weight_path)(learner, support)
    assert ours.shape == (4, 3, DIM)
    close(ours, own_weight_path(learner, support, learner.start, learner.step_size, 3), 1e-9)
    close(ours[-1], adapt(learner, support).head.weights, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "deep decoder"])
def test_every_point_of_a_path_is_decoded(kind):
    learner = shake(make_learner(**KINDS[kind]))
    codes = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 4)), jnp.float32)
    ours = decode(learner, codes)
    close(ours, jnp.stack([learner.decode(code, None) for code in codes]), 1e-6)
    if kind == "linear":
        close(ours, np.asarray(codes) @ np.asarray(learner.decoder.to_mean), 1e-6)


@pytest.mark.slow
def test_a_tail_is_opened():
    """The learner behind it, and the support set as that one sees it; any other learner is itself."""
    joint, support = shake(make_learner(tail=TAIL)), make_batch()
    inner, seen = unwrap_joint(joint, support)
    assert inner is joint.learner is inner_learner(joint)
    close(seen.inputs, joint.tail(support.inputs))
    np.testing.assert_array_equal(seen.targets, support.targets)
    close(adapt(inner, seen).trace, adapt(joint, support).trace)
    plain = make_learner()
    assert unwrap_joint(plain, support) == (plain, support)
    assert inner_learner(plain) is plain


def test_whose_codes_move():
    moving = {name: steps_codes(make_learner(name)) for name in ("leo", "leo-generator", "leo-random-prior", "maml")}
    assert moving == {"leo": True, "leo-generator": False, "leo-random-prior": True, "maml": False}
    assert steps_codes(make_learner(tail=TAIL))


def test_heads_without_parameters_have_none():
    with pytest.raises(TypeError, match="no parameters"):
        parameters(make_learner("prototypical").adapt(make_batch()).head)


# A walk over tasks


def right_answers(learner, task, key):
    del key
    logits = jax.vmap(learner.adapt(task.support).head)(task.query.inputs)
    right = (logits.argmax(1) == task.query.targets.argmax(1)) & task.query.mask
    return right.sum().astype(jnp.float32) / task.query.mask.sum().astype(jnp.float32)


@pytest.mark.slow
def test_the_walk_is_over_the_tasks_of_evaluation():
    learner, episodes = make_learner(), make_episodes()
    scores = score_learner(learner, episodes, 3, 7)
    ours = map_over_tasks(right_answers, learner, episodes, 3, 7)
    np.testing.assert_allclose(ours, scores.accuracy, rtol=1e-6)
    assert len(np.unique(ours)) > 2
    assert not np.allclose(map_over_tasks(right_answers, learner, episodes, 4, 7), ours)


@pytest.mark.slow
def test_the_walk_does_not_depend_on_how_many_go_together():
    """Nor do the keys; whoever waits hears how many are done, and the host is given each block."""
    tasks, learner = SinesAndLines(2, 1), make_learner("nearest-centroid")
    heard, blocks = [], []

    def look(learner, task, key):
        return task.support.inputs, jax.random.key_data(key)

    def on_host(values):
        assert all(isinstance(leaf, np.ndarray) for leaf in values)
        blocks.append(len(values[0]))
        return values[0] + 1, values[1]

    whole = map_over_tasks(look, learner, tasks, 1, 7)
    parts = map_over_tasks(look, learner, tasks, 1, 7, heard.append, on_host=on_host, at_once=2)
    assert heard == [4, 7]
    assert blocks == [4, 3]
    np.testing.assert_allclose(parts[0], whole[0] + 1, rtol=1e-6)
    np.testing.assert_array_equal(parts[1], whole[1])
    for index in range(7):
        own = jax.random.fold_in(task_key(1), index)
        np.testing.assert_array_equal(whole[1][index], jax.random.key_data(key_apart(own)))
        np.testing.assert_allclose(whole[0][index], support_of(tasks, task_key(1), index).inputs, rtol=1e-6)


def test_a_model_that_diverges_is_refused():
    """In the second block of tasks, here."""
    tasks, learner = SinesAndLines(2, 1), make_learner("nearest-centroid")
    fifth = support_of(tasks, task_key(1), 5).inputs[0, 0]

    def look(learner, task, key):
        there = jnp.abs(task.support.inputs[0, 0] - fifth) < 1e-5
        return {"number": jnp.where(there, jnp.nan, 1.0), "whole": jnp.arange(3)}

    assert "NaN or Inf" in message(lambda: map_over_tasks(look, learner, tasks, 1, 8, at_once=2))
    np.testing.assert_array_equal(map_over_tasks(look, learner, tasks, 1, 4, at_once=2)["number"], np.ones(4))


@pytest.mark.slow
def test_labelled_tasks_are_the_same_tasks():
    """A code's rows are those of its class's examples, and its label the first of them; a function's is its family."""
    episodes, key = make_episodes(), jax.random.key(4)
    drawn, task = jax.jit(lambda key: (draw_labelled(episodes, key), episodes.sample(key)))(key)
    close(drawn.support, task.support, 0)
    np.testing.assert_array_equal(episodes.rows.take(drawn.rows).reshape(6, DIM), task.support.inputs)
    np.testing.assert_array_equal(drawn.labels, drawn.rows[:, 0])
    functions = SinesAndLines(3, 2)
    both = jax.jit(lambda key: (draw_labelled(functions, key), functions.draw(key)))
    for key in jax.random.split(jax.random.key(0), 5):
        drawn, (curve, task) = both(key)
        close(drawn.support, task.support, 0)
        assert drawn.labels.tolist() == [int(curve.is_sine)]
        assert drawn.rows is None


# Lengths


def test_lengths_by_hand():
    """Over all codes together: 3-4-5, then 5-12-13."""
    path = jnp.asarray([[[0, 0], [0, 0]], [[3, 0], [0, 4]], [[8, 0], [0, 16]]], jnp.float32)
    steps, total = lengths(path)
    np.testing.assert_allclose(steps, [5, 13], rtol=1e-6)
    np.testing.assert_allclose(total, np.hypot(8, 16), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, pytest.param({"tail": TAIL}, marks=pytest.mark.slow)], ids=["plain", "joint"])
def test_measured_lengths_by_hand(tmp_path, changes):
    """Of descent written out, on the tasks of evaluation; also behind a tail."""
    candidate, suite = subject_and_bench(tmp_path, **changes)
    heard = []
    found = measure_coverage(candidate, suite, "test", 2, 3, heard.append)
    assert heard[-1] == 3
    episodes = make_episodes(suite.tasks(candidate).rows)
    learner = inner_learner(candidate.learner)
    decoder = np.asarray(learner.decoder.to_mean, np.float64)
    for index in range(3):
        support = support_of(episodes, task_key(2), index)
        support = candidate.learner.seen(support) if changes else support
        codes = own_code_path(learner, support, adapt(learner, support).trace.code)
        theta = own_weight_path(learner, support, codes[-1] @ decoder, learner.finetune_step_size, 2)
        for kind, path in {"z": codes, "decoded": codes @ decoder, "theta": theta}.items():
            expected = [np.linalg.norm(after - before) for before, after in itertools.pairwise(path)]
            np.testing.assert_allclose(found.steps[kind][index], expected, rtol=1e-3)
            np.testing.assert_allclose(found.total[kind][index], np.linalg.norm(path[-1] - path[0]), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("leo-no-finetuning", {"z", "decoded"}),
        ("leo-generator-finetuned", {"theta"}),
        ("leo-generator", set()),
        ("meta-sgd", {"theta"}),
    ],
)
def test_steps_that_are_not_taken_have_no_length(tmp_path, name, kinds):
    candidate, suite = subject_and_bench(tmp_path, name)
    found = measure_coverage(candidate, suite, "test", 0, 2)
    assert found.steps.keys() == found.total.keys() == kinds
    assert (found.singular_values is None) == (name == "meta-sgd")
    assert all(steps.shape[0] == 2 and (steps > 0).all() for steps in found.steps.values())


def test_learners_without_steps_are_refused(tmp_path):
    candidate, suite = subject_and_bench(tmp_path, "ridge")
    said = message(lambda: measure_coverage(candidate, suite, "test", 0, 2))
    assert "ridge" in said
    assert "no gradient steps" in said


# Singular values


def test_singular_values_of_a_linear_decoder(tmp_path):
    """Of the matrix to the means, not of that to the scales."""
    candidate, suite = subject_and_bench(tmp_path, "leo-no-finetuning")
    found = measure_coverage(candidate, suite, "test", 0, 2).singular_values
    expected = np.linalg.svd(np.asarray(candidate.learner.decoder.to_mean, np.float64))[1]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def slopes(learner, code, width=1e-6):
    """dθ/dz by finite differences of the decoder, in double precision: (latent, size)."""
    rows = []
    for direction in np.eye(len(code)):
        ahead, behind = (
            np.asarray(learner.decoder(jnp.asarray(code + shift * direction)[None])[0][0]) for shift in (width, -width)
        )
        rows.append((ahead - behind) / (2 * width))
    return np.stack(rows)


@pytest.mark.parametrize(
    "changes", by_default([{"width": 5}], [{"width": 5}, {"from_start": True}]), ids=["deep", "from a start"]
)
def test_singular_values_of_other_decoders_by_finite_differences(changes, float64):
    learner, support = shake(make_learner(**SIZES, **changes)), make_batch()
    jacobian = jax.jit(look_at_steps)(learner, support)["jacobian"]
    expected = slopes(learner, np.asarray(adapt(learner, support).trace.code)[0])
    np.testing.assert_allclose(jacobian, expected, atol=1e-7)
    assert np.linalg.matrix_rank(expected) > 1


@pytest.mark.slow
def test_singular_values_of_other_decoders_are_of_each_task(tmp_path):
    candidate, suite = subject_and_bench(tmp_path, width=5)
    found = measure_coverage(candidate, suite, "test", 2, 3).singular_values
    assert found.shape == (3, 4)
    episodes, learner = make_episodes(), candidate.learner
    for index in range(3):
        code = adapt(learner, support_of(episodes, task_key(2), index)).trace.code
        with jax.enable_x64(True):
            double = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), learner)
            expected = np.linalg.svd(slopes(double, np.asarray(code, np.float64)[0]))[1]
        np.testing.assert_allclose(found[index], expected, atol=1e-4 * expected[0])
    assert np.ptp(found, axis=0).max() > 0


# The numbers that are told


MADE_UP = Coverage(
    np.array([4.0, 3, 2, 1]),
    {
        "z": np.array([[1.0, 2], [4, 5]]),
        "decoded": np.array([[2.0, 6], [16, 25]]),
        "theta": np.array([[10.0], [20]]),
    },
    {"z": np.array([1.0, 3]), "decoded": np.array([5.0, 7]), "theta": np.array([10.0, 20])},
)


def test_description_by_hand():
    told = describe_coverage(MADE_UP)
    assert told["singular values"] == pytest.approx(
        {"5 %": 1.15, "25 %": 1.75, "median": 2.5, "75 %": 3.25, "95 %": 3.85, "least": 1, "greatest": 4}
    )
    medians = {name: held["median"] for name, held in told.items()}
    assert medians == pytest.approx(
        {
            "singular values": 2.5,
            "steps z": 3,
            "from start to end z": 2,
            "steps decoded": 11,
            "from start to end decoded": 6,
            "steps theta": 15,
            "from start to end theta": 15,
            "step in theta over step in z": 3.5,  # of 2, 3, 4, 5
        }
    )
    assert told["step in theta over step in z"]["5 %"] == pytest.approx(2.15)


def test_description_without_codes():
    told = describe_coverage(Coverage(None, {"theta": np.ones((3, 2))}, {"theta": np.ones(3)}))
    assert told.keys() == {"steps theta", "from start to end theta"}


def test_a_step_of_no_length_is_no_error():
    steps = {"z": np.zeros((2, 1)), "decoded": np.zeros((2, 1))}
    told = describe_coverage(Coverage(np.ones(3), steps, {kind: np.zeros(2) for kind in steps}))
    assert told["step in theta over step in z"]["median"] == 0


def test_leo_with_an_anchor_is_refused(tmp_path):
    candidate, suite = make_candidate(tmp_path, make_structure("leo-anchored"))
    assert "adds decoded weights to an anchor" in message(lambda: measure_coverage(candidate, suite, "test", 0, 2))
