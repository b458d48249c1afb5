"""Curvature is that of the whole Hessian, by automatic differentiation in double precision."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.marks import by_default
from helpers.small import (
    DIM,
    adapt,
    make_batch,
    make_candidate,
    make_learner,
    make_metaset,
    message,
    own_loss,
    pad,
    shake,
)
from metaleo.analysis import curvature
from metaleo.analysis.curvature import (
    Logits,
    Spectra,
    describe_curvature,
    look_in_theta,
    look_in_z,
    measure_curvature,
    softmax_spectrum,
    spectrum,
    whole_spectrum,
)
from metaleo.evaluation.evaluate import task_key
from metaleo.learners.registry import Structure
from metaleo.nn.heads import linear_network
from metaleo.tasks import Episodes
from metaleo.tasks.sines_and_lines import SinesAndLines

SIZES = {"latent": 4, "latent_steps": 2, "finetune_steps": 2, "latent_step_size": 0.5, "finetune_step_size": 0.3}
COUNTS = [(1, 1, 1), (2, 2, 2), (1, 1, 1, 1, 1), (4, 1, 2), (1, 3)]
MANY = [(3, 3, 3), (6, 6), (1, 9, 2), (20, 20, 20)]
"""More examples than numbers in each."""
FEW = {"latent_steps": 1, "finetune_steps": 1}
REGRESSION = {"network": "mlp", "dim": 1, "hidden": 3, "layers": 2, "codes": "task", "noise": 0.3, "width": 5}
KINDS = {
    "linear": {},
    "deep decoder": {"width": 5, **FEW},
    "from a start": {"from_start": True, **FEW},
    "mlp": {"network": "mlp", "hidden": 2, "layers": 2, **FEW},
    "regression": {**REGRESSION, **FEW},
}


def full_spectra(loss, *points):
    """Absolute eigenvalues, largest first, of the Hessian in all numbers of each point."""
    hessian = jax.jit(jax.hessian(lambda flat: loss(flat.reshape(points[0].shape))))
    return [np.sort(np.abs(np.linalg.eigvalsh(hessian(point.ravel()))))[::-1] for point in points]


def agree(ours, expected, tolerance=1e-9):
    """Those that are told are the largest of all, and those that are not are none."""
    scale = expected[0]
    told = np.isfinite(ours)
    assert 0 < told.sum() <= len(ours) <= len(expected)
    assert not np.isnan(ours[: told.sum()]).any()
    np.testing.assert_allclose(ours[told], expected[: told.sum()], atol=tolerance * scale)
    assert (expected[told.sum() :] <= 1.001e-6 * scale).all()
    return True


def make_support(kind):
    if KINDS[kind].get("noise"):
        support = SinesAndLines(5).sample(jax.random.key(3)).support
        return jax.tree.map(lambda leaf: leaf.astype(jnp.zeros(()).dtype) if leaf.dtype != bool else leaf, support)
    return make_batch(counts=(2, 1, 3))


def one_task(look, learner, support):
    """Both spectra of one task."""
    held = jax.jit(look)(learner, support)
    return [spectrum(jax.tree.map(lambda leaf: np.asarray(leaf)[None], point))[0] for point in held]


def subject_and_bench(tmp_path, name="leo", **changes):
    return make_candidate(tmp_path, Structure(**{"learner": name, "dim": DIM, "way": 3, **SIZES, **changes}))


# The spectrum of softmax regression


@functools.cache
def linear_case(counts, padding=0):
    """A batch, weights, and the eigenvalues of the Hessian of its support loss; in double precision."""
    batch, network = make_batch(counts=counts), linear_network(DIM)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(len(counts), DIM)))
    batch = pad(batch, padding) if padding else batch

    def loss(theta):
        return network.support_loss(jax.vmap(network.head(theta))(batch.inputs), batch)

    return batch, weights, full_spectra(loss, weights)[0]


def of_batch(batch, weights, examples):
    """Ours; an example's weight is one over the shots, and padding has none."""
    shares = np.where(batch.mask, len(weights) / examples, 0.0)
    return softmax_spectrum(batch.inputs, batch.inputs @ weights.T, shares)


@pytest.mark.parametrize(
    ("counts", "padding"), [*((counts, 0) for counts in COUNTS + MANY), ((2, 2, 2), 3), ((4, 1, 2), 1)]
)
def test_softmax_spectrum_is_that_of_the_whole_hessian(counts, padding, float64):
    batch, weights, expected = linear_case(counts, padding)
    ours = of_batch(batch, weights, sum(counts))
    np.testing.assert_allclose(ours, expected[: len(ours)], atol=1e-12)
    assert (expected[len(ours) :] < 1e-10).all()


@pytest.mark.parametrize("counts", COUNTS + MANY)
def test_no_eigenvalue_that_is_told_is_zero_by_construction(counts, float64):
    """There are (ways - 1) for each dimension that the examples span: in 1ᵀW no loss has any curvature."""
    batch, weights, expected = linear_case(counts)
    rank = (len(counts) - 1) * min(sum(counts), DIM)
    assert (expected > 1e-10).sum() == rank
    assert of_batch(batch, weights, sum(counts)).shape == (rank,)


def test_tasks_do_not_meet():
    random = np.random.default_rng(0)
    inputs, logits, weights = random.normal(size=(4, 6, 8)), random.normal(size=(4, 6, 3)), random.random((4, 6))
    together = softmax_spectrum(inputs, logits, weights)
    for task in range(4):
        np.testing.assert_allclose(together[task], softmax_spectrum(inputs[task], logits[task], weights[task]))


def test_large_logits_do_no_harm():
    """Nothing overflows; a certain answer has no curvature."""
    inputs = np.random.default_rng(0).normal(size=(3, 8))
    values = softmax_spectrum(inputs, 1e4 * np.eye(3), np.ones(3))
    np.testing.assert_array_equal(values, np.zeros(6))


def test_whole_spectrum_agrees_with_numpy():
    random = np.random.default_rng(0)
    matrices = random.normal(size=(5, 6, 6))
    matrices += np.swapaxes(matrices, 1, 2)
    for matrix, ours in zip(matrices, whole_spectrum(matrices), strict=True):
        np.testing.assert_allclose(ours, np.sort(np.abs(np.linalg.eigvals(matrix).real))[::-1])


def test_whole_spectrum_leaves_rounding_out():
    """Of each task by itself, beside its own largest, whatever their signs."""
    random = np.random.default_rng(0)
    rotations = [np.linalg.qr(random.normal(size=(4, 4)))[0] for _ in range(2)]
    values = np.array([[-5, 2, 1e-7, 0.3], [1e-7, -1e-8, 0, 2e-9]])
    ours = whole_spectrum(np.stack([q * v @ q.T for q, v in zip(rotations, values, strict=True)]))
    np.testing.assert_allclose(ours, [[5, 2, 0.3, np.nan], [1e-7, 1e-8, 2e-9, np.nan]], rtol=1e-6)


# Of learners


@pytest.mark.parametrize("kind", by_default(["mlp"], KINDS))
def test_curvature_in_z_is_taken_through_the_decoder(kind, float64):
    learner, support = shake(make_learner(**KINDS[kind])), make_support(kind)
    trace = adapt(learner, support).trace
    ours = one_task(look_in_z, learner, support)
    expected = full_spectra(
        lambda z: own_loss(learner.network, learner.decoder(z)[0], support), trace.code, trace.adapted_code
    )
    for values, whole in zip(ours, expected, strict=True):
        agree(values, whole)
    assert np.nanmax(np.abs(ours[0] - ours[1])) > 1e-3 * ours[0][0]


@pytest.mark.parametrize("kind", by_default(["linear"], ["linear", "regression"]))
def test_curvature_in_theta_is_from_the_first_code_to_the_last_weights(kind, float64):
    learner, support = shake(make_learner(**KINDS[kind])), make_support(kind)
    adaptation = adapt(learner, support)
    points = learner.decoder(adaptation.trace.code)[0], jax.tree.leaves(adaptation.head)[0]
    ours = one_task(look_in_theta, learner, support)
    expected = full_spectra(lambda theta: own_loss(learner.network, theta, support), *points)
    for values, whole in zip(ours, expected, strict=True):
        agree(values, whole)
    assert np.nanmax(np.abs(ours[0] - ours[1])) > 1e-3 * ours[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("meta-sgd", "linear"), ("meta-sgd", "regression"), ("maml", "mlp")])
def test_curvature_of_descent_from_a_start(name, kind, float64):
    changes = {change: value for change, value in KINDS[kind].items() if change != "width"}
    learner, support = shake(make_learner(name, **{**changes, "finetune_step_size": 0.05})), make_support(kind)
    end = jax.tree.leaves(adapt(learner, support).head)[0]
    expected = full_spectra(lambda theta: own_loss(learner.network, theta, support), learner.start, end)
    for values, whole in zip(one_task(look_in_theta, learner, support), expected, strict=True):
        agree(values, whole)


@pytest.mark.slow
def test_padding_has_no_curvature(float64):
    learner, support = shake(make_learner()), make_support("linear")
    for look in (look_in_z, look_in_theta):
        for ours, expected in zip(
            one_task(look, learner, pad(support, 2)), one_task(look, learner, support), strict=True
        ):
            shared = min(len(ours), len(expected))
            np.testing.assert_allclose(ours[:shared], expected[:shared], atol=1e-12)
            assert (ours[shared:] < 1e-12).all()


def test_linear_classifiers_need_no_hessian():
    def shapes(look, **changes):
        return jax.eval_shape(look, make_learner(**changes), make_batch())

    for look, numbers in ((look_in_z, 4), (look_in_theta, DIM)):
        for held in shapes(look):
            assert isinstance(held, Logits)
            assert held.inputs.shape == (6, numbers)
    assert [held.shape for held in shapes(look_in_z, from_start=True)] == [(12, 12)] * 2


# Of many tasks


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"tail": (2, 2, 2, 8)}, marks=pytest.mark.slow)], ids=["plain", "joint"]
)
def test_measured_tasks_are_those_of_evaluation(tmp_path, changes):
    """Also behind a tail, whose features the loss is one of."""
    candidate, suite = subject_and_bench(tmp_path, **changes)
    heard = []
    found = measure_curvature(candidate, suite, "test", 5, 3, heard.append)
    assert found.sizes == {"theta": 24, "z": 12}
    assert heard == sorted(heard)
    assert heard[-1] == 3
    learner, tasks = candidate.learner, suite.tasks(candidate, "test")
    episodes = Episodes.over(make_metaset().subset("test"), 3, 2, None, tasks.rows)
    inner = learner.learner if changes else learner

    @jax.jit
    def by_hand(index):
        """The whole Hessians at all four points."""
        support = episodes.sample(jax.random.fold_in(task_key(5), index)).support
        support = learner.seen(support) if changes else support
        adaptation = inner.adapt(support)
        codes = [adaptation.trace.code.reshape(-1), adaptation.trace.adapted_code.reshape(-1)]
        thetas = [(codes[0].reshape(3, 4) @ inner.decoder.to_mean).reshape(-1), adaptation.head.weights.reshape(-1)]

        def in_z(flat):
            return own_loss(inner.network, flat.reshape(3, 4) @ inner.decoder.to_mean, support)

        def in_theta(flat):
            return own_loss(inner.network, flat.reshape(3, DIM), support)

        both = {"z": (in_z, codes), "theta": (in_theta, thetas)}
        return {space: [jax.hessian(loss)(point) for point in points] for space, (loss, points) in both.items()}

    for index in range(3):
        for space, hessians in by_hand(index).items():
            for ours, whole in zip(found.values[space].values(), hessians, strict=True):
                expected = np.linalg.eigvalsh(np.asarray(whole, np.float64))[::-1]
                np.testing.assert_allclose(ours[index], expected[: len(ours[index])], atol=1e-5 * expected[0])
                assert np.abs(expected[len(ours[index]) :]).max(initial=0) < 1e-5 * expected[0]


@pytest.mark.slow
def test_whole_hessians_in_theta_are_for_few_tasks_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(curvature, "WHOLE_TASKS", 2)
    candidate, suite = subject_and_bench(tmp_path, network="mlp", hidden=2, layers=2, **FEW)
    heard = []
    found = measure_curvature(candidate, suite, "test", 0, 3, heard.append)
    numbers = 3 * (2 * 8 + 2 + 2 + 1)
    assert found.sizes == {"theta": numbers, "z": 12}
    assert {space: held["after"].shape for space, held in found.values.items()} == {"z": (3, 12), "theta": (2, numbers)}
    assert heard[-1] == 3
    monkeypatch.setattr(curvature, "LARGEST", numbers - 1)
    found = measure_curvature(candidate, suite, "test", 0, 3)
    assert list(found.values) == ["z"]
    assert found.sizes["theta"] == numbers


def test_learners_without_steps_are_refused(tmp_path):
    candidate, suite = subject_and_bench(tmp_path, "prototypical")
    said = message(lambda: measure_curvature(candidate, suite, "test", 0, 3))
    assert "prototypical" in said
    assert "no gradient steps" in said


# The numbers that are told


MADE_UP = Spectra(
    {
        "z": {
            "before": np.array([[4, 2, np.nan], [5, 3, 1]]),
            "after": np.array([[2.0, 1, 0], [2.0, 1, 0]]),
        },
        "theta": {"before": np.array([[8.0, 6], [10, 2]]), "after": np.array([[4.0, 4], [4, 4]])},
    },
    {"z": 12, "theta": 10},
)


def test_description_by_hand():
    told = describe_curvature(MADE_UP)
    assert told["numbers"] == {"z": 12, "theta": 10}
    before = told["z before"]
    expected = {
        "eigenvalues": {"5 %": 1.2, "25 %": 2, "median": 3, "75 %": 4, "95 %": 4.8},  # of 1, 2, 3, 4, 5
        "largest": {"5 %": 4.05, "25 %": 4.25, "median": 4.5, "75 %": 4.75, "95 %": 4.95},  # of 4, 5
        "mean": {"5 %": 0.5125, "25 %": 0.5625, "median": 0.625, "75 %": 0.6875, "95 %": 0.7375},  # of 6/12, 9/12
    }
    assert before.keys() == expected.keys()
    for name, quantiles in expected.items():
        assert before[name] == pytest.approx(quantiles)
    assert told["theta before"]["mean"]["median"] == pytest.approx(1.3)  # of 14/10 and 12/10


def test_z_over_theta_is_by_medians():
    told = describe_curvature(MADE_UP)
    assert told["z over theta before"] == pytest.approx({"eigenvalues": 3 / 7, "largest": 4.5 / 9, "mean": 0.625 / 1.3})
    assert told["z over theta after"] == pytest.approx({"eigenvalues": 1 / 4, "largest": 2 / 4, "mean": 0.25 / 0.8})


def test_theta_alone_is_compared_with_nothing():
    told = describe_curvature(Spectra({"theta": MADE_UP.values["theta"]}, MADE_UP.sizes))
    assert told.keys() == {"numbers", "theta before", "theta after"}
    assert told["numbers"] == {"theta": 10}


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_the_scale_of_codes_is_free():
    """Codes c times longer, a decoder c times shorter, steps c² times longer: the same classifier, other curvature."""
    support, factor = make_batch(), 10.0
    learner = shake(make_learner("leo-random-prior"))
    decoder = eqx.tree_at(lambda one: one.to_mean, learner.decoder, learner.decoder.to_mean / factor)
    steps = factor**2 * learner.latent_step_size
    other = dataclasses.replace(learner, decoder=decoder, latent_step_size=steps)
    one, two = adapt(learner, support), adapt(other, support)
    np.testing.assert_allclose(one.head.weights, two.head.weights, rtol=1e-9)
    np.testing.assert_allclose(factor * one.trace.adapted_code, two.trace.adapted_code, rtol=1e-9)
    for mine, its in zip(look_in_z(learner, support), look_in_z(other, support), strict=True):
        np.testing.assert_allclose(spectrum(mine), factor**2 * spectrum(its), rtol=1e-8, atol=1e-15)
    for mine, its in zip(look_in_theta(learner, support), look_in_theta(other, support), strict=True):
        np.testing.assert_allclose(spectrum(mine), spectrum(its), rtol=1e-8, atol=1e-15)
