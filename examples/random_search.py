"""A random search is a vmap: N runs of LEO with N draws of the hyper-parameters, trained as one program.

    python examples/random_search.py --data FEATURES.npz --shot 1 --trials 64 --steps 20000

Prints one JSON line per trial, best first. This is how the `metaleo-*` presets were found (docs/results.md).
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np

from metaleo.data import load
from metaleo.data.rows import place
from metaleo.learners import LEO, Hyper, MetaSGD
from metaleo.outer_loop import make_optimiser, meta_train
from metaleo.tasks import Episodes

RANGES = {  # log-uniform
    "learning_rate": (1e-4, 3e-3),
    "kl": (1e-3, 2.0),
    "encoder_penalty": (1e-9, 1e-1),
    "l2": (1e-10, 1e-3),
    "orthogonality": (1e-3, 1e3),
    "keep": (0.3, 1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--learner", choices=["leo", "meta-sgd"], default="leo")
    parser.add_argument("--shot", type=int, default=1)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--validate-every", type=int, default=500)
    parser.add_argument("--validation-tasks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    metaset = load(options.data)
    rows = place(metaset)
    training = Episodes.over(metaset.subset("train"), 5, options.shot, 15, rows)
    validation = Episodes.over(metaset.subset("val"), 5, options.shot, 15, rows)
    random = np.random.default_rng(options.seed)
    draws = {
        name: np.exp(random.uniform(np.log(ends[0]), np.log(ends[1]), options.trials)).astype(np.float32)
        for name, ends in RANGES.items()
    }
    step_sizes = np.exp(random.uniform(np.log(0.1), np.log(10), options.trials)).astype(np.float32)
    keys = jax.random.split(jax.random.key(options.seed), options.trials)

    def trial(hyper, step_size, key, training, validation):
        def make_learner(key):
            if options.learner == "leo":
                return LEO.init(key, metaset.dim)
            return MetaSGD(jnp.zeros((5, metaset.dim)), jnp.full((5, metaset.dim), step_size), 5)

        state, accuracies = meta_train(
            make_learner, hyper, key, training, validation, make_optimiser(),
            steps=options.steps, validate_every=options.validate_every, validation_tasks=options.validation_tasks,
        )  # fmt: skip
        return state.best_accuracy, state.best_step, accuracies[-1]

    population = jax.jit(jax.vmap(trial, (0, 0, 0, None, None)))
    accuracy, step, last = population(Hyper(**draws), step_sizes, keys, training, validation)
    for i in np.argsort(-np.asarray(accuracy)):
        hyper = {name: float(f"{values[i]:.4g}") for name, values in draws.items()}
        if options.learner == "meta-sgd":
            hyper["step_size"] = float(f"{step_sizes[i]:.4g}")
        print(
            json.dumps(
                {
                    "val": round(float(accuracy[i]), 4),
                    "step": int(step[i]),
                    "last": round(float(last[i]), 4),
                    **hyper,
                }
            )
        )


if __name__ == "__main__":
    main()
