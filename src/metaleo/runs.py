"""Run folders: a training run that can be watched, stopped, killed and resumed without a trace in its result.

RUN/config.json          everything that decides the result
RUN/metrics.jsonl        a line per report and seed
RUN/state.safetensors    all that is needed to go on
RUN/model.safetensors    the best learner so far (model-<seed>.safetensors with several seeds)
RUN/curves.png           accuracy over meta-steps
"""

import dataclasses
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from metaleo import data, outer_loop
from metaleo.calibration import calibrate
from metaleo.checkpoint import MODELS, embedded_model, save_model
from metaleo.config import PROBLEMS, TrainConfig
from metaleo.data.metaset import MetaSet
from metaleo.data.rows import place
from metaleo.devices import everywhere
from metaleo.engines import AUTO, choose, engines
from metaleo.errors import BadInput
from metaleo.features.networks import load_network
from metaleo.files import write_text
from metaleo.journal import Interrupted, Log, Record, claim, finite, stop_signals
from metaleo.learners.joint import Joint, Tail
from metaleo.outer_loop import RunState
from metaleo.population import (
    advancer,
    any_host,
    fetch,
    is_first_host,
    lanes_for,
    meet,
    report_every,
    runs_per_device,
    spread,
    validator,
)
from metaleo.tasks.episodes import Episodes
from metaleo.trees import load_tree, read_header, save_tree

SAVE_SECONDS = 2.0
"""Least time between two saves of the state."""
HOPELESS = 100
"""Non-finite meta-gradients in a row after which a run gives up."""


def prepare(folder: Path, config: TrainConfig, overwrite: bool) -> None:
    """Claim a folder for a new run, and write down its configuration."""
    if is_first_host():
        claim(folder, config.to_json(), overwrite)


def resume(folder: Path, steps: int | None) -> TrainConfig:
    """The configuration of the run in a folder; it may be given more steps than it was started with."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise BadInput(f"nothing to resume: {folder} has no config.json")
    config = TrainConfig.read(config_path)
    if config.engine not in (AUTO, *engines()):
        warnings.warn(f"{folder} was begun with the engine {config.engine}, which is not installed here", stacklevel=2)
        config = dataclasses.replace(config, engine=AUTO)
    if steps is not None and steps != config.steps:
        if config.decay:
            raise BadInput(
                f"the learning rate of {folder} falls to zero over its {config.steps:,} steps; for another number of "
                "steps, start a new run"
            )
        config = dataclasses.replace(config, steps=steps)
        if is_first_host():
            write_text(config_path, json.dumps(config.to_json(), indent=2) + "\n")
    return config


class Run:
    """One run of `config.seeds` seeds, trained side by side."""

    def __init__(self, config: TrainConfig, folder: Path, metaset: MetaSet | None = None):
        self.config, self.folder = config, folder
        self.class_names: tuple[str, ...] = ()
        if config.data in PROBLEMS:
            tasks = PROBLEMS[config.data](config.shot, config.query)
            training, validation = tasks, tasks  # an endless stream, from keys of their own
        else:
            metaset = data.load(config.data) if metaset is None else metaset
            training, validation = self.episodes(metaset)
            self.class_names = metaset.subset(config.train_on).class_names
        self.training, self.validation = everywhere((training, validation))
        self.seeds = range(config.seed, config.seed + config.seeds)
        self.lanes = lanes_for(config.seeds)
        self.engine = choose(config.structure.blank(), config.engine, runs_per_device(self.lanes))
        hyper = jax.tree.map(lambda value: jnp.full(config.seeds, value, jnp.float32), config.hyper)
        keys = [outer_loop.split_run_key(jax.random.key(seed)) for seed in self.seeds]
        self.init_keys = jnp.stack([key[0] for key in keys])
        self.hyper, self.step_keys = spread((hyper, jnp.stack([key[1] for key in keys])), self.lanes)
        patience = jnp.int32(config.patience * config.validate_every)
        self.validation_key, self.patience = everywhere((keys[0][2], patience))
        self._saved_at = 0.0
        self.steps_per_second = 0.0
        """Of the last few meta-steps, of all seeds together, without validation."""

    def episodes(self, metaset: MetaSet) -> tuple[Episodes, Episodes]:
        """Tasks to learn from, and tasks to validate on."""
        config = self.config
        if metaset.dim != config.structure.dim:
            raise BadInput(f"{config.data} has {metaset.dim} features, the run was made for {config.structure.dim}")
        if metaset.subset(config.train_on).counts.size == 0:
            raise BadInput(f"{config.data} has no {config.train_on} classes: `split` marks them")
        rows = place(metaset, normalised=config.structure.normalised)
        training = Episodes.over(metaset.subset(config.train_on), config.way, config.shot, config.query, rows)
        return training, Episodes.over(metaset.subset("val"), config.way, config.shot, None, rows)

    def check_classes(self) -> None:
        """Refuse to go on with other training classes than the run began with: a file may change under its name."""
        for path in self.folder.glob("model*.safetensors"):
            before = tuple(read_header(path).get("classes", ()))
            if before != self.class_names:
                raise BadInput(
                    f"{self.config.data} has other training classes than when {self.folder} was begun "
                    f"({len(self.class_names)} instead of {len(before)}, or other ones); start a new run"
                )

    def start(self) -> RunState:
        """The state before the first step; a tail starts from its network."""
        joint = self.config.joint
        return self.begin(None if joint is None else Tail.of(load_network(Path(joint))))

    def begin(self, tail: Tail | None) -> RunState:
        def begin_one(key):
            learner = self.config.structure.init(key)
            if isinstance(learner, Joint) and tail is not None:
                learner = Joint(tail, learner.learner)
            return outer_loop.start(learner, outer_loop.make_optimiser(self.config.clip))

        return jax.jit(jax.vmap(begin_one))(self.init_keys)

    def load(self) -> RunState:
        """The last saved state, or the start if there is none yet."""
        path = self.folder / "state.safetensors"
        return load_tree(path, jax.eval_shape(self.begin, None)) if path.is_file() else self.start()

    def save(self, state: RunState) -> None:
        save_tree(self.folder / "state.safetensors", state, {"kind": "state"})
        self._saved_at = time.monotonic()

    def save_models(self, state: RunState) -> None:
        """The best learner of each seed, once there is one."""
        for index, seed in enumerate(self.seeds):
            if not np.isfinite(state.best_merit[index]):
                continue
            merit = {name: float(value) for name, value in self.merit(state.best_merit[index]).items()}
            header = {
                "config": self.config.to_json(),
                "engine": self.engine.name,
                "seed": seed,
                "step": int(state.best_step[index]),
                **merit,
                "classes": self.class_names,
            }
            learner = jax.tree.map(lambda leaf, i=index: leaf[i], state.best)
            save_model(self.folder / self.model_name(seed), learner, self.config.structure, header)

    def merit(self, value: Any) -> dict[str, Any]:
        """What is written down of a validation, by its name."""
        return {"validation_loss": -value} if self.config.data in PROBLEMS else {"validation_accuracy": value}

    def model_name(self, seed: int) -> str:
        return "model.safetensors" if len(self.seeds) == 1 else f"model-{seed}.safetensors"

    def train(self, report: Callable[[list[Record]], None]) -> RunState:
        """Go on from the last saved state to the end; `report` hears of every few steps, a record per seed."""
        config, runs = self.config, self.config.seeds
        state = self.load()
        step, stopped = int(state.step.max()), np.array(state.stopped)
        log = Log(self.folder / "metrics.jsonl", step)
        if is_first_host():
            self.save_models(state)
        state = spread(state, self.lanes)
        with stop_signals() as asked_to_stop:
            while step < config.steps and not stopped.all():
                every = config.validate_every
                num_steps = min(report_every(), every - step % every, config.steps - step)
                decay_over = config.steps if config.decay else None
                advance = advancer(self.engine, self.lanes, num_steps, config.meta_batch, config.clip, decay_over)
                begin = time.monotonic()
                state, info = advance(state, self.hyper, self.step_keys, self.training)
                jax.block_until_ready(info)
                self.steps_per_second = runs * num_steps / (time.monotonic() - begin)
                step += num_steps
                validated = step % every == 0 or step == config.steps
                if validated:
                    validate = validator(self.engine, self.lanes, config.validation_tasks)
                    state, merit = validate(state, self.validation_key, self.validation, self.patience)
                    info = info | self.merit(merit)
                seen = (info, state.step, state.stopped, state.skipped, state.skipped_in_a_row)
                info, steps, now_stopped, skipped, in_a_row = fetch(seen, runs)
                records = self.records(info, steps, skipped, stopped)
                stopped = now_stopped
                log.write(records)
                stopping = any_host(bool(asked_to_stop))  # a signal after this line waits for the next save
                # hosts save together, and their clocks differ
                due = jax.process_count() == 1 and time.monotonic() - self._saved_at > SAVE_SECONDS
                if validated or stopping or due:
                    reached = fetch(state, runs)
                    if is_first_host():
                        self.save(reached)
                        if validated:
                            self.save_models(reached)
                report(records)
                if int(in_a_row.max()) >= HOPELESS:
                    raise BadInput(
                        f"the last {HOPELESS} meta-gradients were NaN or Inf (by step {step}); the weights are intact, "
                        "but nothing is learned any more: lower --learning-rate or check the data"
                    )
                if stopping:
                    raise Interrupted
        meet("end of training")
        return fetch(state, runs)

    def calibrate(self, state: RunState) -> None:
        """Give the models of a finished run their temperatures, learned on tasks of validation classes."""
        seen = "val" in self.config.train_on  # classes that were trained on would make a model look too sure
        if not isinstance(self.validation, Episodes) or seen or not is_first_host():
            return
        for seed, merit in zip(self.seeds, state.best_merit, strict=True):
            if np.isfinite(merit):
                calibrate(self.folder / self.model_name(seed), self.validation)

    def records(
        self, info: dict[str, np.ndarray], steps: np.ndarray, skipped: np.ndarray, stopped: np.ndarray
    ) -> list[Record]:
        """What is worth writing down, for each seed that was still running."""
        rows = []
        for index, seed in enumerate(self.seeds):
            if not stopped[index]:
                values = {name: finite(value[index]) for name, value in info.items()}
                rows.append({"step": int(steps[index]), "seed": seed, **values, "skipped": int(skipped[index])})
        return rows


def model_paths(run: Path) -> list[Path]:
    """The model files that a path stands for: itself, those of a run folder in the order of their seeds, or the one in
    this package of that name."""
    if run.is_file():
        return [run]
    if str(run) in MODELS and not run.exists():
        return [embedded_model(str(run))]
    if not run.is_dir():
        raise BadInput(f"{run} does not exist; give a run folder or a model file")
    found = sorted(run.glob("model*.safetensors"), key=lambda path: (len(path.name), path.name))
    if not found:
        raise BadInput(f"{run} has no model yet: a run saves its first one at its first validation")
    return found
