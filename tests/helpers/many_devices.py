"""`python -m helpers.many_devices LEARNER …`: each learner is tested and trained on large batches.

For a process with several CPU devices (JAX_NUM_CPU_DEVICES), which all compute at once: what waits for a thread that
will never be free hangs here. Batched LAPACK did.
"""

import sys

import jax
import jax.numpy as jnp

from helpers.small import HYPER, make_learner, make_metaset
from metaleo.engines import choose
from metaleo.evaluation import evaluate
from metaleo.outer_loop import make_optimiser, start
from metaleo.population import advancer, spread, validator
from metaleo.tasks import Episodes

WAY, SHOT, META_BATCH, TASKS = 5, 10, 64, 512

metaset = make_metaset(images=SHOT + 2)
training, validation = (Episodes.over(metaset.subset(split), WAY, SHOT, 2) for split in ("train", "val"))
for name in sys.argv[1:]:
    learner = make_learner(name, WAY)
    scores = evaluate(learner, validation, seed=0, num_tasks=TASKS)
    print(f"{name}: {scores.accuracy.mean():.2f}", end="", flush=True)
    if jax.tree.leaves(learner):  # there is something to train
        one_run = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (start(learner, make_optimiser()), HYPER))
        state, hyper, keys = spread((*one_run, jax.random.split(jax.random.key(0), 1)), 1)
        state, _ = advancer(choose(learner), 1, 2, META_BATCH, "global")(state, hyper, keys, training)
        _, merit = validator(choose(learner), 1, TASKS)(state, jax.random.key(1), validation, 10)
        print(f", after two meta-steps {float(merit[0]):.2f}", end="", flush=True)
    print(flush=True)
