"""Meta-training and evaluation rates at the paper's shapes, beside the rate of a large matrix product.

    python benchmarks/speed.py                      # one run at a time, 1-shot and 5-shot
    python benchmarks/speed.py --populations 1 256  # also 256 runs as one vmap (for a GPU)

Prints JSON. Every figure is the median of several repeats within one process; compare ratios, not machines.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from metaleo.compiling import compiled
from metaleo.data import load_sample
from metaleo.data.rows import place
from metaleo.evaluation import score_tasks
from metaleo.learners import LEO, Hyper
from metaleo.model.network import linear
from metaleo.outer_loop import advance, make_optimiser, start
from metaleo.tasks import Episodes

META_BATCH, WAY, QUERY = 12, 5, 15


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call, compilation and first run left out."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def matmul_rate(size: int, repeats: int, precision: str) -> float:
    """Floating-point operations per second of a float32 product of two size × size matrices."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size))
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    return 2 * size**3 / seconds(lambda: product(a, b), repeats)


def measure(shot: int, population: int, steps: int, tasks: int, repeats: int) -> dict[str, Any]:
    metaset = load_sample()
    rows = place(metaset)
    training = Episodes.over(metaset.subset("train"), WAY, shot, QUERY, rows)
    testing = Episodes.over(metaset.subset("test"), WAY, shot, QUERY, rows)
    optimiser = make_optimiser()
    hyper = jax.tree.map(jnp.asarray, Hyper())

    def begin(key):
        return start(LEO.init(key, linear(metaset.dim)), optimiser)

    def go(num_steps, state, key, episodes):
        return advance(state, hyper, key, episodes, optimiser, META_BATCH, num_steps)

    states, key = begin(jax.random.key(0)), jax.random.key(1)
    flops = cost(jax.jit(functools.partial(go, 1)).lower(states, key, training).compile())
    run = functools.partial(go, steps)
    if population > 1:
        keys = jax.random.split(key, population)
        states, key, run = jax.vmap(begin)(keys), keys, jax.vmap(run, (0, 0, None))
    run = compiled(run)
    took = seconds(lambda: run(states, key, training), repeats)
    result = {
        "shot": shot,
        "population": population,
        "meta_steps_per_second": round(population * steps / took, 1),
        "flops_per_step": flops,
        "gflops": round(flops * population * steps / took / 1e9, 1),
    }
    if population == 1:
        evaluate = jax.jit(score_tasks)
        numbers = jnp.arange(tasks)
        took = seconds(lambda: evaluate(states.learner, testing, key, numbers), repeats)
        result["evaluation_tasks_per_second"] = round(tasks / took, 1)
    return result


def cost(compiled: Any) -> float:
    analysis = compiled.cost_analysis()
    return float((analysis[0] if isinstance(analysis, list) else analysis)["flops"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--populations", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=100, help="meta-steps per timed call")
    parser.add_argument("--tasks", type=int, default=2000, help="evaluation tasks per timed call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--matmul", type=int, default=2048, help="size of the matrix product")
    options = parser.parse_args()
    rates = {
        f"matmul_{precision}_gflops": round(matmul_rate(options.matmul, options.repeats, precision) / 1e9, 1)
        for precision in ("highest", "default")
    }
    runs = [
        measure(shot, population, options.steps, options.tasks, options.repeats)
        for population in options.populations
        for shot in options.shots
    ]
    for run in runs:
        run["share_of_float32_matmul"] = round(run["gflops"] / rates["matmul_highest_gflops"], 3)
    device = jax.devices()[0]
    print(json.dumps({"device": device.device_kind, "jax": jax.__version__, **rates, "runs": runs}, indent=2))


if __name__ == "__main__":
    main()
