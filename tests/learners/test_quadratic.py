"""MetaQDA against densities of SciPy, with every matrix written out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import gammaln, log_softmax
from scipy.stats import multivariate_normal, multivariate_t

from helpers.small import DIM, adapt, close, logits, make_batch, make_learner, pad, shake
from metaleo.learners.quadratic import log_pivots


def trained(bayesian):
    return dataclasses.replace(shake(make_learner("metaqda")), bayesian=bayesian)


def prior(learner):
    """m, κ, ν and S = L Lᵀ."""
    triangle = np.eye(DIM) + np.triu(np.asarray(learner.whitening.departure, np.float64))
    lower = np.linalg.inv(np.exp(learner.log_scale) * triangle.T)
    assert not np.triu(lower, 1).any()
    nu = DIM - 1 + np.exp(learner.log_freedom)
    return np.asarray(learner.mean, np.float64), np.exp(learner.log_kappa), nu, lower @ lower.T


def posterior(learner, examples):
    """m_n, κ_n, ν_n, S_n, by the deviations from the mean and by what separates the two means."""
    mean, kappa, nu, scatter = prior(learner)
    count, average = len(examples), np.mean(examples, 0)
    for example in examples:
        scatter = scatter + np.outer(example - average, example - average)
    scatter = scatter + kappa * count / (kappa + count) * np.outer(average - mean, average - mean)
    return (kappa * mean + count * average) / (kappa + count), kappa + count, nu + count, scatter


def log_density(learner, x, examples):
    """Without what depends on the number of examples alone."""
    mean, kappa, nu, scatter = posterior(learner, examples)
    if not learner.bayesian:
        return multivariate_normal(mean, scatter / (nu + DIM + 2)).logpdf(x) - DIM / 2 * np.log(nu + DIM + 2)
    freedom = nu - DIM + 1
    scale = (kappa + 1) / (kappa * freedom)
    of_number = gammaln((freedom + DIM) / 2) - gammaln(freedom / 2) - DIM / 2 * np.log(scale * freedom)
    return multivariate_t(mean, scale * scatter, freedom).logpdf(x) - of_number


@pytest.mark.parametrize("bayesian", [False, True])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 5, 3), (20, 1, 9)], ids=str)
def test_log_densities_by_definition(bayesian, counts, float64):
    learner = trained(bayesian)
    support, query = make_batch(0, counts), make_batch(1, (4, 4, 4))
    classes = np.split(np.asarray(support.inputs), np.cumsum(counts)[:-1])
    densities = [[log_density(learner, x, own) for own in classes] for x in np.asarray(query.inputs)]
    expected = log_softmax(densities, axis=1)
    ours = logits(adapt(learner, pad(support, 2)).head, query.inputs)
    np.testing.assert_allclose(log_softmax(ours, axis=1), expected, atol=1e-9)
    assert np.std(expected) > 0.1  # else any answer would do


@pytest.mark.parametrize("bayesian", [False, True])
def test_single_precision(bayesian, float64):
    """Also of vectors as long as those of the package."""
    random = np.random.default_rng(0)
    support, query = (unit_batch(random, counts) for counts in ((1, 5, 10), (4, 4, 4)))
    learner = make_learner("metaqda", dim=640)
    learner = dataclasses.replace(shake(learner, 0.02), bayesian=bayesian)
    exact = logits(adapt(learner, support).head, query.inputs)
    single = jax.tree.map(lambda leaf: leaf.astype("f4"), learner)
    support, query = (type(b)(b.inputs.astype("f4"), b.targets.astype("f4"), b.mask) for b in (support, query))
    found = logits(adapt(single, support).head, query.inputs)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, atol=2e-3)


def unit_batch(random, counts):
    labels = np.repeat(np.arange(3), counts)
    rows = random.normal(size=(len(labels), 640)) + 2 * random.normal(size=(3, 640))[labels]
    batch = make_batch(0, counts)
    return dataclasses.replace(batch, inputs=jnp.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True)))


def test_untrained_it_is_a_nearest_centroid_of_shrunk_means():
    """With one example of each class all covariances are alike but for their direction, and S is a multiple of I."""
    learner, support, query = make_learner("metaqda"), make_batch(0, (1, 1, 1)), make_batch(1, (9, 9, 9))
    kappa = np.exp(learner.log_kappa)
    means = np.asarray(support.inputs) / (1 + kappa)
    distances = np.sum((np.asarray(query.inputs)[:, None] - means) ** 2, 2)
    found = logits(adapt(learner, support).head, query.inputs)
    assert np.mean(np.argmax(found, 1) == np.argmin(distances, 1)) > 0.95


def test_pivots_make_the_determinant_of_each_block(float64):
    """Wherever the rows of a block are."""
    random = np.random.default_rng(0)
    blocks, order = [np.eye(n) + (r := random.normal(size=(n, n))) @ r.T for n in (2, 3, 1)], random.permutation(6)
    matrix = np.zeros((6, 6))
    for block, start in zip(blocks, (0, 2, 5), strict=True):
        matrix[start : start + len(block), start : start + len(block)] = block
    logs = np.asarray(jax.jit(log_pivots)(jnp.asarray(matrix[np.ix_(order, order)])))
    owner = np.array([0, 0, 1, 1, 1, 2])[order]
    close([logs[owner == n].sum() for n in range(3)], [np.linalg.slogdet(block)[1] for block in blocks], 1e-9)
