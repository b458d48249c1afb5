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


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("strength", [1.0, 100.0])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 5, 3), (22, 9, 19), (7, 1)], ids=str)
def test_logistic_regression_agrees_with_scikit_learn(strength, counts, intercept, float64):
    """Also where classes are unbalanced, and with padding; the intercept is not penalised."""
    support, query = make_batch(0, counts), make_batch(1, (20, 20, 20))
    head = adapt(LogisticRegression(strength, intercept=intercept), pad(support, 2)).head
    frequencies = np.log(counts) if intercept else 0  # scikit-learn's classes are as frequent as in the support set
    scores = np.asarray(logits(head, query.inputs)) + frequencies
    expected = reference_logits(support, query, strength, intercept)
    between, expected = (x - x.mean(1, keepdims=True) for x in (scores, expected))
    np.testing.assert_allclose(between, expected, atol=1e-5 * np.abs(expected).max())


def reference_logits(support, query, strength, intercept):
    strength *= 2 if support.way == 2 else 1  # with two classes its one row is the difference of our two
    reference = ReferenceLogistic(C=strength, fit_intercept=intercept, tol=1e-9, max_iter=10_000)
    reference.fit(np.asarray(support.inputs), np.asarray(support.targets).argmax(1))
    found = reference.decision_function(np.asarray(query.inputs))
    return np.stack([np.zeros_like(found), found], 1) if found.ndim == 1 else found


def test_gradient_of_logistic_regression_vanishes_with_the_intercept(float64):
    """Of the penalised loss, by `jax.grad`, for classes that are far from balanced."""
    support, strength = make_batch(0, (12, 1, 3)), 30.0
    head = adapt(LogisticRegression(strength), support).head

    def loss(weights, bias):
        logs = jax.nn.log_softmax(support.inputs @ weights.T + bias[None, :])
        return -jnp.sum(support.targets * logs) + jnp.sum(weights**2) / (2 * strength)

    for slope in jax.grad(loss, (0, 1))(head.weights, head.bias + jnp.log(jnp.array([12, 1, 3]))):
        np.testing.assert_allclose(slope, 0, atol=1e-9)


def test_logistic_regression_in_single_precision(float64):
    """On the hardest of these problems, float32 is as good as anyone can see."""
    support, query = make_batch(0, (22, 9, 19)), make_batch(1, (20, 20, 20))
    exact = logits(adapt(LogisticRegression(100.0), support).head, query.inputs)
    support, query = (type(b)(b.inputs.astype("f4"), b.targets.astype("f4"), b.mask) for b in (support, query))
    single = logits(adapt(LogisticRegression(100.0), support).head, query.inputs)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, exact, atol=1e-2)


def test_more_examples_of_a_class_make_it_no_more_likely(float64):
    """An input that no example resembles, in tasks where the examples of one class are there many times."""
    for times in (1, 30):
        support = make_batch(0, (1, 1, 1))
        order = np.repeat(np.arange(3), (times, 1, 1))
        repeated = jax.tree.map(lambda leaf, order=order: leaf[order], support)
        found = logits(adapt(LogisticRegression(0.01), repeated).head, make_batch(1).inputs)
        np.testing.assert_allclose(jax.nn.softmax(found), 1 / 3, atol=0.02)


def test_ridge_agrees_with_scikit_learn(float64):
    learner = shake(make_learner("ridge"))
    support, query = make_batch(0, (2, 5, 3)), make_batch(1, (20, 20, 20))
    matrix = np.eye(DIM) + np.asarray(learner.embedding.departure)
    reference = Ridge(alpha=np.exp(float(learner.log_regulariser)), fit_intercept=False)
    reference.fit(np.asarray(support.inputs) @ matrix, np.asarray(support.targets))
    expected = np.exp(learner.log_sharpness) * reference.predict(np.asarray(query.inputs) @ matrix)
    ours = logits(adapt(learner, pad(support, 2)).head, query.inputs)
    np.testing.assert_allclose(ours, expected, atol=1e-9)
