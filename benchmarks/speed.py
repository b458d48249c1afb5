"""Meta-training and evaluation rates at the paper's shapes, beside the rate of a large matrix product.

    python benchmarks/speed.py                      # one run at a time, 1-shot and 5-shot
    python benchmarks/speed.py --engines auto reference   # beside the learner as it is written
    python benchmarks/speed.py --populations 1 256  # also 256 runs as one vmap (for a GPU)

Prints JSON. Every figure is the median of several repeats within one process; compare ratios, not machines. On a CPU
meta-steps and the large product take turns, for what else the machine does to slow both.
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

from metaleo._jax.devices import replicate, use_all_cores
from metaleo.data import load_data
from metaleo.engines import all_engines, choose_engine
from metaleo.evaluation.evaluate import score_learner
from metaleo.learners import LEO, HyperParams
from metaleo.nn.heads import linear_network
from metaleo.tasks import Episodes
from metaleo.tasks.episodes import place_rows
from metaleo.training.meta_train import advance, make_optimiser, meta_gradient, start_run
from metaleo.training.population import compile_advance, replicas_for, replicas_per_device, shard_replicas

META_BATCH, WAY, QUERY = 12, 5, 15


def seconds(repeats: int, *calls: Callable[[], Any]) -> list[float]:
    """Median seconds of each call, compilation and first run left out; several take turns."""
    times = [[] for _ in calls]
    for _ in range(1 + repeats):
        for call, own in zip(calls, times, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(call())
            own.append(time.perf_counter() - begin)
    return [statistics.median(own[1:]) for own in times]


def matmul(size: int, precision: str) -> Callable[[], Any]:
    """A float32 product of two size × size matrices."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size))
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    return lambda: product(a, b)


def gigaflops(size: int, took: float) -> float:
    return round(2 * size**3 / took / 1e9, 1)


def problem(shot: int) -> tuple[Episodes, Episodes]:
    """Tasks to train on and tasks to test on, of the sample that comes with the package."""
    metaset = load_data("sample")
    rows = place_rows(metaset)
    training, testing = (Episodes.over(metaset.subset(split), WAY, shot, QUERY, rows) for split in ("train", "test"))
    return replicate((training, testing))


def measure(name: str, shot: int, population: int, steps: int, tasks: int, repeats: int, size: int) -> dict[str, Any]:
    """`metaleo train` and `metaleo evaluate` as they are: the same compiled functions, on the same devices."""
    training, testing = problem(shot)
    optimiser = make_optimiser()
    keys = jax.random.split(jax.random.key(0), population)
    begin = jax.jit(jax.vmap(lambda key: start_run(LEO.init(key, linear_network(training.rows.dim)), optimiser)))
    hyper = jax.tree.map(lambda value: jnp.full(population, value, jnp.float32), HyperParams())
    replicas = replicas_for(population)
    states, hyper, keys = shard_replicas((begin(keys), hyper, keys), replicas)

    def one_step(state, key, training):
        gradient = functools.partial(
            meta_gradient, engine=all_engines()["closed-form"]
        )  # XLA does not see into kernels
        return advance(state, HyperParams(), key, training, optimiser, META_BATCH, 1, gradient=gradient)

    first = jax.tree.map(lambda leaf: leaf[0], (states, keys))
    engine = choose_engine(first[0].learner, name, replicas_per_device(replicas))
    analysis: Any = jax.jit(one_step).lower(*first, training).cost_analysis()  # before it repeats some
    flops = float(analysis["flops"]) if analysis else None  # a GPU's client does not count
    run = compile_advance(engine, replicas, steps, META_BATCH, "global")

    def go():
        nonlocal states  # whose memory each call gives to the next
        states, _ = run(states, hyper, keys, training)
        return states.step

    took, *multiplied = seconds(repeats, go, *([] if flops is None else [matmul(size, "highest")]))
    result = {
        "engine": engine.name,
        "shot": shot,
        "population": population,
        "meta_steps_per_second": round(population * steps / took, 1),
    }
    if flops is not None:
        own, large = round(flops * population * steps / took / 1e9, 1), gigaflops(size, *multiplied)
        result |= {"flops_per_step": flops, "gflops": own, "matmul_in_turn_gflops": large}
        result["share_of_float32_matmul"] = round(own / large, 3)
    if population == 1:
        learner = jax.tree.map(lambda leaf: leaf[0], states.learner)
        (took,) = seconds(repeats, lambda: score_learner(learner, testing, 0, tasks, engine=engine))
        result["evaluation_tasks_per_second"] = round(tasks / took, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--populations", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=100, help="meta-steps per timed call")
    parser.add_argument("--tasks", type=int, default=2000, help="evaluation tasks per timed call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--matmul", type=int, default=2048, help="size of the matrix product")
    parser.add_argument("--engines", nargs="+", default=["auto"])
    options = parser.parse_args()
    use_all_cores()
    rates = {
        f"matmul_{precision}_gflops": gigaflops(
            options.matmul, *seconds(options.repeats, matmul(options.matmul, precision))
        )
        for precision in ("highest", "default")
    }
    runs = [
        measure(engine, shot, population, options.steps, options.tasks, options.repeats, options.matmul)
        for population in options.populations
        for shot in options.shots
        for engine in options.engines
    ]
    device = jax.devices()[0]
    machine = {"device": device.device_kind, "devices": jax.device_count(), "jax": jax.__version__}
    print(json.dumps({**machine, **rates, "runs": runs}, indent=2))


if __name__ == "__main__":
    main()
