"""Choose what learners without training cannot learn: the C of logistic regression, and temperatures.

    python tools/choose_untrained.py

For each learner and number of shots: the temperature that minimises the query loss over 5-way validation tasks of the
sample and of the intents in this package, as many of each; and with it the loss, accuracy and calibration error on each
of the two. The C with the least mean loss is the default of `LogisticRegression`, as is the intercept, and the
temperatures are `learners.registry.UNTRAINED_TEMPERATURES`. JSON on standard output.
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from metaleo.data.feature_files import load_data
from metaleo.evaluation.calibration import QUERY, QUERY_LOGITS, SEED, SHOTS, best_temperature
from metaleo.evaluation.evaluate import BINS
from metaleo.learners import CL2N, LogisticRegression, NearestCentroid
from metaleo.tasks.episodes import Episodes

DATA = ("sample", "intents")
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0)
WAY = 5


def ask(learner, data, shot, tasks):
    """Logits and answers of all queries of the tasks."""
    validation = load_data(data).subset("val")
    episodes = Episodes.over(validation, WAY, max(SHOTS), QUERY)
    made = learner(validation.dim)
    logits, targets = QUERY_LOGITS(made, episodes, jax.random.key(SEED), jnp.arange(tasks), jnp.int32(shot))
    return np.asarray(logits, np.float64).reshape(-1, WAY), np.asarray(targets).argmax(-1).reshape(-1)


def judge(logits, answers):
    """Query loss, accuracy and calibration error."""
    logs = scipy.special.log_softmax(logits, axis=1)
    confidence, right = np.exp(logs.max(1)), logs.argmax(1) == answers
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs((right[bins == one] - confidence[bins == one]).sum()) for one in range(BINS)]
    found = -logs[np.arange(len(answers)), answers].mean(), right.mean(), sum(gaps) / len(answers)
    return dict(zip(("nll", "accuracy", "calibration_error"), (round(float(one), 4) for one in found), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=200, help="of each data set")
    parser.add_argument("--shots", type=int, nargs="+", default=SHOTS)
    given = parser.parse_args()
    learners = {"nearest-centroid": lambda dim: NearestCentroid(), "cl2n": lambda dim: CL2N.init(None, dim)}
    for strength in STRENGTHS:
        for note, intercept in (("", True), (", no intercept", False)):
            made = LogisticRegression(strength, intercept=intercept)
            learners[f"logistic-regression, C = {strength:g}{note}"] = lambda dim, made=made: made
    chosen = {}
    for name, learner in learners.items():
        rows = []
        for shot in given.shots:
            asked = {data: ask(learner, data, shot, given.tasks) for data in DATA}
            temperature = best_temperature(*map(np.concatenate, zip(*asked.values(), strict=True)))
            row = {"shot": shot, "temperature": round(temperature, 3)}
            for data, (logits, answers) in asked.items():
                row |= {data: judge(logits / temperature, answers), f"{data}, as it is": judge(logits, answers)}
            rows.append(row)
        loss = float(np.mean([row[data]["nll"] for row in rows for data in DATA]))
        chosen[name] = {"mean_nll": round(loss, 4), "shots": rows}
    print(json.dumps({"tasks": given.tasks, "way": WAY, "seed": SEED, "learners": chosen}, indent=2))


if __name__ == "__main__":
    main()
