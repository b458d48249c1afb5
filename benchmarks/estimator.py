"""`LEOClassifier` against scikit-learn on unseen classes, as a person would use both: JSON on standard output.

    python benchmarks/estimator.py --tasks 1000
    python benchmarks/estimator.py --tasks 20 --shots 1    # a try

5-way tasks of the test classes of the data that belongs to a model of the package, with 15 queries per class, some with
another number of examples of each class. scikit-learn's LogisticRegression and NearestCentroid have their default
settings, on rows as they are and scaled to length one; the better of the two counts. "Ahead" is the difference on the
same tasks, ± 1.96 standard errors over tasks.
"""

import argparse
import json
import warnings

import jax
import numpy as np
from calibration import calibration_error
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import normalize

from metaleo import LEOClassifier, load_data
from metaleo.evaluation.evaluate import paired_difference

MODELS = {"miniimagenet": "sample", "intents": "intents"}
UNEVEN = (3, 1, 1, 7, 2)
QUERY = 15


def draw(metaset, counts, random):
    """Rows and labels of a task: its examples, and its queries."""
    classes = random.choice(len(metaset.counts), len(counts), replace=False)
    rows = [metaset.rows[metaset.starts[one] + random.permutation(metaset.counts[one])] for one in classes]
    support = np.concatenate([own[:count] for own, count in zip(rows, counts, strict=True)])
    query = np.concatenate([own[count : count + QUERY] for own, count in zip(rows, counts, strict=True)])
    labels = np.repeat(np.arange(len(counts)), counts), np.repeat(np.arange(len(counts)), QUERY)
    return metaset.read(support), labels[0], metaset.read(query), labels[1]


def cell(model, metaset, counts, tasks, seed):
    random = np.random.default_rng(seed)
    drawn = [draw(metaset, counts, random) for _ in range(tasks)]
    fitted = LEOClassifier(model).fit_many([(rows, labels) for rows, labels, _, _ in drawn])
    probabilities = [one.predict_proba(asked) for one, (_, _, asked, _) in zip(fitted, drawn, strict=True)]
    ours = np.array([(p.argmax(1) == truth).mean() for p, (*_, truth) in zip(probabilities, drawn, strict=True)])
    error = calibration_error(np.concatenate(probabilities), np.concatenate([truth for *_, truth in drawn]))
    found = {"accuracy": float(ours.mean()), "calibration_error": error}
    for name, make in (
        ("logistic-regression", lambda: LogisticRegression(max_iter=1000)),
        ("nearest-centroid", NearestCentroid),
    ):
        theirs = []
        for scale in (np.asarray, normalize):
            theirs.append(np.array([make().fit(scale(rows), labels).score(scale(asked), truth)
                                    for rows, labels, asked, truth in drawn]))  # fmt: skip
        best = max(theirs, key=np.mean)
        ahead, interval = paired_difference(ours, best)
        found[name] = {"accuracy": float(best.mean()), "ahead": ahead, "interval": interval}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 2, 5, 10, 20])
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", module="sklearn")  # one example per class has no variance, which nothing uses
    rows = []
    for model in given.models:
        metaset = load_data(MODELS[model]).subset("test")
        for counts in (*((shot,) * 5 for shot in given.shots), UNEVEN):
            found = cell(model, metaset, counts, given.tasks, given.seed)
            rows.append({"model": model, "examples": list(counts), **found})
    settings = {"tasks": given.tasks, "seed": given.seed, "device": jax.devices()[0].device_kind}
    print(json.dumps({**settings, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
