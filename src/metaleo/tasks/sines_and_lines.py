"""Sines and lines: noisy functions of one number, observed at a few points (Section 4.1, Appendix A.1)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray

from metaleo.errors import BadInput
from metaleo.tasks.task import Batch, Task, Tasks

DOMAIN = (-5.0, 5.0)
NOISE = 0.3
"""Standard deviation of the noise on every target."""
AMPLITUDE, PHASE = (0.1, 5.0), (0.0, jnp.pi)
SLOPE, INTERCEPT = (-3.0, 3.0), (-3.0, 3.0)
TARGETS = (-19.0, 19.0)
"""Targets of all tasks but for rare noise: the steepest lines reach ± 18."""
CELLS = 160
"""Grid cells per parameter when computing posteriors."""


class Curve(eqx.Module):
    """A sin(x - φ), or a x + b."""

    is_sine: Bool[Array, ""]
    scale: Float[Array, ""]  # amplitude, or slope
    shift: Float[Array, ""]  # phase, or intercept

    def __call__(self, x: Float[Array, "*points"]) -> Float[Array, "*points"]:
        return jnp.where(self.is_sine, self.scale * jnp.sin(x - self.shift), self.scale * x + self.shift)


class SinesAndLines(Tasks):
    """An endless stream of regression tasks: half are sines, half are lines, observed with noise.

    Attributes:
        shot: Points in the support set.
        query: Points in the query set.

    Examples:
        >>> import jax
        >>> from metaleo import SinesAndLines
        >>> SinesAndLines(shot=5).sample(jax.random.key(0)).support.inputs.shape
        (5, 1)
    """

    shot: int = eqx.field(static=True, default=5)
    query: int = eqx.field(static=True, default=15)

    def __post_init__(self) -> None:
        for name in ("shot", "query"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")

    def sample(self, key: PRNGKeyArray) -> Task:
        return self.draw(key)[1]

    def draw(self, key: PRNGKeyArray) -> tuple[Curve, Task]:
        """Draw a function, and a task of noisy points on it."""
        curve_key, input_key, noise_key = jax.random.split(key, 3)
        curve = draw_curve(curve_key)
        x = jax.random.uniform(input_key, (self.shot + self.query,), minval=DOMAIN[0], maxval=DOMAIN[1])
        y = curve(x) + NOISE * jax.random.normal(noise_key, x.shape)
        return curve, Task(points(x[: self.shot], y[: self.shot]), points(x[self.shot :], y[self.shot :]))


def draw_curve(key: PRNGKeyArray) -> Curve:
    family_key, scale_key, shift_key = jax.random.split(key, 3)
    is_sine = jax.random.bernoulli(family_key)
    scale, shift = jax.random.uniform(scale_key), jax.random.uniform(shift_key)

    def between(ends: tuple[float, float], share: Float[Array, ""]) -> Float[Array, ""]:
        return ends[0] + (ends[1] - ends[0]) * share

    return Curve(
        is_sine,
        jnp.where(is_sine, between(AMPLITUDE, scale), between(SLOPE, scale)),
        jnp.where(is_sine, between(PHASE, shift), between(INTERCEPT, shift)),
    )


def points(x: Float[Array, " point"], y: Float[Array, " point"]) -> Batch:
    return Batch(x[:, None], y[:, None], jnp.ones(len(x), bool))


# Least squares and posteriors


def bases(x: Float[Array, " point"]) -> Float[Array, "2 point 2"]:
    """Both families are linear in two numbers: A cos φ, -A sin φ multiply sin x, cos x; and a, b multiply x, 1."""
    return jnp.stack([jnp.stack([jnp.sin(x), jnp.cos(x)], 1), jnp.stack([x, jnp.ones_like(x)], 1)])


def fit(x: Float[Array, " point"], y: Float[Array, " point"]) -> tuple[Float[Array, "2 2"], Float[Array, " 2"]]:
    """The best sine and the best line by least squares, with parameters of any size.

    Returns two coefficients and the RMS residual of each family. It orthogonalises the two basis functions at the
    points; if the second is a multiple of the first there, it is left out.
    """

    def fit_one(basis: Float[Array, "point 2"]) -> tuple[Float[Array, " 2"], Float[Array, ""]]:
        first, second = basis.T
        length = jnp.linalg.norm(first)
        unit = first / jnp.maximum(length, 1e-12)
        shared = unit @ second
        rest = second - shared * unit
        rest -= (unit @ rest) * unit  # again, to remove rounding error
        own = jnp.linalg.norm(rest)
        other = jnp.where(own > 1e-5 * jnp.linalg.norm(second), rest / jnp.maximum(own, 1e-12), 0.0)
        slope = (other @ y) / jnp.maximum(own, 1e-12)
        residual = y - (unit @ y) * unit
        residual -= (other @ residual) * other
        coefficients = jnp.stack([(unit @ y - slope * shared) / jnp.maximum(length, 1e-12), slope])
        return coefficients, jnp.sqrt(jnp.mean(residual**2))

    return jax.vmap(fit_one)(bases(x))


class Posterior(eqx.Module):
    """The posterior given some points, by Bayes' rule over both families and all parameters in their ranges."""

    sine: Float[Array, ""]  # probability that the function is a sine
    coefficients: Float[Array, "2 2"]  # posterior mean, for sines and for lines
    best_rms: Float[Array, " 2"]  # of the best sine and the best line on the grid

    def mean(self, x: Float[Array, " point"]) -> Float[Array, " point"]:
        """The posterior mean at x, which minimises the expected squared error."""
        families = jnp.einsum("fpc,fc->fp", bases(x), self.coefficients)
        return self.sine * families[0] + (1 - self.sine) * families[1]


class Candidates(eqx.Module):
    """All functions on a grid over both parameters of both families, with their posterior probabilities."""

    coefficients: Float[Array, "2 cell 2"]
    squares: Float[Array, "2 cell"]  # squared residuals, summed over the points
    odds: Float[Array, "2 cell"]

    def draw(self, key: PRNGKeyArray, count: int, x: Float[Array, " point"]) -> Float[Array, "draw point"]:
        """Sample functions from the posterior, and evaluate them at x."""
        below = jnp.cumsum(self.odds.reshape(-1))
        cells = jnp.searchsorted(below, below[-1] * jax.random.uniform(key, (count,)))
        cells = jnp.minimum(cells, len(below) - 1)
        drawn = self.coefficients.reshape(-1, 2)[cells]
        return jnp.einsum("dpc,dc->dp", bases(x)[cells // self.odds.shape[1]], drawn)


def candidates(support: Batch) -> Candidates:
    """Functions and their posterior probabilities, by Bayes' rule; each family has half of the prior."""
    x, y = support.inputs[:, 0], support.targets[:, 0]

    def grid(ends: tuple[float, float]) -> Float[Array, " cell"]:
        return ends[0] + (ends[1] - ends[0]) * (jnp.arange(CELLS, dtype=x.dtype) + 0.5) / CELLS

    amplitude, phase = jnp.meshgrid(grid(AMPLITUDE), grid(PHASE))
    slope, intercept = jnp.meshgrid(grid(SLOPE), grid(INTERCEPT))
    sines = jnp.stack([amplitude * jnp.cos(phase), -amplitude * jnp.sin(phase)], -1).reshape(-1, 2)
    lines = jnp.stack([slope, intercept], -1).reshape(-1, 2)
    coefficients = jnp.stack([sines, lines])
    errors = y[None, None, :] - jnp.einsum("fkc,fpc->fkp", coefficients, bases(x))
    squares = jnp.sum(errors**2, -1, where=support.mask[None, None, :])
    odds = jax.nn.softmax(-squares.reshape(-1) / (2 * NOISE**2)).reshape(squares.shape)
    return Candidates(coefficients, squares, odds)


def posterior(support: Batch) -> Posterior:
    """Summarise the posterior given a support set."""
    found = candidates(support)
    families = found.odds.sum(1)
    means = jnp.einsum("fk,fkc->fc", found.odds, found.coefficients) / jnp.maximum(families, 1e-30)[:, None]
    count = jnp.sum(support.mask.astype(found.odds.dtype))
    return Posterior(families[0], means, jnp.sqrt(found.squares.min(1) / count))


def is_ambiguous(known: Posterior, least: float = 0.25) -> Bool[Array, ""]:
    """Whether a sine and a line both explain the points within the noise, and neither is much more probable."""
    return (known.best_rms <= NOISE).all() & (jnp.minimum(known.sine, 1 - known.sine) >= least)


def looks_like_a_sine(x: Float[Array, " point"], y: Float[Array, " point"]) -> Bool[Array, ""]:
    """Whether a function, given at many points, is nearer to a sine than to a line."""
    _, rms = fit(x, y)
    return rms[0] < rms[1]


@jax.jit
def may_be_ambiguous(tasks: SinesAndLines, keys: Key[Array, " task"]) -> Bool[Array, " task"]:
    """A fast necessary condition for ambiguity: it misses no ambiguous task, at a hundredth of a posterior's cost."""

    def one(key: PRNGKeyArray) -> Bool[Array, ""]:
        support = tasks.sample(key).support
        return (fit(support.inputs[:, 0], support.targets[:, 0])[1] <= NOISE).all()

    return jax.vmap(one)(keys)


@jax.jit
def task_is_ambiguous(tasks: SinesAndLines, key: PRNGKeyArray) -> Bool[Array, ""]:
    return is_ambiguous(posterior(tasks.sample(key).support))


def find_ambiguous(tasks: SinesAndLines, key: PRNGKeyArray, count: int, attempts: int = 200_000) -> list[PRNGKeyArray]:
    """Keys of the first `count` ambiguous tasks of the stream, or of as many as `attempts` tasks contain."""
    chunk, found = 10_000, []
    for first in range(0, attempts, chunk):
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(first, first + chunk))
        likely = np.asarray(may_be_ambiguous(tasks, keys))[: attempts - first]
        for index in np.flatnonzero(likely):
            if len(found) == count:
                return found
            if task_is_ambiguous(tasks, keys[index]):
                found.append(keys[index])
    return found
