"""How far classes scatter, on classes that are drawn from known Gaussians."""

import dataclasses

import numpy as np
import pytest

from helpers.small import DIM, make_metaset
from metaleo.config.presets import resolve_config
from metaleo.data.metaset import MetaSet
from metaleo.tasks.preparation import emphasise, whiten
from metaleo.training import anchoring
from metaleo.training.anchoring import EMPHASES, POWERS, SHARES, choose_anchor, measure_spread

WIDE = 24


def drawn(classes, between, within, seed=0, images=60):
    """Classes whose means scatter with these variances, and rows with those; far from zero, so that little is bent."""
    random = np.random.default_rng(seed)
    means = 30 * np.eye(WIDE)[0] + random.normal(size=(sum(classes), 1, WIDE)) * np.sqrt(between)
    features = means + random.normal(size=(sum(classes), images, WIDE)) * np.sqrt(within)
    splits = [split for split, count in zip(("train", "val", "test"), classes, strict=True) for _ in range(count)]
    return MetaSet.from_classes(features.astype(np.float32), tuple(f"{i}" for i in range(sum(classes))), tuple(splits))


def spread_of(metaset):
    (preparation,) = whiten(metaset.subset("train"), (0.0,))
    return measure_spread(preparation, metaset.subset("train"), metaset.subset("val"))


def test_priors_count_more_where_classes_differ_less():
    between, within = np.full(WIDE, 0.01), np.ones(WIDE)
    between[5:8] = 4.0
    found = spread_of(drawn((200, 100, 1), between, within))
    prior_shots = np.sort(found.within / found.between)
    np.testing.assert_allclose(prior_shots[:3].mean(), 1 / 4, rtol=0.35)
    assert prior_shots[3:].min() > 10 * prior_shots[:3].max()


def test_new_classes_decide_how_far_apart_classes_are():
    """Training classes that a network has set apart four times as far say little of those to come."""
    metaset = drawn((100, 50, 1), np.full(WIDE, 0.25), np.ones(WIDE))
    features = np.asarray(metaset.features, np.float32).copy()
    train = metaset.rows[: 100 * 60].reshape(100, 60)
    means = features[train].mean(1, keepdims=True)
    features[train] += 3 * (means - means.mean(0))
    apart = spread_of(dataclasses.replace(metaset, features=features))
    same = spread_of(metaset)
    ratio = (apart.within / apart.between).mean() / (same.within / same.between).mean()
    assert 0.5 < ratio < 2


def test_few_training_classes_leave_directions_to_validation_classes():
    metaset = drawn((5, 60, 1), np.full(WIDE, 0.5), np.ones(WIDE))
    found = spread_of(metaset)  # the means of five classes span four directions
    assert np.isfinite(found.between).all()
    assert 0.3 < np.median(found.between) / found.within.mean() < 0.8


@pytest.mark.parametrize("share", SHARES)
def test_anchor_of_a_spread(share):
    found = spread_of(drawn((20, 10, 1), np.full(WIDE, 0.25), np.ones(WIDE)))
    anchor = found.anchor(share, "logistic")
    np.testing.assert_allclose(anchor.prior_shots, share * found.within / found.between, rtol=1e-5)
    np.testing.assert_allclose(anchor.variances, found.within, rtol=1e-5)


def test_choice_is_made_of_training_and_validation_classes_alone():
    metaset = make_metaset()
    config = resolve_config(DIM, learner="leo-anchored", way=3, ways=(2, 4), shots=(1, 3), validation_tasks=5)
    features = np.asarray(metaset.features).copy()
    features[metaset.subset("test").rows] = 1e3
    first, second = (choose_anchor(config, one) for one in (metaset, dataclasses.replace(metaset, features=features)))
    for name in ("mean", "variances", "prior_shots"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize(("number", "share", "sharpness", "regulariser"), [(4, 1.0, 10.0, 0.03), (9, 0.0, 1.0, 1.0)])
def test_every_choice_is_the_most_accurate_one(monkeypatch, number, share, sharpness, regulariser):
    """How rows are prepared, how much the prior counts, both scalars: one of each is the best by decree."""
    metaset = make_metaset()
    training, validation = metaset.subset("train"), metaset.subset("val")
    prepared = [one for each in whiten(training, POWERS) for one in emphasise(each, training, EMPHASES)]
    best = measure_spread(prepared[number], training, validation)
    prior_shots = share * best.within / best.between

    def decreed(anchor, *_):
        faults = [
            0.2 * (not np.allclose(anchor.preparation.whitening, best.preparation.whitening)),
            0.1 * np.tanh(np.abs(np.asarray(anchor.prior_shots) - prior_shots).mean()),
            0.01 * abs(float(anchor.log_sharpness) - np.log(sharpness)),
            0.01 * abs(float(anchor.log_regulariser) - np.log(regulariser)),
        ]
        return 0.9 - sum(faults)

    monkeypatch.setattr(anchoring, "ACCURACY", decreed)
    found = choose_anchor(resolve_config(DIM, learner="leo-anchored", way=3, ways=(2, 4), shots=(1, 3)), metaset)
    np.testing.assert_allclose(found.preparation.whitening, best.preparation.whitening)
    np.testing.assert_allclose(found.prior_shots, prior_shots, rtol=1e-5)
    np.testing.assert_allclose(
        np.exp([found.log_sharpness, found.log_regulariser]), [sharpness, regulariser], rtol=1e-5
    )
