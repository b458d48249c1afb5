"""LEORegressor and LEOClassifier as scikit-learn knows regressors and classifiers."""

import functools
import pickle

import equinox as eqx
import jax
import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

from helpers.small import DIM, close, make_learner, make_model, message
from metaleo.checkpoints import BUILTIN_MODELS, TrainedModel, builtin_model_path, load_model, save_model
from metaleo.data import load_data
from metaleo.estimators.classifier import LEOClassifier, adapt, softmax
from metaleo.estimators.regressor import LEORegressor
from metaleo.learners import LEO
from metaleo.learners.registry import UNTRAINED, Structure
from metaleo.nn.heads import Network, gaussian_nll, linear_network
from metaleo.tasks.sines_and_lines import points

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
    leo = load_model(builtin_model_path("sines-and-lines")).learner
    seed = np.random.RandomState(0).randint(2**31)
    key = jax.random.split(jax.random.key(seed), 32)[3]
    support = points(*(jax.numpy.asarray(v, np.float32) for v in (X[:, 0], SINE)))
    close(fitted.parameters_[3], jax.jit(lambda key: leo.adapt(support, None, key).head.parameters)(key), 1e-3)


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
    for name in BUILTIN_MODELS:
        assert load_model(builtin_model_path(name)).header["kind"] == "model"


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
        (lambda: builtin_model_path("nonsense"), "in this package; it has"),
    ],
)
def test_bad_input(act, what):
    assert what in message(act)


def test_points_far_from_those_of_meta_training_are_told():
    """In one line, where they are fitted and where they are asked for."""
    far = np.array([[100.0], [200.0], [300.0]])
    with pytest.warns(UserWarning, match=r"^x goes from 100 to 300, and the model was trained on x from -5 to 5: .*$"):
        fitted = LEORegressor(n_functions=8).fit(far, [1.0, 2.0, 3.0])
    with pytest.warns(UserWarning, match="x goes from 150 to 150"):
        fitted.predict([[150.0]])
    with pytest.warns(UserWarning, match="^y goes from 1e[+]06 to 3e[+]06, and the model was trained on y from -19 to"):
        LEORegressor(n_functions=8).fit([[-5.0], [5.0], [0.0]], [1e6, 2e6, 3e6])
    LEORegressor(n_functions=8).fit([[-5.0], [5.0], [0.0]], [18.0, 2.0, 3.0]).predict([[5.0]])  # within: no warning


def test_what_scikit_learn_refuses_by_itself():
    with pytest.raises(NotFittedError):
        LEORegressor().predict(X)
    with pytest.raises(ValueError, match="NaN"):
        LEORegressor().fit(X * np.nan, SINE)
    with pytest.raises(ValueError, match="inconsistent"):
        LEORegressor().fit(X, SINE[:3])


# LEOClassifier.


class AnyWidth(LEOClassifier):
    """A LEO for rows of whatever length, not trained."""

    def _resolve(self, X):  # noqa: N803
        return TrainedModel(small_leo(X.shape[1]), Structure(dim=X.shape[1]), {})


@functools.cache
def small_leo(dim):
    sizes = {"latent": 4, "latent_steps": 1, "finetune_steps": 1}
    return LEO.init(jax.random.key(0), linear_network(dim), **sizes, finetune_step_size=0.1)


MESSAGES = "ignore::sklearn.exceptions.SkipTestWarning"


@pytest.mark.filterwarnings(MESSAGES)
@parametrize_with_checks([AnyWidth()])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings(MESSAGES)
@parametrize_with_checks([LEOClassifier(name) for name in ("cl2n", "logistic-regression", "nearest-centroid")])
def test_scikit_learns_checks_of_other_learners(estimator, check):
    check(estimator)


WIDTH = "the input width is fixed by meta-training"
EXPECTED = dict.fromkeys(
    (
        "check_classifier_data_not_an_array", "check_classifiers_classes", "check_classifiers_train",
        "check_decision_proba_consistency", "check_dict_unchanged", "check_dont_overwrite_parameters",
        "check_dtype_object", "check_estimators_dtypes", "check_estimators_fit_returns_self",
        "check_estimators_nan_inf", "check_estimators_overwrite_params", "check_estimators_partial_fit_n_features",
        "check_estimators_pickle", "check_f_contiguous_array_estimator", "check_fit2d_1feature",
        "check_fit2d_predict1d", "check_fit_check_is_fitted", "check_fit_idempotent", "check_fit_score_takes_y",
        "check_methods_sample_order_invariance", "check_methods_subset_invariance", "check_n_features_in",
        "check_n_features_in_after_fitting", "check_pipeline_consistency", "check_positive_only_tag_during_fit",
        "check_readonly_memmap_input", "check_supervised_y_2d",
    ),
    WIDTH,
)  # fmt: skip


@pytest.mark.filterwarnings(MESSAGES)
def test_a_model_of_the_package_fails_only_for_its_width():
    """Each check that is expected to fail does so because its rows are too short, and no other fails."""
    results = check_estimator(LEOClassifier(), expected_failed_checks=EXPECTED, on_skip=None, on_fail="raise")
    failed = {result["check_name"]: result["exception"] for result in results if result["status"] == "xfail"}
    assert set(failed) == set(EXPECTED)
    for error in failed.values():
        assert "the model was trained on rows of 640" in f"{error} {error.__cause__} {error.__context__}"


def some_examples(count=8, seed=0, names=("ant", "bee", "cat")):
    """Of the classes in turn."""
    numbers = np.arange(count) % len(names)
    rows = 2 * np.eye(DIM)[numbers] + np.random.default_rng(seed).normal(size=(count, DIM))
    return rows, np.array(names)[numbers]


ROWS, NAMES = some_examples()
QUERY = some_examples(30, 1)[0]


@functools.cache
def own_model():
    return make_model("leo")


def classifier():
    return LEOClassifier(own_model().learner)


@pytest.fixture(scope="module")
def taught():
    return classifier().fit(ROWS, NAMES)


def test_fit_is_adaptation(taught):
    found = adapt(own_model(), ROWS.astype(np.float32), NAMES.tolist())
    expected = found.probabilities(QUERY.astype(np.float32))
    np.testing.assert_array_equal(taught.predict_proba(QUERY), expected)
    np.testing.assert_array_equal(taught.predict(QUERY), np.array(found.classes)[expected.argmax(1)])
    assert taught.classes_.tolist() == ["ant", "bee", "cat"]
    assert taught.score(ROWS, NAMES) > 0.5


def test_probabilities_are_the_softmax_of_the_decisions(taught):
    np.testing.assert_allclose(softmax(taught.decision_function(QUERY)), taught.predict_proba(QUERY))
    two = classifier().fit(ROWS[:6], NAMES[[0, 1, 0, 1, 0, 1]])
    decisions = two.decision_function(QUERY)
    assert decisions.shape == (30,)
    np.testing.assert_allclose(1 / (1 + np.exp(-decisions)), two.predict_proba(QUERY)[:, 1])


@pytest.mark.parametrize(
    ("names", "kind"), [(("x", "y", "z"), "U"), ((7, -3, 20), "i"), ((True, False), "b"), ((0.0, 1.0), "f")]
)
def test_labels_of_every_kind_come_back(names, kind):
    rows, labels = some_examples(8, 0, names)
    fitted = classifier().fit(rows, labels)
    assert fitted.classes_.tolist() == sorted(names)
    assert fitted.predict(QUERY).dtype.kind == kind
    assert set(fitted.predict(QUERY).tolist()) <= set(names)


def test_objects_as_labels(taught):
    again = classifier().fit(ROWS.tolist(), NAMES.astype(object))
    np.testing.assert_array_equal(again.predict(QUERY), taught.predict(QUERY))


def test_partial_fit_is_fit_on_all(taught):
    by_parts = (
        classifier().partial_fit(ROWS[:4], NAMES[:4]).partial_fit(ROWS[4:], NAMES[4:], classes=["ant", "bee", "cat"])
    )
    np.testing.assert_array_equal(by_parts.predict_proba(QUERY), taught.predict_proba(QUERY))
    assert len(by_parts.X_) == 8


def test_partial_fit_may_bring_a_new_class(taught):
    """And `fit` forgets everything from before."""
    grown = classifier().partial_fit(ROWS[[0, 1, 3, 4]], NAMES[[0, 1, 3, 4]])
    assert grown.classes_.tolist() == ["ant", "bee"]
    grown.partial_fit(ROWS[[2]], NAMES[[2]])
    assert grown.classes_.tolist() == ["ant", "bee", "cat"]
    assert grown.predict_proba(QUERY).shape == (30, 3)
    np.testing.assert_array_equal(grown.fit(ROWS, NAMES).predict_proba(QUERY), taught.predict_proba(QUERY))


def test_partial_fit_knows_classes_to_come(taught):
    """As in scikit-learn: one class of those named is enough to begin with, and one without examples is no answer."""
    early = classifier().partial_fit(ROWS[[0]], NAMES[[0]], classes=["cat", "ant", "bee"])
    assert early.classes_.tolist() == ["ant", "bee", "cat"]
    np.testing.assert_array_equal(early.predict_proba(QUERY), np.tile([1.0, 0, 0], (30, 1)))
    assert set(early.predict(QUERY)) == {"ant"}
    assert np.isfinite(early.decision_function(QUERY)).all()
    early.partial_fit(ROWS[[1]], NAMES[[1]])
    two = classifier().fit(ROWS[:2], NAMES[:2])
    np.testing.assert_allclose(early.predict_proba(QUERY)[:, :2], two.predict_proba(QUERY))
    assert (early.predict_proba(QUERY)[:, 2] == 0).all()
    assert early.sample_classifiers(2)[1].predict_proba(QUERY).shape == (30, 3)
    early.partial_fit(ROWS[2:], NAMES[2:], classes=["ant", "bee", "cat"])
    np.testing.assert_array_equal(early.predict_proba(QUERY), taught.predict_proba(QUERY))
    assert "label 'dog' is not among the `classes=`" in message(lambda: early.partial_fit(ROWS[:1], ["dog"]))
    assert "not the same" in message(lambda: early.partial_fit(ROWS[:1], ["ant"], classes=["ant", "dog"]))
    assert early.fit(ROWS[:2], NAMES[:2]).classes_.tolist() == ["ant", "bee"]


def test_many_fits_at_once_are_many_fits():
    tasks = [some_examples(count, count) for count in (6, 8, 12)] + [(ROWS[:4], [1, 0, 1, 0])]
    found = LEOClassifier("cl2n").fit_many(tasks)
    for own, (rows, labels) in zip(found, tasks, strict=True):
        alone = LEOClassifier("cl2n").fit(rows, labels)
        np.testing.assert_array_equal(own.classes_, alone.classes_)
        close(own.predict_proba(QUERY), alone.predict_proba(QUERY))
        np.testing.assert_array_equal(own.X_, alone.X_)
    assert LEOClassifier("cl2n").fit_many([]) == []


@pytest.mark.slow
def test_sampled_classifiers_differ_and_agree_in_the_large(taught):
    drawn = taught.sample_classifiers(100)
    probabilities = np.stack([one.predict_proba(QUERY) for one in drawn])
    assert probabilities.std(0).min() > 1e-4
    logits = np.stack([one.decision_function(QUERY) for one in drawn])
    np.testing.assert_allclose(logits.mean(0), taught.decision_function(QUERY), atol=6 * logits.std(0).max() / 10)
    same, other = (taught.sample_classifiers(1, random_state=seed)[0].decision_function(QUERY) for seed in (0, 1))
    np.testing.assert_array_equal(same, taught.sample_classifiers(1)[0].decision_function(QUERY))
    assert (same != other).any()
    assert drawn[0].classes_.tolist() == ["ant", "bee", "cat"]


def test_learners_that_draw_nothing_give_the_same_again():
    fitted = LEOClassifier("cl2n").fit(ROWS, NAMES)
    for one in fitted.sample_classifiers(2):
        close(one.predict_proba(QUERY), fitted.predict_proba(QUERY))


@pytest.mark.parametrize("tool", ["pickle", "joblib"])
@pytest.mark.parametrize("kind", ["own", "sampled", "gru", "name"])
def test_what_is_kept_comes_back_bit_for_bit(kind, tool, taught, tmp_path):
    if kind == "gru":
        model = make_model("leo-generator", network="gru", channels=4, hidden=3)
        save_model(tmp_path / "model.safetensors", model.learner, model.structure, {})
        fitted = LEOClassifier(tmp_path / "model.safetensors").fit(ROWS, NAMES)
        (tmp_path / "model.safetensors").unlink()
    elif kind == "name":
        fitted = LEOClassifier("cl2n").fit(ROWS, NAMES)
    else:
        fitted = taught if kind == "own" else taught.sample_classifiers(2)[1]
    if tool == "pickle":
        again = pickle.loads(pickle.dumps(fitted))
    else:
        joblib.dump(fitted, tmp_path / "fitted.joblib")
        again = joblib.load(tmp_path / "fitted.joblib")
    np.testing.assert_array_equal(again.predict_proba(QUERY), fitted.predict_proba(QUERY))
    np.testing.assert_array_equal(again.predict(QUERY), fitted.predict(QUERY))


def test_a_network_comes_back_as_itself():
    """So that nothing compiles anew; one that has no name cannot."""
    leo = make_model("leo", network="mlp", hidden=3, layers=2).learner
    assert pickle.loads(pickle.dumps(leo)).network is leo.network
    assert pickle.loads(pickle.dumps(own_model().learner)).network is own_model().learner.network
    nameless = Network.of(eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)), gaussian_nll(1.0), (2,), (3,))
    assert "cannot be pickled" in message(lambda: pickle.dumps(nameless))


def test_the_tools_of_scikit_learn(taught):
    unfitted = clone(taught)
    assert not hasattr(unfitted, "classes_")
    assert unfitted.model.network is own_model().learner.network
    np.testing.assert_array_equal(unfitted.fit(ROWS, NAMES).predict(QUERY), taught.predict(QUERY))
    rows, names = some_examples(24)
    pipeline = make_pipeline(StandardScaler(), LEOClassifier("nearest-centroid"))
    assert pipeline.fit(rows, names).score(rows, names) > 0.8
    assert (cross_val_score(LEOClassifier("nearest-centroid"), rows, names, cv=2) > 0.5).all()
    search = GridSearchCV(LEOClassifier(), {"model": ["nearest-centroid", "cl2n"]}, cv=2).fit(rows, names)
    assert search.best_params_["model"] in ("nearest-centroid", "cl2n")
    assert search.cv_results_["mean_test_score"].min() > 0.5
    calibrated = CalibratedClassifierCV(LEOClassifier("nearest-centroid"), cv=2).fit(rows, names)
    np.testing.assert_allclose(calibrated.predict_proba(rows).sum(1), 1)


def test_a_model_of_the_package_tells_new_classes_apart():
    """Five classes that it has never seen, five examples of each; by their names, whatever these are."""
    sample = load_data("sample").subset("test")
    rows = sample.read(sample.rows).reshape(20, 100, 640)[:5]
    names = np.array(sample.class_names[:5])
    fitted = LEOClassifier().fit(rows[:, :5].reshape(-1, 640), np.repeat(names, 5))
    assert fitted.score(rows[:, 50:70].reshape(-1, 640), np.repeat(names, 20)) > 0.5  # chance is 0.2


@pytest.mark.parametrize("name", UNTRAINED)
@pytest.mark.parametrize("data", ["sample", "intents"])
def test_learners_without_training_are_about_as_often_right_as_they_say(data, name):
    """On test classes, which their temperatures have not seen: far from the 63 % that logistic regression was off."""
    test = load_data(data).subset("test")
    random, sure, right = np.random.default_rng(0), [], []
    for classes in (random.choice(len(test.counts), 5, replace=False) for _ in range(12)):
        rows = np.stack([test.starts[one] + random.permutation(test.counts[one])[:20] for one in classes])
        rows = test.read(test.rows[rows])
        fitted = LEOClassifier(name).fit(rows[:, :5].reshape(25, -1), np.repeat(classes, 5))
        found = fitted.predict_proba(rows[:, 5:].reshape(75, -1))
        sure.append(found.max(1))
        right.append(fitted.classes_[found.argmax(1)] == np.repeat(classes, 15))
    assert abs(np.mean(sure) - np.mean(right)) < 0.06


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda: LEOClassifier().fit(ROWS, NAMES), "rows have 8 numbers; the model was trained on rows of 640"),
        (lambda: LEOClassifier("nowhere").fit(ROWS, NAMES), "nowhere does not exist"),
        (
            lambda: LEOClassifier("miniimagnet").fit(ROWS, NAMES),
            "did you mean miniimagenet? Known are miniimagenet, mi",
        ),
        (lambda: LEOClassifier("nearest-centroids").fit(ROWS, NAMES), "did you mean nearest-centroid?"),
        (lambda: LEOClassifier(3).fit(ROWS, NAMES), "model must be a name, a path or a Learner, not int"),
        (lambda: LEOClassifier("sines-and-lines").fit(ROWS, NAMES), "predicts numbers"),
        (lambda: LEOClassifier("cl2n").fit(ROWS, ["ant"] * 8), "1 class"),
        (lambda: LEOClassifier("cl2n").fit(ROWS, NAMES).sample_classifiers(0), "n must be a whole number"),
        (lambda: LEOClassifier(make_learner("leo", dim=5)).fit(ROWS, NAMES), "(5)"),
    ],
)
def test_bad_input_of_the_classifier(act, what):
    assert what in message(act)


def test_what_scikit_learn_refuses_of_a_classifier():
    with pytest.raises(NotFittedError):
        LEOClassifier("cl2n").predict(QUERY)
    with pytest.raises(NotFittedError):
        LEOClassifier("cl2n").sample_classifiers(1)
    with pytest.raises(ValueError, match="NaN"):
        LEOClassifier("cl2n").fit(ROWS * np.nan, NAMES)
    with pytest.raises(ValueError, match="Unknown label type"):
        LEOClassifier("cl2n").fit(ROWS, np.linspace(0, 1, 8))
    with pytest.raises(ValueError, match="features"):
        LEOClassifier("cl2n").fit(ROWS, NAMES).predict(QUERY[:, :5])
