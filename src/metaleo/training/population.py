"""Parallel runs: seeds or trials are replicas in one program, sharded over the devices of one host or of several.

Replicas are independent and exchange nothing while they run. To use several hosts, start the same command on each, with
JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its environment (or under a scheduler that
JAX knows). The first host writes the files, which all hosts must be able to read.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, PyTree

from metaleo._io.files import read_header
from metaleo._jax.devices import (
    AXIS,
    can_share,
    jit,
    mean_over_devices,
    on_each_device,
    put_on_devices,
)
from metaleo.config.schema import Clip
from metaleo.engines import AUTO, Engine, all_engines, choose_engine
from metaleo.evaluation.evaluate import mean_validation_score
from metaleo.learners.base import Learner
from metaleo.training.meta_train import (
    MetaGradient,
    ValidationScore,
    advance,
    make_optimiser,
    meta_gradient,
    validate,
)


def replicas_for(runs: int) -> int:
    """Number of runs, rounded up so that every device has equally many; a single run on one host uses all devices."""
    return 1 if runs == 1 and jax.process_count() == 1 else -(-runs // jax.device_count()) * jax.device_count()


def shard_replicas(tree: PyTree, replicas: int) -> PyTree:
    """Shard arrays with one entry per run over the devices; copies of the last run fill up the replicas."""

    def fill(leaf: Array | np.ndarray) -> Array | np.ndarray:
        missing = replicas - len(leaf)
        return jnp.concatenate([leaf, *[leaf[-1:]] * missing]) if missing else leaf

    return put_on_devices(jax.tree.map(fill, tree), Spec() if replicas == 1 else Spec(AXIS))


def gather_to_host(tree: PyTree, runs: int) -> PyTree:
    """Gather the entries of the runs on the host, without the replicas that only fill up."""
    if jax.process_count() > 1:
        tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:runs], tree)


def map_replicas(function: Callable[..., Any], replicas: int, axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """`jax.vmap` over replicas, split among the devices; a single replica avoids the cost of a batch axis."""
    if replicas == 1:
        return map_single(function, axes)
    mapped = jax.vmap(function, axes)
    if jax.device_count() == 1:
        return mapped
    specs = tuple(Spec() if axis is None else Spec(AXIS) for axis in axes)
    return on_each_device(mapped, specs, Spec(AXIS))


def map_single(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """`map_replicas` for a single replica: drops the leading axis and adds it again."""

    def single(*arguments: PyTree) -> PyTree:
        def sample_indices(axis, argument):
            return argument if axis is None else jax.tree.map(lambda leaf: leaf[0], argument)

        return jax.tree.map(lambda leaf: leaf[None], function(*map(sample_indices, axes, arguments)))

    return single


def replicas_per_device(replicas: int) -> int:
    return max(1, replicas // jax.device_count())


def sharing_tasks(replicas: int, tasks: int) -> bool:
    """Whether the devices split the tasks of a single run, instead of runs."""
    return replicas == 1 and can_share(tasks)


def shared_gradient(gradient: MetaGradient) -> MetaGradient:
    """The same gradient, with the tasks split among the devices."""

    def of_part(*arguments: Any) -> Any:
        direction, infos = gradient(*arguments)
        return mean_over_devices(direction), infos

    return on_each_device(of_part, (Spec(), Spec(), Spec(AXIS), Spec(), Spec(AXIS)), (Spec(), Spec(AXIS)))


def shared_score(score: ValidationScore) -> ValidationScore:
    """The same score, with the tasks split among the devices."""

    def of_part(*arguments: Any) -> Any:
        return mean_over_devices(score(*arguments))

    return on_each_device(of_part, (Spec(), Spec(), Spec(), Spec(AXIS)), Spec())


@functools.cache
def compile_advance(
    engine: Engine, replicas: int, num_steps: int, meta_batch: int, clip: Clip, decay_over: int | None = None
) -> Callable[..., Any]:
    """`advance` for all replicas, compiled; nearly every call has the same number of steps."""
    gradient = functools.partial(meta_gradient, engine=engine)
    advance_some = functools.partial(
        advance,
        optimiser=make_optimiser(clip),
        meta_batch=meta_batch,
        num_steps=num_steps,
        decay_over=decay_over,
        unroll=2
        if replicas == 1 and num_steps % 2 == 0 and jax.default_backend() == "gpu"
        else 1,  # saves 8 µs per step
        gradient=shared_gradient(gradient) if sharing_tasks(replicas, meta_batch) else gradient,
    )
    return jit(map_replicas(advance_some, replicas, (0, 0, 0, None)), loops=True, donate_argnums=0)


@functools.cache
def compile_validate(engine: Engine, replicas: int, num_tasks: int) -> Callable[..., Any]:
    """`validate` for all replicas, compiled."""
    score = functools.partial(mean_validation_score, engine=engine)
    score = shared_score(score) if sharing_tasks(replicas, num_tasks) else score
    validate_all = functools.partial(validate, num_tasks=num_tasks, score=score)
    return jit(map_replicas(validate_all, replicas, (0, None, None, None)), donate_argnums=0)


def engine_to_go_on(header: dict[str, Any], learner: Learner, name: str, runs: int) -> Engine:
    """The engine for a state with this header: the same as before if it is installed, unless `name` asks for one."""
    before = header.get("engine")
    return choose_engine(learner, before if name == AUTO and before in all_engines() else name, runs)


def devices_of(folder: Path) -> int | None:
    """The number of CPU devices on which the work in a folder was begun, as far as it is known."""
    if not any((folder / name).is_file() for name in ("config.json", "worker", "compare.json", "reproduce.json")):
        return None
    for name in ("state.safetensors", "population.safetensors"):
        for path in sorted(folder.rglob(name)):
            header = read_header(path)
            if header.get("backend") == "cpu":
                return header.get("devices")
    return None


def report_every() -> int:
    """Maximum number of meta-steps between reports: about one second, which is also the latency of Ctrl-C."""
    return 100 if jax.default_backend() == "cpu" else 500
