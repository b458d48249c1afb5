"""How far probabilities are off, with and without the temperatures that a model has learned: JSON on standard output.

    python benchmarks/calibration.py miniimagenet --data sample

Expected calibration error (15 bins) and negative log-likelihood of test tasks, by ways and shots.
"""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from metaleo import data
from metaleo.estimators.classifier import find_model, softmax
from metaleo.evaluation.calibration import QUERY_LOGITS
from metaleo.evaluation.evaluate import BINS
from metaleo.tasks.episodes import Episodes, place_rows

SEED = 0


def calibration_error(probabilities, answers):
    confidence, right = probabilities.max(1), probabilities.argmax(1) == answers
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs((right[bins == one] - confidence[bins == one]).sum()) for one in range(BINS)]
    return float(sum(gaps) / len(answers))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", default="sample")
    parser.add_argument("--ways", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 3, 5, 10])
    parser.add_argument("--tasks", type=int, default=1000)
    given = parser.parse_args()
    model, metaset = find_model(given.model), data.load_data(given.data).subset("test")
    rows = []
    for way in given.ways:
        episodes = Episodes.over(metaset, way, max(given.shots), 15, place_rows(metaset, prepare=model.prepare))
        for shot in given.shots:
            exact = dataclasses.replace(episodes, shot=shot)
            key, tasks = jax.random.fold_in(jax.random.key(SEED), 2), jnp.arange(given.tasks)
            logits, targets = QUERY_LOGITS(model.learner, exact, key, tasks, jnp.int32(shot))
            logits, answers = (
                np.asarray(logits, np.float64).reshape(-1, way),
                np.asarray(targets).argmax(-1).reshape(-1),
            )
            temperature = model.temperature(shot)
            row = {"way": way, "shot": shot, "temperature": temperature}
            for name, scale in (("plain", 1.0), ("calibrated", temperature)):
                found = softmax(logits / scale)
                nll = -np.log(found[np.arange(len(answers)), answers]).mean()
                row |= {f"{name}_error": calibration_error(found, answers), f"{name}_nll": float(nll)}
            rows.append({**row, "accuracy": float((logits.argmax(1) == answers).mean())})
    settings = {"model": given.model, "data": given.data, "tasks": given.tasks, "seed": SEED}
    print(json.dumps({**settings, "device": jax.devices()[0].device_kind, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
