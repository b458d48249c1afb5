"""Scores of sampled functions: against SciPy, numerical integrals, and predictors whose scores are known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special, stats

from helpers.marks import by_default
from metaleo.evaluation import evaluate as evaluation
from metaleo.evaluation import regression as predictive
from metaleo.evaluation.regression import (
    Ambiguity,
    Bayes,
    FunctionScore,
    Oracle,
    Predictor,
    ambiguous_tasks,
    calibrate_scale,
    covered,
    evaluate_functions,
    examine_ambiguous,
    mean_distance,
    mixture_crps,
    score_task,
    spearman,
    summarise_functions,
)
from metaleo.tasks.sines_and_lines import SinesAndLines, posterior

NOISE = 0.3


def single(values):
    return jnp.asarray(values, jnp.float32)


# Predictors with known answers


class Shifted(Predictor):
    """The truth, and something added: one function."""

    offset: float = 0.0

    def predict(self, curve, support, key, x):
        return curve(x)[None, :] + self.offset


class Constant(Predictor):
    """The same functions for every task, each a number."""

    values: jax.Array

    def predict(self, curve, support, key, x):
        return jnp.broadcast_to(self.values[:, None], (len(self.values), len(x)))


class WiderAway(Predictor):
    """Spread by a function of the distance to the nearest support point."""

    sign: float

    def predict(self, curve, support, key, x):
        distance = jnp.abs(x[:, None] - support.inputs[None, :, 0]).min(1)
        spread = jnp.exp(self.sign * distance)
        return jnp.stack([spread, -spread])


class Wrong(Predictor):
    """Off by N(0, error²) at every point, with samples around it that are spread by something else."""

    error: float
    spread: float

    def predict(self, curve, support, key, x):
        quantiles = special.ndtri((np.arange(64) + 0.5) / 64)
        around = single(quantiles / quantiles.std())
        centre = curve(x) + self.error * jax.random.normal(key, x.shape)
        return centre[None, :] + self.spread * around[:, None]


class SomeSines(Predictor):
    """So many sines of ten functions, the others lines."""

    sines: int

    def predict(self, curve, support, key, x):
        of_ten = jnp.arange(10)[:, None] < self.sines
        return jnp.where(of_ten, 2 * jnp.sin(x - 1)[None, :], (0.5 * x - 1)[None, :])


def draw(seed=0, query=50):
    return SinesAndLines(5, query).draw(jax.random.key(seed))


def score(predictor, seed=0, scale=1.0, query=50):
    return jax.jit(score_task)(predictor, *draw(seed, query), jax.random.key(1), single(scale))


# The measures


def test_rank_correlation_agrees_with_scipy():
    random = np.random.default_rng(0)
    for strength in (-2, 0, 0.5, 3):
        a = random.normal(size=60)
        b = np.exp(strength * a + random.normal(size=60))
        np.testing.assert_allclose(spearman(single(a), single(b)), stats.spearmanr(a, b).statistic, atol=1e-6)


@pytest.mark.parametrize("deviation", [0.3, 2.0])
def test_mean_distance_is_an_integral(deviation):
    offsets = np.array([-3, -0.5, 0, 0.1, 1, 6])
    expected = [
        integrate.quad(lambda z, o=o: abs(z) * stats.norm.pdf(z, o, deviation), -30, 30, points=[o, 0], limit=200)[0]
        for o in offsets
    ]
    np.testing.assert_allclose(mean_distance(single(offsets), deviation), expected, atol=1e-5)


@pytest.mark.slow
def test_crps_of_one_function_is_a_gaussian_s():
    """σ (z (2 Φ(z) - 1) + 2 φ(z) - 1/√π)."""
    y = np.linspace(-2, 2, 21)
    z = (y - 0.4) / NOISE
    expected = NOISE * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    np.testing.assert_allclose(mixture_crps(single(np.full((1, 21), 0.4)), single(y)), expected, atol=1e-5)


@pytest.mark.slow
def test_crps_of_many_functions_is_an_integral():
    """∫ (F(t) - 1{t ≥ y})² dt for the mixture's F: two clusters, targets near and far."""
    random = np.random.default_rng(0)
    functions = random.normal(size=(800, 12)) * 0.5 + 2 * random.integers(2, size=(800, 12))
    y = np.linspace(-3, 5, 12)
    t = np.linspace(-10, 12, 1101)
    below = np.stack([special.ndtr((t[:, None] - of_point) / NOISE).mean(1) for of_point in functions.T])
    expected = integrate.trapezoid((below - (t >= y[:, None])) ** 2, t, axis=1)
    ours = np.asarray(mixture_crps(single(functions), single(y)))
    np.testing.assert_allclose(ours, expected, atol=0.03)
    assert abs((ours - expected).mean()) < 0.01


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.5])
def test_coverage_is_between_quantiles(scale):
    """Of a large sample of the mixture, stretched about its mean: just inside and just outside of both ends."""
    random = np.random.default_rng(0)
    functions = random.exponential(size=(50, 6)) * np.linspace(0.1, 2, 6)
    stretched = functions.mean(0) + scale * (functions - functions.mean(0))
    sample = stretched[:, :, None] + NOISE * random.normal(size=(50, 6, 4000))
    low, high = np.quantile(sample, [0.05, 0.95], axis=(0, 2))
    for y, expected in ((low - 0.05, False), (low + 0.05, True), (high - 0.05, True), (high + 0.05, False)):
        np.testing.assert_array_equal(covered(single(functions), single(y), scale), [expected] * 6)


# Scores of one task


@pytest.mark.parametrize("offset", [0.0, 0.7, -2.0])
def test_a_known_offset(offset):
    """Its square is the squared error, whatever the noise of the targets is."""
    ours = score(Shifted(offset))
    np.testing.assert_allclose(ours.mse, offset**2, atol=1e-5)
    assert ours.is_sine == draw()[0].is_sine
    assert ours.spread == 0
    assert ours.rank_correlation == 0


def test_scores_of_a_mixture():
    """Squared error of the mean, likelihood of the mixture, and spread, by SciPy."""
    values, scale = np.array([-0.4, 0.2, 0.5]), 3.0
    curve, task = draw()
    x, y = np.asarray(task.query.inputs)[:, 0], np.asarray(task.query.targets, np.float64)[:, 0]
    ours = score(Constant(single(values)), scale=scale)
    truth = np.asarray(curve(single(x)), np.float64)
    np.testing.assert_allclose(ours.mse, np.mean((values.mean() - truth) ** 2), rtol=1e-5)
    logs = special.logsumexp(stats.norm.logpdf(y[:, None], values, NOISE), axis=1) - np.log(3)
    np.testing.assert_allclose(ours.nll, -logs.mean(), rtol=1e-5)
    np.testing.assert_allclose(ours.spread, values.std(), rtol=1e-5)
    functions = single(np.tile(values[:, None], len(y)))
    np.testing.assert_allclose(ours.crps, mixture_crps(functions, single(y)).mean(), rtol=1e-5)
    for coverage, factor in ((ours.coverage, 1.0), (ours.calibrated, scale)):
        np.testing.assert_allclose(coverage, np.mean(covered(functions, single(y), factor)), rtol=1e-5)
    assert ours.calibrated > ours.coverage


@pytest.mark.parametrize("sign", [1, -1])
def test_spread_that_follows_the_distance(sign):
    """Growing away from the support set, or towards it."""
    np.testing.assert_allclose(score(WiderAway(0.3 * sign)).rank_correlation, sign, atol=1e-3)


@pytest.mark.slow
def test_spread_that_ignores_the_distance():
    assert abs(evaluate_functions(Constant(single([-1.0, 1.0])), 5, 0, 40).rank_correlation.mean()) < 0.08


# Many tasks


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_known_scores_on_average(offset):
    """The truth, or a little off it: entropy, CRPS and coverage of a Gaussian, within four standard errors."""
    scores = evaluate_functions(Shifted(offset), 5, 0, 60)
    z = offset / NOISE
    expected = {
        "mse": offset**2,
        "nll": np.log(NOISE * np.sqrt(2 * np.pi * np.e)) + z**2 / 2,
        "crps": mean_distance(single(offset), np.sqrt(2).item() * NOISE) - NOISE / np.sqrt(np.pi),
        "coverage": stats.norm.cdf(1.64485 - z) - stats.norm.cdf(-1.64485 - z),
    }
    for name, wanted in expected.items():
        values = np.asarray(getattr(scores, name), np.float64)
        assert abs(values.mean() - wanted) < 4 * values.std() / np.sqrt(60) + 1e-5, name
    np.testing.assert_array_equal(scores.coverage, scores.calibrated)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_calibration_finds_the_factor(ratio):
    """Samples are spread by 1/2 or twice of what they are off; scaled, 90 % of other tasks' targets are covered."""
    predictor = Wrong(1.0, 1 / ratio)
    scale = calibrate_scale(predictor, 5, 0, 100)
    assert abs(np.log(scale / ratio)) < 0.08
    scores = evaluate_functions(predictor, 5, 0, 60, scale)
    assert abs(scores.calibrated.mean() - 0.9) < 0.025
    assert (scores.coverage.mean() < 0.8) if ratio > 1 else (scores.coverage.mean() > 0.97)


@pytest.mark.parametrize(
    ("error", "spread", "expected"), [(2.0, 0.02, 8), (0.01, 1.2, 0.25), (0.01, 8.0, 0.25), (1.0, 0.0, 1)]
)
def test_calibration_at_its_ends(error, spread, expected):
    """The largest and the smallest factor that is tried; none where nothing is spread."""
    np.testing.assert_allclose(calibrate_scale(Wrong(error, spread), 5, 0, 20), expected)


def test_calibration_has_tasks_of_its_own(monkeypatch):
    """Validation, test and ambiguous tasks are of streams apart, and another seed has others."""
    streams = []

    def listen(*arguments):
        streams.extend(
            a for a in arguments if isinstance(a, jax.Array) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
        )
        raise StopIteration

    for name in ("coverages", "score_block", "find_ambiguous"):
        monkeypatch.setattr(predictive, name, listen)
    for seed in (0, 1):
        for action in (calibrate_scale, evaluate_functions, lambda _, *which: ambiguous_tasks(*which)):
            with pytest.raises(StopIteration):
                action(Shifted(), 5, seed, 10)
    assert len({np.asarray(jax.random.key_data(stream)).tobytes() for stream in streams}) == len(streams) == 6


@pytest.mark.slow
def test_tasks_do_not_depend_on_the_block(monkeypatch):
    """Nor on how many follow; whoever waits hears how many are done."""
    predictor, heard = Wrong(1.0, 0.5), []
    few = evaluate_functions(predictor, 5, 0, 3)
    many = evaluate_functions(predictor, 5, 0, 23)
    monkeypatch.setattr(evaluation, "BLOCK", {"cpu": 3})
    blocks = evaluate_functions(predictor, 5, 0, 7, progress=heard.append)
    assert heard == [3, 6, 7]
    for name in (field.name for field in dataclasses.fields(FunctionScore)):
        assert getattr(many, name).shape == (23,)
        np.testing.assert_allclose(getattr(many, name)[:3], getattr(few, name), rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(getattr(blocks, name), getattr(many, name)[:7], rtol=2e-4, atol=1e-5)
    assert len(np.unique(many.nll)) == 23


@pytest.mark.slow
def test_the_same_seed_has_the_same_tasks():
    """For every predictor, so that they can be compared; another seed has others."""
    first, again, other = (evaluate_functions(Constant(single([0.0])), 5, seed, 10) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.isin(other.mse, first.mse).any()
    np.testing.assert_array_equal(evaluate_functions(Shifted(), 5, 0, 10).is_sine, first.is_sine)


@pytest.mark.slow
def test_samples_have_a_key_of_their_own():
    """Errors of a predictor are drawn anew for each task, and are none of the targets' noise."""
    scores = evaluate_functions(Wrong(0.3, 0.0), 5, 0, 60)
    assert len(np.unique(scores.mse)) == 60
    assert abs(scores.mse.mean() - 0.09) < 4 * 0.09 * np.sqrt(2 / 6000)
    expected = np.log(NOISE * np.sqrt(2 * np.pi)) + 1
    assert abs(scores.nll.mean() - expected) < 4 * scores.nll.std() / np.sqrt(60)


def test_summary_agrees_with_numpy():
    random = np.random.default_rng(0)
    names = [field.name for field in dataclasses.fields(FunctionScore)]
    scores = FunctionScore(random.random(50) < 0.4, *random.gamma(2, size=(len(names) - 1, 50)).astype(np.float32))
    report = summarise_functions(scores, 1.7)

    def agree(mean, interval, values):
        np.testing.assert_allclose(mean, np.mean(values, dtype=np.float64), rtol=1e-9)
        np.testing.assert_allclose(interval, 1.96 * stats.sem(values.astype(np.float64)), rtol=1e-9)

    agree(report.mse, report.mse_interval, scores.mse)
    agree(report.sine_mse, report.sine_mse_interval, scores.mse[scores.is_sine])
    agree(report.line_mse, report.line_mse_interval, scores.mse[~scores.is_sine])
    agree(report.nll, report.nll_interval, scores.nll)
    agree(report.crps, report.crps_interval, scores.crps)
    agree(report.calibrated_coverage, report.calibrated_coverage_interval, scores.calibrated)
    for name in ("coverage", "spread", "rank_correlation"):
        np.testing.assert_allclose(getattr(report, name), getattr(scores, name).astype(np.float64).mean(), rtol=1e-9)
    np.testing.assert_allclose(report.median_mse, np.median(scores.mse.astype(np.float64)), rtol=1e-9)
    assert (report.scale, report.tasks) == (1.7, 50)


# What can be known


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_default([0], range(4)))
def test_oracle_is_least_squares(seed):
    """Of the family that the task is of."""
    curve, task = draw(seed)
    x, y = np.asarray(task.support.inputs, np.float64)[:, 0], np.asarray(task.support.targets, np.float64)[:, 0]
    at = np.linspace(-5, 5, 9)

    def columns(x):
        return np.stack([np.sin(x), np.cos(x)] if curve.is_sine else [x, np.ones_like(x)], 1)

    ours = Oracle().predict(curve, task.support, jax.random.key(0), single(at))
    np.testing.assert_allclose(ours, [columns(at) @ np.linalg.lstsq(columns(x), y)[0]], atol=1e-3)


@pytest.mark.slow
def test_references_in_their_order():
    """Who sees the points beats who does not; Bayes' mean is about as good as knowing the family, on these tasks."""
    zero, oracle, bayes = (
        np.asarray(evaluate_functions(predictor, 5, 0, 80).mse, np.float64)
        for predictor in (Constant(single([0.0])), Oracle(), Bayes(100))
    )
    assert oracle.mean() < 0.1 * zero.mean()
    assert bayes.mean() < 0.1 * zero.mean()
    difference = bayes - oracle
    assert difference.mean() < 3 * difference.std() / np.sqrt(80)


@pytest.mark.slow
def test_draws_of_the_posterior_are_calibrated():
    """What noise and prior leave open is covered as often as it says, and no single function is more likely."""
    bayes, mean = (evaluate_functions(predictor, 5, 0, 150) for predictor in (Bayes(200), Oracle()))
    np.testing.assert_allclose(bayes.coverage.mean(), 0.9, atol=0.03)
    assert bayes.nll.mean() < mean.nll.mean()
    few = SinesAndLines(5, 3).draw(jax.random.key(5))
    x = few[1].query.inputs[:, 0]
    drawn = Bayes(20_000).predict(few[0], few[1].support, jax.random.key(0), x)
    known = posterior(few[1].support)
    np.testing.assert_allclose(drawn.mean(0), known.mean(x), atol=5 * float(drawn.std(0).max()) / np.sqrt(20_000))


# Ambiguous tasks


@pytest.mark.slow
@pytest.mark.parametrize(("sines", "both"), [(5, 1), (2, 1), (0, 0), (10, 0)])
def test_samples_of_both_families(sines, both):
    ours = examine_ambiguous(SomeSines(sines), 5, ambiguous_tasks(5, 0, 3))
    assert ours.sine_shares == [sines / 10] * 3
    assert ours.both == both
    assert all(0.25 <= probability <= 0.75 for probability in ours.posteriors)
    assert len(set(ours.posteriors)) == 3


def test_share_of_tasks_with_both():
    """A tenth of the samples, at least, has to be of each family."""
    assert Ambiguity([0.05, 0.11, 0.5, 0.89, 0.95, 0.0, 1.0, 0.3], [0.5] * 8).both == 0.5
    assert Ambiguity([0.1, 0.9], [0.5] * 2).both == 1
    assert np.isnan(examine_ambiguous(SomeSines(5), 5, []).both)
