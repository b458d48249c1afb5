"""Run folders: a training run that can be watched, stopped, killed and resumed without a trace in its result.

RUN/config.json          everything that decides the result
RUN/metrics.jsonl        a line per report and seed
RUN/state.safetensors    all that is needed to go on
RUN/model.safetensors    the best learner so far (model-<seed>.safetensors with several seeds)
RUN/curves.png           accuracy over meta-steps
"""

import contextlib
import dataclasses
import functools
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from metaleo import data, outer_loop
from metaleo.checkpoint import load_tree, save_model, save_tree
from metaleo.compiling import compiled
from metaleo.config import Clip, TrainConfig
from metaleo.data.metaset import MetaSet
from metaleo.data.rows import place
from metaleo.errors import BadInput
from metaleo.files import write_text
from metaleo.outer_loop import RunState
from metaleo.tasks.episodes import Episodes

REPORT_EVERY = 100
"""Meta-steps between reports, at most: also how long Ctrl-C may take."""
SAVE_SECONDS = 2.0
"""Least time between two saves of the state."""
HOPELESS = 100
"""Non-finite meta-gradients in a row after which a run gives up."""

Record = dict[str, Any]


class Interrupted(Exception):
    """The run was asked to stop, and has been saved."""


def prepare(folder: Path, config: TrainConfig, overwrite: bool) -> None:
    """Claim a folder for a new run, and write down its configuration."""
    config_path = folder / "config.json"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not overwrite:
            raise BadInput(f"{folder} exists; continue it with --resume or replace it with --overwrite")
        if not config_path.is_file():
            raise BadInput(f"{folder} is not a run folder; --overwrite replaces only those")
        shutil.rmtree(folder)
    write_text(config_path, json.dumps(config.to_json(), indent=2) + "\n")


def resume(folder: Path, steps: int | None) -> TrainConfig:
    """The configuration of the run in a folder; it may be given more steps than it was started with."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise BadInput(f"nothing to resume: {folder} has no config.json")
    config = TrainConfig.read(config_path)
    if steps is not None and steps != config.steps:
        config = dataclasses.replace(config, steps=steps)
        write_text(config_path, json.dumps(config.to_json(), indent=2) + "\n")
    return config


@functools.cache
def advancer(seeds: int, num_steps: int, meta_batch: int, clip: Clip) -> Callable[..., Any]:
    """`outer_loop.advance` for all seeds at once, compiled; nearly always for one and the same number of steps."""
    advance = functools.partial(
        outer_loop.advance,
        optimiser=outer_loop.make_optimiser(clip),
        meta_batch=meta_batch,
        num_steps=num_steps,
    )
    return compiled(over_seeds(advance, seeds, (0, None, 0, None)), donate_argnums=0)


@functools.cache
def validator(seeds: int, num_tasks: int) -> Callable[..., Any]:
    """`outer_loop.validate` for all seeds at once, compiled."""
    validate = functools.partial(outer_loop.validate, num_tasks=num_tasks)
    return compiled(over_seeds(validate, seeds, (0, None, None, None)), donate_argnums=0)


def over_seeds(function: Callable[..., Any], seeds: int, axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """`jax.vmap`, without the cost of an axis of length one where there is a single seed."""
    if seeds > 1:
        return jax.vmap(function, axes)

    def single(*arguments: PyTree) -> PyTree:
        def pick(axis, argument):
            return argument if axis is None else jax.tree.map(lambda leaf: leaf[0], argument)

        return jax.tree.map(lambda leaf: leaf[None], function(*map(pick, axes, arguments)))

    return single


class Run:
    """One run of `config.seeds` seeds, trained side by side as a `vmap`."""

    def __init__(self, config: TrainConfig, folder: Path, metaset: MetaSet | None = None):
        self.config, self.folder = config, folder
        metaset = data.load(config.data) if metaset is None else metaset
        if metaset.dim != config.structure.dim:
            raise BadInput(f"{config.data} has {metaset.dim} features, the run was made for {config.structure.dim}")
        if metaset.subset(config.train_on).counts.size == 0:
            raise BadInput(f"{config.data} has no {config.train_on} classes: `split` marks them")
        rows = place(metaset)
        self.training = Episodes.over(metaset.subset(config.train_on), config.way, config.shot, config.query, rows)
        self.validation = Episodes.over(metaset.subset("val"), config.way, config.shot, None, rows)
        self.class_names = metaset.subset(config.train_on).class_names
        self.seeds = range(config.seed, config.seed + config.seeds)
        self.hyper = jax.tree.map(jnp.float32, config.hyper)
        self.patience = jnp.int32(config.patience * config.validate_every)
        self._saved_at = 0.0

        keys = [outer_loop.split_run_key(jax.random.key(seed)) for seed in self.seeds]
        self.init_keys, self.step_keys, self.validation_key = (
            jnp.stack([key[0] for key in keys]),
            jnp.stack([key[1] for key in keys]),
            keys[0][2],
        )

    def start(self) -> RunState:
        def begin(key):
            learner = self.config.structure.init(key)
            return outer_loop.start(learner, outer_loop.make_optimiser(self.config.clip))

        return jax.jit(jax.vmap(begin))(self.init_keys)

    def load(self) -> RunState:
        """The last saved state, or the start if there is none yet."""
        path = self.folder / "state.safetensors"
        return load_tree(path, jax.eval_shape(self.start)) if path.is_file() else self.start()

    def save(self, state: RunState) -> None:
        save_tree(self.folder / "state.safetensors", state, {"kind": "state"})
        self._saved_at = time.monotonic()

    def save_models(self, state: RunState) -> None:
        """The best learner of each seed, once there is one."""
        for index, seed in enumerate(self.seeds):
            if not np.isfinite(state.best_accuracy[index]):
                continue
            header = {
                "config": self.config.to_json(),
                "seed": seed,
                "step": int(state.best_step[index]),
                "validation_accuracy": float(state.best_accuracy[index]),
                "classes": self.class_names,
            }
            learner = jax.tree.map(lambda leaf, i=index: leaf[i], state.best)
            save_model(self.folder / self.model_name(seed), learner, self.config.structure, header)

    def model_name(self, seed: int) -> str:
        return "model.safetensors" if len(self.seeds) == 1 else f"model-{seed}.safetensors"

    def train(self, report: Callable[[list[Record]], None]) -> RunState:
        """Go on from the last saved state to the end; `report` hears of every few steps, a record per seed."""
        state = self.load()
        step = int(state.step.max())
        log = Log(self.folder / "metrics.jsonl", step)
        self.save_models(state)
        with stop_signals() as asked_to_stop:
            while step < self.config.steps and not bool(state.stopped.all()):
                stopped_before = np.array(state.stopped)
                every = self.config.validate_every
                num_steps = min(REPORT_EVERY, every - step % every, self.config.steps - step)
                advance = advancer(self.config.seeds, num_steps, self.config.meta_batch, self.config.clip)
                state, info = advance(state, self.hyper, self.step_keys, self.training)
                step += num_steps
                validated = step % every == 0 or step == self.config.steps
                if validated:
                    validate = validator(self.config.seeds, self.config.validation_tasks)
                    state, accuracy = validate(state, self.validation_key, self.validation, self.patience)
                    info = info | {"validation_accuracy": accuracy}
                records = self.records(state, info, stopped_before)
                log.write(records)
                stopping = bool(asked_to_stop)  # a signal after this line waits for the next save
                if validated or stopping or time.monotonic() - self._saved_at > SAVE_SECONDS:
                    self.save(state)
                if validated:
                    self.save_models(state)
                report(records)
                if int(state.skipped_in_a_row.max()) >= HOPELESS:
                    raise BadInput(
                        f"the last {HOPELESS} meta-gradients were NaN or Inf (by step {step}); the weights are intact, "
                        "but nothing is learned any more: lower --learning-rate or check the data"
                    )
                if stopping:
                    raise Interrupted
        return state

    def records(self, state: RunState, info: dict[str, Any], stopped: np.ndarray) -> list[Record]:
        """What is worth writing down, for each seed that was still running."""
        rows = []
        for index, seed in enumerate(self.seeds):
            if stopped[index]:
                continue
            values = {name: finite(value[index]) for name, value in info.items()}
            rows.append({"step": int(state.step[index]), "seed": seed, **values, "skipped": int(state.skipped[index])})
        return rows


def finite(value: Any) -> float | None:
    number = float(value)
    return round(number, 6) if math.isfinite(number) else None


class Log:
    """metrics.jsonl. Lines past the state that a run resumes from are dropped: they will be written again."""

    def __init__(self, path: Path, step: int):
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self.path = path

    def write(self, records: list[Record]) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in records))
        except OSError as error:
            raise BadInput(f"cannot write {self.path}: {error.strerror}; what was saved before is intact") from error


def read_metrics(path: Path) -> list[Record]:
    """All whole lines of a metrics file; a kill may have left half a line at the end."""
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
    return records


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that becomes non-empty when SIGINT or SIGTERM arrives; a second Ctrl-C is an ordinary one."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def model_paths(run: Path) -> list[Path]:
    """The model files that a path stands for: itself, or those of a run folder in the order of their seeds."""
    if run.is_file():
        return [run]
    if not run.is_dir():
        raise BadInput(f"{run} does not exist; give a run folder or a model file")
    found = sorted(run.glob("model*.safetensors"), key=lambda path: (len(path.name), path.name))
    if not found:
        raise BadInput(f"{run} has no model yet: a run saves its first one at its first validation")
    return found
