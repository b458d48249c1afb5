"""Learners that compare, against scikit-learn and against their definitions written out with loops."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax
from sklearn.neighbors import NearestCentroid as Reference

from helpers.small import DIM, HYPER, adapt, close, logits, make_batch, make_learner, make_task, meta_loss, pad, shake

COUNTS = (2, 5, 3)


def test_nearest_centroid_agrees_with_scikit_learn():
    """On vectors of length one, nearest by cosine to the centroids is nearest to the normalised centroids."""
    support, query = make_batch(0, COUNTS), make_batch(1, (20, 20, 20))
    head = adapt(make_learner("nearest-centroid"), support).head
    labels = np.asarray(support.targets).argmax(1)
    reference = Reference().fit(np.asarray(support.inputs), labels)
    reference.centroids_ /= np.linalg.norm(reference.centroids_, axis=1, keepdims=True)
    ours = np.asarray(logits(head, query.inputs)).argmax(1)
    np.testing.assert_array_equal(ours, reference.predict(np.asarray(query.inputs)))


def unit(x):
    return x / np.linalg.norm(x)


def cl2n(learner, x, classes):
    centre = np.asarray(learner.centre)
    centroids = [np.mean([unit(example - centre) for example in members], 0) for members in classes]
    return [-5 * np.sum((unit(x - centre) - centroid) ** 2) for centroid in centroids]


def embedding(learner):
    """As a matrix to be multiplied with a column."""
    return np.eye(DIM) + np.asarray(learner.embedding.departure, np.float64).T


def prototypical(learner, x, classes):
    matrix, sharpness = embedding(learner), np.exp(learner.log_sharpness)
    prototypes = [np.mean([matrix @ example for example in members], 0) for members in classes]
    return [-sharpness * np.sum((matrix @ x - prototype) ** 2) for prototype in prototypes]


def matching(learner, x, classes):
    matrix, sharpness = embedding(learner), np.exp(learner.log_sharpness)
    votes = [
        sum(np.exp(sharpness * unit(matrix @ x) @ unit(matrix @ example)) for example in members) for members in classes
    ]
    return np.log(votes / np.sum(votes))


def relation(learner, x, classes):
    matrix, sharpness = embedding(learner), np.exp(learner.log_sharpness)
    first = np.concatenate([learner.for_class, learner.for_input])
    scores = []
    for members in classes:
        pair = np.concatenate([np.mean([matrix @ example for example in members], 0), matrix @ x])
        hidden = np.maximum(np.maximum(pair @ first, 0) @ np.asarray(learner.middle), 0)
        scores.append(sharpness * hidden @ np.asarray(learner.last))
    return scores


def feat(learner, x, classes):
    matrix, sharpness = embedding(learner), np.exp(learner.log_sharpness)
    prototypes = [np.mean([matrix @ example for example in members], 0) for members in classes]
    normal = [(one - one.mean()) / np.sqrt(one.var() + 1e-5) / np.sqrt(DIM) for one in prototypes]
    names = ("to_query", "to_key", "to_value", "to_output")
    to_query, to_key, to_value, to_output = (np.asarray(getattr(learner, name), np.float64).T for name in names)
    logs = []
    for prototype, own in zip(prototypes, normal, strict=True):
        attention = np.array([np.exp((to_query @ own) @ (to_key @ other) * np.sqrt(DIM)) for other in normal])
        attention /= attention.sum()
        seen = sum(share * to_value @ other for share, other in zip(attention, normal, strict=True))
        logs.append(-sharpness * np.sum((matrix @ x - prototype - to_output @ seen) ** 2))
    return logs


@pytest.mark.parametrize("definition", [cl2n, prototypical, matching, relation, feat])
def test_log_probabilities_by_definition(definition, float64):
    learner = shake(make_learner(definition.__name__))
    support, query = make_batch(0, COUNTS), make_batch(1, (4, 4, 4))
    classes = np.split(np.asarray(support.inputs), np.cumsum(COUNTS)[:-1])
    expected = log_softmax([definition(learner, x, classes) for x in np.asarray(query.inputs)], axis=1)
    ours = logits(adapt(learner, pad(support, 2)).head, query.inputs)
    np.testing.assert_allclose(log_softmax(ours, axis=1), expected, atol=1e-9)
    assert np.std(expected) > 0.1  # else any answer would do


def test_untrained_feat_is_a_prototypical_net():
    support, query = make_batch(0, COUNTS), make_batch(1)
    close(*(logits(adapt(make_learner(name), support).head, query.inputs) for name in ("feat", "prototypical")))


@pytest.mark.parametrize("name", ["prototypical", "matching", "ridge", "protomaml"])
def test_embedding_starts_at_the_features_and_pays_for_leaving_them(name):
    learner, task = make_learner(name), make_task()
    close(learner.embedding(task.support.inputs), task.support.inputs, 0)
    loss, info = meta_loss(learner, task, HYPER, None)
    assert loss == info["query_loss"]
    learner = shake(learner)
    loss, info = meta_loss(learner, task, HYPER, None)
    price = HYPER.l2 * np.sum(np.asarray(embedding(learner) - np.eye(DIM)) ** 2) / 2
    np.testing.assert_allclose(loss - info["query_loss"], price, rtol=1e-3)


def test_matching_survives_extreme_sharpness():
    """The likelihood of a class that attention leaves out is tiny, never zero."""
    learner, support, query = make_learner("matching"), make_batch(), make_batch(1)
    sharp = type(learner)(learner.embedding, jnp.log(1e4))
    assert jnp.isfinite(logits(adapt(sharp, support).head, query.inputs)).all()


def test_only_cl2n_wants_to_know_the_mean():
    mean = jnp.arange(DIM) / 10
    close(make_learner("cl2n").with_feature_mean(mean).centre, mean, 0)
    maml = make_learner("maml")
    assert maml.with_feature_mean(mean) is maml
