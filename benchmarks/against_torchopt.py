"""Meta-training rates of MAML and Meta-SGD beside the same work through TorchOpt (PyTorch), on the CPU.

    pip install ".[bench]"
    python benchmarks/against_torchopt.py               # 1-shot and 5-shot
    python benchmarks/against_torchopt.py --no-compile  # without torch.compile, which needs a C++ compiler

Both sides: 5 ways, 15 queries a class, 12 tasks a meta-batch, a linear head without bias on 640 features, 5
inner steps, second-order meta-gradient, Adam. Losses and meta-gradients are asserted equal before anything is
timed. PyTorch's side is written in four ways, TorchOpt's own recipe and three that batch the tasks by hand:

    recipe    TorchOpt's documented MAML: `torchopt.MetaSGD` on a module, task after task
    vmap      TorchOpt's functional API, `torch.func.vmap` over the tasks
    stacked   TorchOpt's functional API on the weights of all tasks in one tensor
    compiled  the same under `torch.compile`

each with one thread and with all. Threads that wait sleep (OMP_WAIT_POLICY=PASSIVE, unless set otherwise): by
default they spin, and where other processes share the cores that makes PyTorch tens of times slower.

TorchOpt's step sizes are numbers or schedules: those of Meta-SGD, learned, are a schedule that returns them.
In PyTorch's favour: its tasks are drawn beforehand. Ours are drawn in the timed loop, which also draws
dropout masks (that keep everything), clips the meta-gradient and looks for NaNs in it.

Prints JSON. Rates are medians over rounds, where each way takes its turn; compilation is left out.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from metaleo.data import load_data
from metaleo.engines import choose_engine
from metaleo.learners import MAML, HyperParams, Learner, MetaSGD
from metaleo.nn.heads import linear_network
from metaleo.tasks import Episodes, Task
from metaleo.training.meta_train import advance, make_optimiser, meta_gradient, start_run

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
try:
    import torch
    import torchopt
    from torch.nn.functional import cross_entropy
    from torchopt.transform import scale, scale_by_schedule
except ImportError as error:
    sys.exit(f"against_torchopt.py compares with torch and torchopt, which must be installed: {error}")

META_BATCH, WAY, QUERY, STEPS, STEP_SIZE = 12, 5, 15, 5, 10.0
POOL = 10  # meta-batches drawn beforehand for PyTorch, which goes round them
Phi = tuple[torch.Tensor, ...]  # the start, and for Meta-SGD the step sizes
Batch = tuple[torch.Tensor, ...]  # inputs and labels of the support sets, then of the query sets
Gradient = Callable[[Batch], tuple[torch.Tensor, Phi]]  # the meta-loss and its gradient


def loss(weights: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy((inputs @ weights.mT).flatten(0, -2), labels.flatten())


def descend(phi: Phi, begin: torch.Tensor, gradient: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The inner loop in TorchOpt's functional API. `torchopt.sgd` without momentum is this `scale`."""
    inner = scale(-STEP_SIZE) if len(phi) == 1 else scale_by_schedule(lambda _: -phi[1])
    weights, state = begin, inner.init(begin)
    for _ in range(STEPS):
        updates, state = inner.update(gradient(weights), state, params=weights, inplace=False)
        weights = torchopt.apply_updates(weights, updates, inplace=False)
    return weights


def backward(meta_loss: Callable[[Batch], torch.Tensor], phi: Phi) -> Gradient:
    def gradient(batch):
        value = meta_loss(batch)
        return value, torch.autograd.grad(value, phi)

    return gradient


def recipe(phi: Phi) -> Gradient:
    head = torch.nn.Linear(phi[0].shape[1], WAY, bias=False)
    head.weight = phi[0]
    inner = torchopt.MetaSGD(head, lr=STEP_SIZE if len(phi) == 1 else lambda _: phi[1])

    def meta_loss(batch):
        head_state = torchopt.extract_state_dict(head, by="reference", detach_buffers=True)
        inner_state = torchopt.extract_state_dict(inner, by="reference")
        losses = []
        for support, support_labels, query, query_labels in zip(*batch, strict=True):
            for _ in range(STEPS):
                inner.step(WAY * cross_entropy(head(support), support_labels))
            losses.append(cross_entropy(head(query), query_labels))
            torchopt.recover_state_dict(head, head_state)
            torchopt.recover_state_dict(inner, inner_state)
        return torch.stack(losses).mean()

    return backward(meta_loss, phi)


def vmap(phi: Phi) -> Gradient:
    def task_loss(support, support_labels, query, query_labels):
        inner_gradient = torch.func.grad(lambda weights: WAY * loss(weights, support, support_labels))
        return loss(descend(phi, phi[0], inner_gradient), query, query_labels)

    return backward(lambda batch: torch.func.vmap(task_loss)(*batch).mean(), phi)


def stacked_loss(phi: Phi, batch: Batch, grad: Callable) -> torch.Tensor:
    """Each task has its own weights, hence the gradient of the sum of the losses is the gradient of each."""
    inner_gradient = grad(lambda weights: META_BATCH * WAY * loss(weights, *batch[:2]))
    return loss(descend(phi, phi[0].expand(META_BATCH, -1, -1), inner_gradient), *batch[2:])


def stacked(phi: Phi) -> Gradient:
    def grad(f):
        return lambda weights: torch.autograd.grad(f(weights), weights, create_graph=True)[0]

    return backward(lambda batch: stacked_loss(phi, batch, grad), phi)


def compiled(phi: Phi) -> Gradient:
    whole = torch.func.grad_and_value(functools.partial(stacked_loss, grad=torch.func.grad))
    whole = torch.compile(whole, fullgraph=True)
    return lambda batch: whole(tuple(p.detach() for p in phi), batch)[::-1]


def train(phi: Phi, gradient: Gradient, batches: list[Batch], steps: int, threads: int) -> None:
    torch.set_num_threads(threads)
    optimiser = torch.optim.Adam(phi, HyperParams().learning_rate, fused=True)
    for step in range(steps):
        _, gradients = gradient(batches[step % POOL])
        for parameter, value in zip(phi, gradients, strict=True):
            parameter.grad = value
        optimiser.step()


def to_torch(tasks: Task) -> Batch:
    arrays = [a for part in (tasks.support, tasks.query) for a in (part.inputs, part.targets.argmax(-1))]
    return tuple(torch.tensor(np.asarray(a), dtype=None if a.ndim == 3 else torch.int64) for a in arrays)


def measure(learner: Learner, shot: int, ways: list, threads: list[int], steps: int, rounds: int) -> dict[str, Any]:
    episodes = Episodes.over(load_data("sample").subset("train"), WAY, shot, QUERY)
    keys = jax.random.split(jax.random.key(1), (POOL, META_BATCH))
    sample = jax.jit(lambda episodes, keys: jax.vmap(episodes.sample)(keys))
    pool = [sample(episodes, k) for k in keys]
    batches = [to_torch(tasks) for tasks in pool]
    hyper = jax.tree.map(jnp.asarray, HyperParams(keep_prob=1.0, l2=0.0))
    indices = jax.vmap(episodes.sample_indices)(keys[0])
    expected, info = jax.jit(functools.partial(meta_gradient, engine=choose_engine(learner)))(
        learner, episodes, indices, hyper, keys[0]
    )

    calls: dict[str, Callable[[], Any]] = {}
    for way in ways:
        phi = tuple(torch.nn.Parameter(torch.tensor(np.asarray(leaf))) for leaf in jax.tree.leaves(learner))
        gradient = way(phi)
        value, gradients = gradient(batches[0])  # both sides compute the same, or this stops here
        np.testing.assert_allclose(value.item(), info["query_loss"].mean(), rtol=1e-5)
        for theirs, ours in zip(gradients, jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-3, atol=1e-4 * np.abs(ours).max())
        for n in threads:
            calls[f"{way.__name__}, {n} threads"] = functools.partial(train, phi, gradient, batches, steps, n)

    optimiser = make_optimiser()
    state = start_run(learner, optimiser)
    run = jax.jit(functools.partial(advance, optimiser=optimiser, meta_batch=META_BATCH, num_steps=steps))
    calls["ours"] = lambda: jax.block_until_ready(run(state, hyper, jax.random.key(2), episodes))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:  # the first round compiles and warms up
                times[name].append(time.perf_counter() - begin)
    rates = {name: steps / statistics.median(taken) for name, taken in times.items()}
    best = max(rates.keys() - {"ours"}, key=rates.__getitem__)
    ratios = [theirs / ours for theirs, ours in zip(times[best], times["ours"], strict=True)]
    return {
        "case": f"{type(learner).__name__}, {shot}-shot",
        "meta_steps_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "best_of_torchopt": best,
        "ratio_to_recipe": round(rates["ours"] / max(rates[n] for n in rates if n.startswith("recipe")), 2),
        "ratio_to_best": round(rates["ours"] / rates[best], 2),
        "ratio_to_best_over_rounds": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="MAML and Meta-SGD: our rates beside TorchOpt's")
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--steps", type=int, default=100, help="meta-steps per timed call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    ways = [recipe, vmap, stacked, *([compiled] if options.compile else [])]
    weights = 0.1 * jax.random.normal(jax.random.key(0), (WAY, load_data("sample").dim))
    sizes = STEP_SIZE * jax.random.uniform(jax.random.key(3), weights.shape, minval=0.5, maxval=1.5)
    network = linear_network(weights.shape[1])
    learners = [
        dataclasses.replace(MAML.init(network, way=WAY, step_size=STEP_SIZE, num_steps=STEPS), start=weights),
        dataclasses.replace(MetaSGD.init(network, way=WAY, num_steps=STEPS), start=weights, step_size=sizes),
    ]
    cases = itertools.product(learners, options.shots)
    result: dict[str, Any] = {module.__name__: module.__version__ for module in (jax, torch, torchopt)}
    result["runs"] = [measure(*c, ways, options.threads, options.steps, options.rounds) for c in cases]
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
