"""Runs side by side: seeds or trials are lanes of one program, spread over the devices of one host or of several.

A lane knows nothing of its neighbours, so nothing is exchanged while they run. Several hosts do this together when
each starts the same command with JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its
environment (or under a scheduler that JAX knows); the first one writes the files, which all must be able to read.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, PyTree

from metaleo import outer_loop
from metaleo.compiling import compiled
from metaleo.config import Clip
from metaleo.devices import AXIS, can_share, mean_over_devices, on_each, put
from metaleo.engines import Engine
from metaleo.errors import BadInput
from metaleo.evaluation import mean_merit
from metaleo.outer_loop import MeanMerit, MetaGradient


def join_hosts() -> None:
    """Become one of several processes, if the environment says so."""
    if "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    try:
        processes, process = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        jax.distributed.initialize(
            num_processes=None if processes is None else int(processes),  # none: JAX asks the scheduler
            process_id=None if process is None else int(process),
        )
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"cannot join the other hosts: {str(error).splitlines()[0]}") from error
    results = os.dup(1)  # standard output is for results, but what joins the hosts talks there too
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", encoding="utf-8") if is_first_host() else open(os.devnull, "w")  # noqa: SIM115


def is_first_host() -> bool:
    """Whether this process is the one that writes files and talks to people."""
    return jax.process_index() == 0


def meet(what: str) -> None:
    """Wait until all hosts are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def tell_all(tree: PyTree) -> PyTree:
    """What the first host has, on every host; arrays of one shape on all of them."""
    return multihost_utils.broadcast_one_to_all(tree) if jax.process_count() > 1 else tree


def any_host(here: bool) -> bool:
    if jax.process_count() == 1:
        return here
    return bool(np.any(multihost_utils.process_allgather(np.array(here))))


def lanes_for(runs: int) -> int:
    """As many lanes as runs, rounded up so that every device has the same number; a single run has all devices."""
    return 1 if runs == 1 and jax.process_count() == 1 else -(-runs // jax.device_count()) * jax.device_count()


def spread(tree: PyTree, lanes: int) -> PyTree:
    """Arrays with an entry per run, as lanes on the devices; the last run also fills the lanes that are left."""

    def fill(leaf: Array | np.ndarray) -> Array | np.ndarray:
        missing = lanes - len(leaf)
        return jnp.concatenate([leaf, *[leaf[-1:]] * missing]) if missing else leaf

    return put(jax.tree.map(fill, tree), Spec() if lanes == 1 else Spec(AXIS))


def fetch(tree: PyTree, runs: int) -> PyTree:
    """The entries of the runs, on the host, without the lanes that only fill up."""
    if jax.process_count() > 1:
        tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:runs], tree)


def side_by_side(function: Callable[..., Any], lanes: int, axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """`jax.vmap` over lanes, a part of them on each device; without the cost of an axis where there is one lane."""
    if lanes == 1:
        return alone(function, axes)
    mapped = jax.vmap(function, axes)
    if jax.device_count() == 1:
        return mapped
    specs = tuple(Spec() if axis is None else Spec(AXIS) for axis in axes)
    return on_each(mapped, specs, Spec(AXIS))


def alone(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """A population of one."""

    def single(*arguments: PyTree) -> PyTree:
        def pick(axis, argument):
            return argument if axis is None else jax.tree.map(lambda leaf: leaf[0], argument)

        return jax.tree.map(lambda leaf: leaf[None], function(*map(pick, axes, arguments)))

    return single


def runs_per_device(lanes: int) -> int:
    return max(1, lanes // jax.device_count())


def sharing_tasks(lanes: int, tasks: int) -> bool:
    """Whether the devices share out the tasks of a single run, instead of runs."""
    return lanes == 1 and can_share(tasks)


def shared_gradient(gradient: MetaGradient) -> MetaGradient:
    """The same, every device with a part of the tasks."""

    def of_part(*arguments: Any) -> Any:
        direction, infos = gradient(*arguments)
        return mean_over_devices(direction), infos

    return on_each(of_part, (Spec(), Spec(), Spec(AXIS), Spec(), Spec(AXIS)), (Spec(), Spec(AXIS)))


def shared_merit(merit: MeanMerit) -> MeanMerit:
    """The same, every device with a part of the tasks."""

    def of_part(*arguments: Any) -> Any:
        return mean_over_devices(merit(*arguments))

    return on_each(of_part, (Spec(), Spec(), Spec(), Spec(AXIS)), Spec())


@functools.cache
def advancer(
    engine: Engine, lanes: int, num_steps: int, meta_batch: int, clip: Clip, decay_over: int | None = None
) -> Callable[..., Any]:
    """`outer_loop.advance` for all lanes at once, compiled; nearly always for one and the same number of steps."""
    gradient = functools.partial(outer_loop.meta_gradient, engine=engine)
    advance = functools.partial(
        outer_loop.advance,
        optimiser=outer_loop.make_optimiser(clip),
        meta_batch=meta_batch,
        num_steps=num_steps,
        decay_over=decay_over,
        unroll=2 if lanes == 1 and num_steps % 2 == 0 and jax.default_backend() == "gpu" else 1,  # 8 µs less per step
        gradient=shared_gradient(gradient) if sharing_tasks(lanes, meta_batch) else gradient,
    )
    return compiled(side_by_side(advance, lanes, (0, 0, 0, None)), loops=True, donate_argnums=0)


@functools.cache
def validator(engine: Engine, lanes: int, num_tasks: int) -> Callable[..., Any]:
    """`outer_loop.validate` for all lanes at once, compiled."""
    merit = functools.partial(mean_merit, engine=engine)
    merit = shared_merit(merit) if sharing_tasks(lanes, num_tasks) else merit
    validate = functools.partial(outer_loop.validate, num_tasks=num_tasks, mean_merit=merit)
    return compiled(side_by_side(validate, lanes, (0, None, None, None)), donate_argnums=0)


def report_every() -> int:
    """Meta-steps between reports, at most: about a second's worth, so also how long Ctrl-C may take."""
    return 100 if jax.default_backend() == "cpu" else 500
