"""Sines and lines against the paper's Appendix A.1, NumPy's least squares, and Bayes' rule by draws of the prior."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from helpers.marks import by_default
from helpers.small import message, pad
from metaleo.tasks.sines_and_lines import (
    Curve,
    Posterior,
    SinesAndLines,
    find_ambiguous,
    fit,
    is_ambiguous,
    looks_like_a_sine,
    points,
    posterior,
)
from metaleo.tasks.task import key_apart

DRAWN = 4000


def keys(count: int, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def flat(batch):
    """The x and y of a batch, or of many, in double precision."""
    return np.asarray(batch.inputs, np.float64)[..., 0], np.asarray(batch.targets, np.float64)[..., 0]


def value(is_sine, scale, shift, x):
    """A sin(x - φ), or a x + b, of many curves."""
    is_sine, scale, shift = (np.asarray(part)[:, None] for part in (is_sine, scale, shift))
    return np.where(is_sine, scale * np.sin(x - shift), scale * x + shift)


def columns(x):
    """What a sine and a line are sums of."""
    return np.stack([np.sin(x), np.cos(x)], 1), np.stack([x, np.ones_like(x)], 1)


def least_squares(x, y):
    """The best numbers and the RMS of both families."""
    solved = [np.linalg.lstsq(matrix, y)[0] for matrix in columns(x)]
    residuals = [y - matrix @ numbers for matrix, numbers in zip(columns(x), solved, strict=True)]
    return np.array(solved), np.sqrt(np.mean(np.square(residuals), axis=1))


def batch(x, y):
    return points(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))


known = jax.jit(posterior)


# Tasks


@pytest.fixture(scope="module")
def drawn():
    """Many curves and a task of each."""
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(SinesAndLines(5, 15).draw))(keys(DRAWN)))


def test_half_are_sines(drawn):
    assert abs(drawn[0].is_sine.mean() - 0.5) < 4 * 0.5 / np.sqrt(DRAWN)


@pytest.mark.parametrize(
    ("sine", "name", "low", "high"),
    [(True, "scale", 0.1, 5), (True, "shift", 0, np.pi), (False, "scale", -3, 3), (False, "shift", -3, 3)],
)
def test_parameters_are_uniform_in_the_ranges_of_the_paper(drawn, sine, name, low, high):
    """Amplitude, phase, slope and intercept of Appendix A.1."""
    values = getattr(drawn[0], name)[drawn[0].is_sine == sine]
    assert low - 1e-6 <= values.min() < low + 0.01 * (high - low)
    assert high - 0.01 * (high - low) < values.max() <= high + 1e-6
    assert stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > 0.01


@pytest.mark.parametrize("sine", [True, False])
def test_the_two_parameters_are_independent(drawn, sine):
    chosen = drawn[0].is_sine == sine
    correlation = np.corrcoef(drawn[0].scale[chosen], drawn[0].shift[chosen])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(chosen.sum())


@pytest.mark.parametrize("part", ["support", "query"])
def test_inputs_are_uniform(drawn, part):
    x, _ = flat(getattr(drawn[1], part))
    assert np.abs(x).max() <= 5
    assert stats.kstest(x.ravel(), stats.uniform(-5, 10).cdf).pvalue > 0.01
    assert abs(np.corrcoef(x[:, 0], x[:, 1])[0, 1]) < 4 / np.sqrt(DRAWN)


@pytest.mark.parametrize("part", ["support", "query"])
def test_targets_are_the_curve_and_noise(drawn, part):
    """Support and query are of the same curve; what is left is N(0, 0.3²), whatever the others and the inputs are."""
    curve, task = drawn
    x, y = flat(getattr(task, part))
    noise = y - value(curve.is_sine, curve.scale, curve.shift, x)
    assert stats.kstest(noise.ravel() / 0.3, "norm").pvalue > 0.01
    assert abs(noise.std() - 0.3) < 4 * 0.3 / np.sqrt(2 * noise.size)
    for one, other in (
        (noise[:, 0], noise[:, -1]),
        (noise[:, 0], x[:, 0]),
        (x[:, 0], curve.scale),
        (x[:, 0], curve.shift),
    ):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(DRAWN)


@pytest.mark.parametrize(("shot", "query"), [(5, 15), (1, 1), (3, 8)])
def test_shapes(shot, query):
    task = SinesAndLines(shot, query).sample(jax.random.key(0))
    for part, rows in ((task.support, shot), (task.query, query)):
        assert part.inputs.shape == part.targets.shape == (rows, 1)
        assert part.mask.shape == (rows,)
        assert part.mask.all()


def test_the_same_key_gives_the_same_task(drawn):
    again = jax.jit(jax.vmap(SinesAndLines().sample))(keys(DRAWN))
    jax.tree.map(np.testing.assert_array_equal, again, drawn[1])
    assert len(np.unique(drawn[0].scale)) > 0.99 * DRAWN
    assert len(np.unique(drawn[1].support.inputs[:, 0])) > 0.99 * DRAWN


def test_what_is_picked_and_fetched_is_the_sample():
    """One by one or many at once, compiled or not."""
    tasks, many = SinesAndLines(4, 3), keys(6)
    at_once = jax.jit(jax.vmap(tasks.gather))(jax.vmap(tasks.sample_indices)(many))
    for index, key in enumerate(many):
        one = tasks.sample(key)
        jax.tree.map(np.testing.assert_array_equal, tasks.gather(tasks.sample_indices(key)), one)
        jax.tree.map(lambda a, b, i=index: np.testing.assert_allclose(a[i], b, atol=1e-5), at_once, one)


@pytest.mark.parametrize("name", ["shot", "query"])
@pytest.mark.parametrize("count", [0, -2])
def test_tasks_without_points_are_refused(name, count):
    text = message(lambda: SinesAndLines(**{"shot": 5, "query": 5, name: count}))
    assert text == f"{name}={count} must be at least 1"


@pytest.mark.parametrize(("sine", "scale", "shift"), [(True, 2.5, 0.7), (False, -1.5, 2.0)])
def test_values_of_a_curve(sine, scale, shift):
    x = np.linspace(-5, 5, 23)
    curve = Curve(jnp.array(sine), jnp.float32(scale), jnp.float32(shift))
    expected = value([sine], [scale], [shift], x)[0]
    np.testing.assert_allclose(curve(jnp.asarray(x, jnp.float32)), expected, atol=1e-5)
    np.testing.assert_allclose(curve(jnp.float32(x[3])), expected[3], atol=1e-5)


# Least squares


@pytest.mark.parametrize("count", by_default([5], [5, 40]))
def test_fit_agrees_with_numpy(drawn, count, float64):
    """Of sines and lines alike, both families, at a task's five points and at many."""
    for one_x, one_y in zip(*(part.reshape(-1, count)[:12] for part in flat(drawn[1].support)), strict=True):
        coefficients, rms = fit(jnp.asarray(one_x), jnp.asarray(one_y))
        expected, expected_rms = least_squares(one_x, one_y)
        np.testing.assert_allclose(coefficients, expected, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(rms, expected_rms, rtol=1e-8)


def test_fit_in_single_precision(drawn):
    """The residual is right to a hundredth of the noise, task by task."""
    x, y = flat(drawn[1].support)
    rms = jax.jit(jax.vmap(fit))(*(jnp.asarray(part[:300], jnp.float32) for part in (x, y)))[1]
    expected = [least_squares(*one)[1] for one in zip(x[:300], y[:300], strict=True)]
    np.testing.assert_allclose(rms, expected, atol=3e-3)


SEEN = np.linspace(-5, 5, 101)


@pytest.mark.parametrize("noise", [0, 0.3])
@pytest.mark.parametrize(
    ("sine", "function"),
    [
        (True, lambda x: 2 * np.sin(x - 1)),
        (True, lambda x: 0.8 * np.cos(x)),
        (True, lambda x: 3 * np.sin(x) + 0.5),
        (False, lambda x: 0.5 * x - 2),
        (False, lambda x: -3 * x + 1),
        (False, lambda x: 1.5 + 0 * x),
        (False, lambda x: x + np.sin(x)),
    ],
)
def test_what_looks_like_a_sine(sine, function, noise):
    y = function(SEEN) + noise * np.random.default_rng(0).normal(size=SEEN.shape)
    assert looks_like_a_sine(jnp.asarray(SEEN, jnp.float32), jnp.asarray(y, jnp.float32)) == sine


# Bayes' rule


@functools.cache
def prior(count=500_000):
    """Curves drawn by NumPy, as many sines as lines."""
    random = np.random.default_rng(0)
    amplitude, phase = random.uniform(0.1, 5, count), random.uniform(0, np.pi, count)
    sines = np.stack([amplitude * np.cos(phase), -amplitude * np.sin(phase)])
    return sines, random.uniform(-3, 3, (2, count))


def by_drawing(x, y, at):
    """P(sine) and the mean function, each with its standard error: draws of the prior weighted by likelihood."""

    def functions(x):
        return np.concatenate([matrix @ draws for matrix, draws in zip(columns(x), prior(), strict=True)], 1)

    weights = special.softmax(-((y[:, None] - functions(x)) ** 2).sum(0) / (2 * 0.3**2))
    values = functions(at)
    values = np.concatenate([np.repeat([1.0, 0.0], len(weights) // 2)[None], values])
    means = values @ weights
    errors = np.sqrt(((values - means[:, None]) ** 2) @ weights**2)
    return means, errors


@pytest.mark.parametrize("shot", by_default([3], [1, 2, 3, 5]))
def test_posterior_agrees_with_draws_of_the_prior(shot):
    """The probability of a sine, and the mean function, within the error of half a million draws of each family."""
    at = np.array([-4.5, -2.0, 0.0, 1.5, 4.0])
    for seed in range(3):
        support = SinesAndLines(shot, 1).sample(jax.random.key(seed)).support
        means, errors = by_drawing(*flat(support), at)
        ours = known(support)
        assert errors.max() < 0.1
        assert abs(ours.sine - means[0]) < 4.5 * errors[0] + 2e-3
        assert (np.abs(ours.mean(jnp.asarray(at, jnp.float32)) - means[1:]) < 4.5 * errors[1:] + 5e-3).all()


@pytest.fixture(scope="module")
def judged():
    """Posteriors of many tasks with two points, with what is true of them."""
    tasks = SinesAndLines(2, 1)

    def one(key):
        curve, task = tasks.draw(key)
        x = task.query.inputs[:, 0]
        ours = posterior(task.support)
        return curve.is_sine, ours.sine, curve(x)[0], ours.mean(x)[0]

    return [np.asarray(part, np.float64) for part in jax.jit(lambda many: jax.lax.map(one, many))(keys(400))]


@pytest.mark.slow
def test_posterior_is_calibrated(judged):
    """Of tasks that are sines with probability p, a share p is; also among the doubtful ones."""
    sine, probability, _, _ = judged
    for chosen in (probability > -1, (probability > 0.1) & (probability < 0.9)):
        error = np.sqrt((probability * (1 - probability))[chosen].sum())
        assert error > 2
        assert abs((sine - probability)[chosen].sum()) < 3.5 * error


def test_no_factor_improves_the_posterior_mean(judged):
    """Its error is not correlated with it."""
    _, _, truth, mean = judged
    product = (truth - mean) * mean
    assert abs(product.mean()) < 3.5 * product.std() / np.sqrt(len(product))
    assert np.mean((truth - mean) ** 2) < 0.7 * np.mean(truth**2)


def test_padding_changes_nothing():
    support = SinesAndLines().sample(jax.random.key(1)).support
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), known(pad(support, 3)), known(support)
    )


@pytest.mark.parametrize(("sine", "y"), [(1, 4 * np.sin(SEEN[::10] - 1)), (0, 2 * SEEN[::10] - 1)])
def test_what_is_obvious(sine, y):
    """Of points on a curve, the family is known and so are its parameters."""
    ours = known(batch(SEEN[::10], y))
    assert abs(ours.sine - sine) < 1e-6
    family = 1 - sine
    expected = [[4 * np.cos(1), -4 * np.sin(1)], [2, -1]][family]
    np.testing.assert_allclose(ours.coefficients[family], expected, atol=0.02)
    np.testing.assert_allclose(ours.mean(jnp.asarray(SEEN[::10], jnp.float32)), y, atol=0.05)
    assert ours.best_rms[family] < 0.1
    assert ours.best_rms[1 - family] > 1


def test_best_line_within_the_range():
    """Against bounded least squares, to within the grid; no better than the best of all lines or sines."""
    for seed in range(5):
        support = SinesAndLines().sample(jax.random.key(seed)).support
        x, y = flat(support)
        rms = np.asarray(known(support).best_rms)
        bounded = optimize.lsq_linear(columns(x)[1], y, (-3, 3))
        expected = np.sqrt(2 * bounded.cost / len(x))
        assert expected - 1e-5 <= rms[1] <= np.hypot(expected, 0.12)
        assert (rms >= least_squares(x, y)[1] - 1e-3).all()


@pytest.mark.parametrize(
    ("family", "y"),
    [(0, 3 * np.cos(SEEN[::20])), (0, 8 * np.sin(SEEN[::20] - 1)), (1, 5 * SEEN[::20]), (1, SEEN[::20] + 6)],
)
def test_nothing_outside_the_ranges_is_held_possible(family, y):
    """A phase, an amplitude, a slope and an intercept that no task has."""
    assert least_squares(SEEN[::20], y)[1][family] < 1e-9
    assert known(batch(SEEN[::20], y)).best_rms[family] > 1


# Ambiguous tasks


@pytest.mark.parametrize(
    ("sine", "rms", "expected"),
    [
        (0.5, (0.2, 0.29), True),
        (0.26, (0.2, 0.2), True),
        (0.74, (0.0, 0.0), True),
        (0.24, (0.2, 0.2), False),
        (0.76, (0.2, 0.2), False),
        (0.5, (0.31, 0.1), False),
        (0.5, (0.1, 0.31), False),
    ],
)
def test_what_is_ambiguous(sine, rms, expected):
    """Both within the noise of 0.3, neither under a quarter."""
    assert is_ambiguous(Posterior(jnp.float32(sine), jnp.zeros((2, 2)), jnp.array(rms))) == expected


TASKS = SinesAndLines(5, 1)
STREAM = jax.random.key(7)


@pytest.fixture(scope="module")
def ambiguous():
    return find_ambiguous(TASKS, STREAM, 6, attempts=10_000)


@pytest.mark.slow
def test_ambiguous_tasks_are_explained_by_both(ambiguous):
    """By NumPy: the best sine and the best line are within 0.3 RMS, and draws of the prior are of both families."""
    assert len(ambiguous) == 6
    for key in ambiguous:
        x, y = flat(TASKS.sample(key).support)
        assert (least_squares(x, y)[1] <= 0.3).all()
        assert optimize.lsq_linear(columns(x)[1], y, (-3, 3)).cost <= 0.3**2 * 5 / 2
        means, errors = by_drawing(x, y, x)
        assert 0.25 - 4.5 * errors[0] - 2e-3 <= means[0] <= 0.75 + 4.5 * errors[0] + 2e-3


@pytest.mark.slow
def test_the_first_of_the_stream_are_found(ambiguous):
    """In order, and none is left out before the last."""
    stream = jax.vmap(lambda i: jax.random.fold_in(STREAM, i))(jnp.arange(10_000))
    numbers = {data.tobytes(): index for index, data in enumerate(np.asarray(jax.random.key_data(stream)))}
    found = [numbers[np.asarray(jax.random.key_data(key)).tobytes()] for key in ambiguous]
    candidates = []
    for index, (x, y) in enumerate(zip(*flat(jax.vmap(TASKS.sample)(stream[: found[-1] + 1]).support), strict=True)):
        if (least_squares(x, y)[1] <= 0.301).all() and is_ambiguous(known(batch(x, y))):
            candidates.append(index)
    assert found == candidates


@pytest.mark.slow
def test_more_ambiguous_tasks_than_there_are():
    """Then as many as there are: with twenty points hardly any."""
    found = find_ambiguous(SinesAndLines(20, 1), STREAM, 1000, attempts=10_000)
    assert len(found) < 20
    assert find_ambiguous(TASKS, STREAM, 0) == []


def test_what_is_done_to_a_task_has_a_key_of_its_own():
    """Small numbers folded into a key are the keys that `split` gives."""
    key = jax.random.key(3)
    assert jax.random.fold_in(key, 1) == jax.random.split(key, 3)[1]
    assert not (key_apart(key) == jax.random.split(key, 200)).any()
