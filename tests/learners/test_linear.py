"""Regression on the support set against scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression as ReferenceLogistic
from sklearn.linear_model import Ridge

from helpers.small import DIM, adapt, logits, make_batch, make_learner, pad, shake
from metaleo.learners import LogisticRegression
from metaleo.learners.linear import solve


@pytest.mark.parametrize("size", [1, 16, 17, 50])
def test_solve_agrees_with_numpy(size, float64):
    """Whole blocks of rows, and what is left of one; its derivative is that of A⁻¹b."""
    random = np.random.default_rng(size)
    root, right, slope = random.normal(size=(size, size)), random.normal(size=(size, 3)), random.normal(size=(size, 3))
    matrix = root @ root.T + 0.1 * np.eye(size)
    found, pull = jax.vjp(jax.jit(solve), jnp.asarray(matrix), jnp.asarray(right))
    expected = np.linalg.solve(matrix, right)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    of_right = np.linalg.solve(matrix, slope)
    of_matrix, own_right = pull(jnp.asarray(slope))
    np.testing.assert_allclose(own_right, of_right, rtol=1e-9)
    np.testing.assert_allclose(of_matrix, -of_right @ expected.T, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("strength", [1.0, 100.0])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 5, 3), (22, 9, 19)], ids=str)
def test_logistic_regression_agrees_with_scikit_learn(strength, counts, float64):
    support, query = make_batch(0, counts), make_batch(1, (20, 20, 20))
    head = adapt(LogisticRegression(strength), pad(support, 2)).head
    reference = ReferenceLogistic(C=strength, fit_intercept=False, tol=1e-9, max_iter=10_000)
    reference.fit(np.asarray(support.inputs), np.asarray(support.targets).argmax(1))
    np.testing.assert_allclose(head.weights, reference.coef_, atol=2e-6 * np.abs(reference.coef_).max())
    scores = np.exp(logits(head, query.inputs))
    ours = scores / scores.sum(1, keepdims=True)
    np.testing.assert_allclose(ours, reference.predict_proba(np.asarray(query.inputs)), atol=1e-5)


def test_logistic_regression_in_single_precision(float64):
    """On the hardest of these problems, float32 is as good as anyone can see."""
    support, query = make_batch(0, (22, 9, 19)), make_batch(1, (20, 20, 20))
    exact = logits(adapt(LogisticRegression(100.0), support).head, query.inputs)
    support, query = (type(b)(b.inputs.astype("f4"), b.targets.astype("f4"), b.mask) for b in (support, query))
    single = logits(adapt(LogisticRegression(100.0), support).head, query.inputs)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, exact, atol=1e-2)


def test_ridge_agrees_with_scikit_learn(float64):
    learner = shake(make_learner("ridge"))
    support, query = make_batch(0, (2, 5, 3)), make_batch(1, (20, 20, 20))
    matrix = np.eye(DIM) + np.asarray(learner.embedding.departure)
    reference = Ridge(alpha=np.exp(float(learner.log_regulariser)), fit_intercept=False)
    reference.fit(np.asarray(support.inputs) @ matrix, np.asarray(support.targets))
    expected = np.exp(learner.log_sharpness) * reference.predict(np.asarray(query.inputs) @ matrix)
    ours = logits(adapt(learner, pad(support, 2)).head, query.inputs)
    np.testing.assert_allclose(ours, expected, atol=1e-9)
