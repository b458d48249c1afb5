"""LEORegressor as scikit-learn knows regressors."""

import pickle

import equinox as eqx
import jax
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from metaleo.checkpoint import MODELS, embedded_model, load_model
from metaleo.estimator import LEORegressor
from metaleo.learners import LEO
from metaleo.model.network import Network, gaussian_nll
from metaleo.tasks.functions import points
from small import close, make_learner, message

X = np.array([[-4.0], [-2.0], [0.5], [2.0], [4.0]])
SINE = 3 * np.sin(X[:, 0] - 1)
GRID = np.linspace(-5, 5, 21)[:, None]


@pytest.fixture(scope="module")
def fitted():
    return LEORegressor(n_functions=32).fit(X, SINE)


def test_five_points_of_a_sine_are_enough(fitted):
    """Also between the points, where a Gaussian process with its default kernel knows nothing."""
    truth = 3 * np.sin(GRID[:, 0] - 1)
    ours = np.mean((fitted.predict(GRID) - truth) ** 2)
    theirs = np.mean((GaussianProcessRegressor(alpha=0.09).fit(X, SINE).predict(GRID) - truth) ** 2)
    assert ours < 0.4
    assert ours < theirs


def test_mean_deviation_and_samples_agree(fitted):
    mean, deviation = fitted.predict(GRID, return_std=True)
    functions = fitted.sample_y(GRID, n_samples=32)
    assert functions.shape == (21, 32)
    np.testing.assert_allclose(functions.mean(1), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(functions.std(1), deviation, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(fitted.predict(GRID), mean)


def test_samples_follow_their_random_state(fitted):
    one, same, other = (fitted.sample_y(GRID, 3, random_state=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert fitted.sample_y(GRID, 40).shape == (21, 40)  # more than there are


def test_fit_is_adapt(fitted):
    """The kept networks are those that the learner adapts with the same keys."""
    leo = load_model(embedded_model("sines-and-lines")).learner
    seed = np.random.RandomState(0).randint(2**31)
    key = jax.random.split(jax.random.key(seed), 32)[3]
    head = leo.adapt(points(*(jax.numpy.asarray(v, np.float32) for v in (X[:, 0], SINE))), None, key).head
    close(fitted.parameters_[3], head.parameters, 1e-3)


def test_any_number_of_points_without_compiling_anew(fitted, count_compilations):
    with count_compilations() as compilations:
        LEORegressor(n_functions=32).fit(X[:3], SINE[:3]).predict(GRID[:20])
    assert not compilations
    few = LEORegressor(n_functions=8).fit(X[:1], SINE[:1])
    assert np.isfinite(few.predict(GRID)).all()


def test_works_with_the_tools_of_scikit_learn(fitted):
    again = clone(fitted).fit(X, SINE)
    np.testing.assert_array_equal(again.predict(GRID), fitted.predict(GRID))
    revived = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(revived.predict(GRID), fitted.predict(GRID))
    assert fitted.score(X, SINE) > 0.9
    shifted = make_pipeline(FunctionTransformer(lambda x: x - 100), LEORegressor(n_functions=32)).fit(X + 100, SINE)
    np.testing.assert_allclose(shifted.predict(GRID + 100), fitted.predict(GRID), atol=1e-3)
    assert len(cross_val_score(LEORegressor(n_functions=8), X, SINE, cv=2)) == 2
    assert fitted.get_params() == {"model": None, "n_functions": 32, "random_state": 0}


def test_a_column_of_targets_gives_a_column():
    column = LEORegressor(n_functions=8).fit(X, SINE[:, None])
    assert column.predict(GRID).shape == (21, 1)
    assert column.sample_y(GRID, 2).shape == (21, 1, 2)


def test_a_leo_of_your_own():
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    leo = LEO.init(jax.random.key(0), Network.of(model, gaussian_nll(1.0), (2,), (3,)), latent=4, latent_step_size=0.01)
    regressor = LEORegressor(leo, n_functions=4).fit(np.eye(2), np.ones((2, 3)))
    assert regressor.predict(np.eye(2)).shape == (2, 3)
    assert clone(regressor).model.network is leo.network  # nothing compiles anew


def test_every_model_of_the_package_loads():
    for name in MODELS:
        assert load_model(embedded_model(name)).header["kind"] == "model"


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda: LEORegressor().fit(np.ones((5, 2)), SINE), "X has 2 features; the model was trained for 1"),
        (lambda: LEORegressor().fit(X, np.ones((5, 2))), "y has 2 numbers per example"),
        (lambda: LEORegressor(n_functions=0).fit(X, SINE), "n_functions must be a whole number"),
        (lambda: LEORegressor("nowhere").fit(X, SINE), "nowhere does not exist"),
        (lambda: LEORegressor(make_learner()).fit(X, SINE), "the model classifies"),
        (lambda: LEORegressor(make_learner("maml")).fit(X, SINE), "not MAML"),
        (lambda: LEORegressor(n_functions=8).fit(X, SINE).sample_y(X, 0), "n_samples must be at least 1"),
        (lambda: LEORegressor().fit(1e30 * X, 1e30 * SINE), "not finite"),
        (lambda: embedded_model("nonsense"), "it has sines-and-lines"),
    ],
)
def test_bad_input(act, what):
    assert what in message(act)


def test_what_scikit_learn_refuses_by_itself():
    with pytest.raises(NotFittedError):
        LEORegressor().predict(X)
    with pytest.raises(ValueError, match="NaN"):
        LEORegressor().fit(X * np.nan, SINE)
    with pytest.raises(ValueError, match="inconsistent"):
        LEORegressor().fit(X, SINE[:3])
