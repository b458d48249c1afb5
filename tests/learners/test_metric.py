"""Nearest centroids against scikit-learn."""

import numpy as np
from sklearn.neighbors import NearestCentroid as Reference

from small import adapt, logits, make_batch, make_learner


def test_agrees_with_scikit_learn():
    """On vectors of length one, nearest by cosine to the centroids is nearest to the normalised centroids."""
    support, query = make_batch(0, (2, 5, 3)), make_batch(1, (20, 20, 20))
    head = adapt(make_learner("nearest-centroid"), support).head
    labels = np.asarray(support.targets).argmax(1)
    reference = Reference().fit(np.asarray(support.inputs), labels)
    reference.centroids_ /= np.linalg.norm(reference.centroids_, axis=1, keepdims=True)
    ours = np.asarray(logits(head, query.inputs)).argmax(1)
    np.testing.assert_array_equal(ours, reference.predict(np.asarray(query.inputs)))
