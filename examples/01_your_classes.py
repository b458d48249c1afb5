"""A classifier for classes of your own, from a few examples of each: real image features inside the package."""

# %% Classes that the model has never seen, 100 images of each as rows of 640 numbers; tasks with five of them
import numpy as np

from metaleo import LEOClassifier, load_data

unseen = load_data("sample").subset("test")
random = np.random.default_rng(0)


def draw(shot):
    """Five classes: so many labelled images of each, and 50 others to be named."""
    classes = random.choice(len(unseen.counts), 5, replace=False)
    rows = unseen.rows[unseen.starts[classes, None] + random.permuted(np.tile(np.arange(100), (5, 1)), axis=1)]
    names = np.array(unseen.class_names)[classes]
    parts = rows[:, :shot], rows[:, 50:]
    return [(unseen.read(part.ravel()), np.repeat(names, part.shape[1])) for part in parts]


# %% `fit` adapts a meta-trained model; `fit_many` does so for many sets of examples side by side
print("40 tasks of 5 new classes, right in %, by labelled examples of each class (mean and spread over tasks):")
print(f"{'':22}{'1':>12}{'5':>12}{'20':>12}")
tasks = {shot: [draw(shot) for _ in range(40)] for shot in (1, 5, 20)}
for model in ("miniimagenet", "nearest-centroid", "logistic-regression"):
    print(f"{model:22}", end="")
    for some in tasks.values():
        classifiers = LEOClassifier(model).fit_many([support for support, _ in some])
        scores = [100 * one.score(*query) for one, (_, query) in zip(classifiers, some, strict=True)]
        print(f"{np.mean(scores):7.1f} ±{np.std(scores):4.1f}", end="")
    print()

# %% Probabilities are calibrated, so a low one is a reason to ask a human
classifiers = LEOClassifier().fit_many([support for support, _ in tasks[5]])
sure = np.concatenate(
    [one.predict_proba(rows).max(1) for one, (_, (rows, _)) in zip(classifiers, tasks[5], strict=True)]
)
right = np.concatenate([one.predict(rows) == y for one, (_, (rows, y)) in zip(classifiers, tasks[5], strict=True)])
print("\nfive examples of each class:")
for low, high in ((0.0, 0.5), (0.5, 0.8), (0.8, 1.0)):
    some = (low < sure) & (sure <= high)
    share = f"{100 * right[some].mean():.0f} % right" if some.any() else ""
    print(f"  probability {low} to {high}: {some.sum():5} queries, {share}")

# %% Classifiers that the model holds possible, for the first task: where they disagree, more examples would help
classifier, (_, (queries, truth)) = classifiers[0], tasks[5][0]
votes = np.stack([one.predict(queries) for one in classifier.sample_classifiers(20)])
agreed, right = (votes == votes[0]).all(0), classifier.predict(queries) == truth
print(f"\n20 sampled classifiers agree on {100 * agreed.mean():.0f} % of the queries")
print(f"right where they agree: {100 * right[agreed].mean():.0f} %; elsewhere: {100 * right[~agreed].mean():.0f} %")

# %% A class that comes later
later = next(place for place, name in enumerate(unseen.class_names) if name not in classifier.classes_)
new = unseen.read(unseen.rows[unseen.starts[later] + np.arange(5)])
classifier.partial_fit(new, [unseen.class_names[later]] * 5)
print(f"after partial_fit: {len(classifier.classes_)} classes, {len(classifier.y_)} examples")
