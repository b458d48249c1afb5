"""`python -m helpers.many_devices LEARNER …`: each learner is tested and trained on large batches.

For a process with several CPU devices (JAX_NUM_CPU_DEVICES), which all compute at once: what waits for a thread that
will never be free hangs here. Batched LAPACK did.
"""

import sys

import jax
import jax.numpy as jnp

from helpers.small import HYPER, make_learner, make_metaset
from metaleo.engines import choose_engine
from metaleo.evaluation.evaluate import score_learner
from metaleo.tasks import Episodes
from metaleo.training.meta_train import make_optimiser, start_run
from metaleo.training.population import compile_advance, compile_validate, shard_replicas

WAY, SHOT, META_BATCH, TASKS = 5, 10, 64, 512

metaset = make_metaset(images=SHOT + 2)
training, validation = (Episodes.over(metaset.subset(split), WAY, SHOT, 2) for split in ("train", "val"))
for name in sys.argv[1:]:
    learner = make_learner(name, WAY)
    scores = score_learner(learner, validation, seed=0, num_tasks=TASKS)
    print(f"{name}: {scores.accuracy.mean():.2f}", end="", flush=True)
    if jax.tree.leaves(learner):  # there is something to train
        one_run = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (start_run(learner, make_optimiser()), HYPER))
        state, hyper, keys = shard_replicas((*one_run, jax.random.split(jax.random.key(0), 1)), 1)
        state, _ = compile_advance(choose_engine(learner), 1, 2, META_BATCH, "global")(state, hyper, keys, training)
        _, validation_score = compile_validate(choose_engine(learner), 1, TASKS)(
            state, jax.random.key(1), validation, 10
        )
        print(f", after two meta-steps {float(validation_score[0]):.2f}", end="", flush=True)
    print(flush=True)
