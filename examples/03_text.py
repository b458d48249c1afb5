"""Intents of a chat assistant from three sentences each: sentence embeddings inside the package."""

# %% 30 intents that no model here has seen (banking, credit cards), 50 sentences each, as 256 numbers
import numpy as np

from metaleo import LEOClassifier, load_data

unseen = load_data("intents").subset("test")
print(f"{len(unseen.counts)} new intents, among them {', '.join(unseen.class_names[:3])}")
random = np.random.default_rng(0)
WAY, SHOT, QUERY = 10, 3, 20


def draw():
    """Rows of ten intents: some labelled sentences of each, some to be named, and the rest."""
    classes = random.choice(len(unseen.counts), WAY, replace=False)
    rows = np.stack([unseen.rows[unseen.starts[one] + random.permutation(unseen.counts[one])] for one in classes])
    return np.array(unseen.class_names)[classes], *np.split(rows, [SHOT, SHOT + QUERY], axis=1)


def examples(names, rows):
    return unseen.read(rows.ravel()), np.repeat(names, rows.shape[1])


# %% Ten assistants with ten intents each: every model on the same tasks, adapted side by side
tasks = [draw() for _ in range(10)]
MODELS = ("intents", "nearest-centroid", "logistic-regression")
print(f"\n{WAY} intents, {SHOT} sentences each; {WAY * QUERY} sentences to be named in each of {len(tasks)} tasks:")
for model in MODELS:
    classifiers = LEOClassifier(model).fit_many([examples(names, support) for names, support, _, _ in tasks])
    scores = [100 * one.score(*examples(task[0], task[2])) for one, task in zip(classifiers, tasks, strict=True)]
    print(f"{model:22}{np.mean(scores):5.1f} % right, from {min(scores):.0f} to {max(scores):.0f} %")

# %% The first of them: which intents are taken for which?
names, support, query, rest = tasks[0]
classifier = LEOClassifier("nearest-centroid").fit(*examples(names, support))
sentences, truth = examples(names, query)
guesses = classifier.predict(sentences)
wrong = np.array([pair for pair in zip(truth, guesses, strict=True) if pair[0] != pair[1]])
pairs, counts = np.unique(wrong, axis=0, return_counts=True)
print("\nmost often confused in the first task, by nearest centroids:")
for place in np.argsort(-counts)[:3]:
    print(f"{counts[place]:3} times {pairs[place][0]} taken for {pairs[place][1]}")

# %% Five more sentences of just those two
worst = np.isin(names, pairs[np.argmax(counts)])
before = classifier.score(sentences, truth)
classifier.partial_fit(*examples(names[worst], rest[worst, :5]))
after = classifier.score(sentences, truth)
print(f"{100 * before:.1f} % right before, {100 * after:.1f} % with five more sentences of those two")
