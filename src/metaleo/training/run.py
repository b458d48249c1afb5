"""Training runs in folders: stopping, killing and resuming a run does not change its result.

RUN/config.json          everything that decides the result
RUN/metrics.jsonl        one line per report and seed
RUN/state.safetensors    all that is needed to resume
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

from metaleo._io.files import load_tree, read_header, save_tree, write_text
from metaleo._io.progress import Progress
from metaleo._io.run_log import MetricsLog, Record, claim_run_folder, finite_or_none, owned, stop_signals
from metaleo._jax.devices import (
    any_host,
    barrier,
    fits_on_device,
    is_first_host,
    replicate,
    rounding,
    warn_of_other_rounding,
)
from metaleo.checkpoints import save_model
from metaleo.config.schema import TrainConfig
from metaleo.data.feature_files import load_data
from metaleo.data.metaset import MetaSet
from metaleo.engines import AUTO, all_engines, choose_engine
from metaleo.errors import BadInput, Interrupted
from metaleo.evaluation.calibration import calibrate_model
from metaleo.features.backbone_files import load_backbone
from metaleo.learners.anchor import Anchor
from metaleo.learners.joint import Joint, Tail
from metaleo.learners.leo import LEO
from metaleo.tasks import PROBLEMS
from metaleo.tasks.episodes import Episodes, MixedEpisodes, Rows, as_they_are, check_classes, place_rows
from metaleo.tasks.task import normalise
from metaleo.training.anchoring import choose_anchor, validation_tasks
from metaleo.training.meta_train import RunState, make_optimiser, split_run_key, start_run
from metaleo.training.population import (
    compile_advance,
    compile_validate,
    engine_to_go_on,
    gather_to_host,
    replicas_for,
    replicas_per_device,
    report_every,
    shard_replicas,
)

SAVE_SECONDS = 2.0
"""Minimum time between two saves of the state."""
OLD_LEAF_NAMES = {"best_score": "best_merit"}
"""Names of leaves in state.safetensors of version 0.1."""
MOST_SKIPPED_IN_A_ROW = 100
"""Consecutive non-finite meta-gradients after which a run aborts."""


def create_run_folder(folder: Path, config: TrainConfig, overwrite: bool) -> None:
    """Claim a folder for a new run, and write its configuration."""
    if is_first_host():
        claim_run_folder(folder, config.to_json(), overwrite)


def resume_config(folder: Path, steps: int | None) -> TrainConfig:
    """The configuration of the run in a folder; `steps`, if given, replaces its number of meta-steps."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise BadInput(f"nothing to resume: {folder} has no config.json")
    config = TrainConfig.read(config_path)
    if config.engine not in (AUTO, *all_engines()):
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
            with owned(folder):
                write_text(config_path, json.dumps(config.to_json(), indent=2) + "\n")
    return config


class TrainingRun:
    """One run of `config.seeds` seeds, trained in parallel."""

    def __init__(self, config: TrainConfig, folder: Path, metaset: MetaSet | None = None):
        self.config, self.folder = config, folder
        self.anchor: Anchor | None = None
        self.metaset: MetaSet | None = None
        self.class_names: tuple[str, ...] = ()
        if config.data in PROBLEMS:
            tasks = PROBLEMS[config.data](config.shot, config.query)
            training, validation = tasks, tasks  # an endless stream, with separate keys for each
        else:
            metaset = load_data(config.data, config.label, config.ignore) if metaset is None else metaset
            check_data(config, metaset)
            self.metaset = metaset
            if config.structure.anchored:
                self.anchor = choose_anchor(config, metaset)
            training, validation = self.episodes(metaset)
            self.class_names = metaset.subset(config.train_on).class_names
        self.training, self.validation = replicate((training, validation))
        self.seeds = range(config.seed, config.seed + config.seeds)
        self.replicas = replicas_for(config.seeds)
        self.engine = choose_engine(config.structure.blank(), config.engine, replicas_per_device(self.replicas))
        hyper = jax.tree.map(lambda value: jnp.full(config.seeds, value, jnp.float32), config.hyper)
        keys = [split_run_key(jax.random.key(seed)) for seed in self.seeds]
        self.init_keys = jnp.stack([key[0] for key in keys])
        self.hyper, self.step_keys = shard_replicas((hyper, jnp.stack([key[1] for key in keys])), self.replicas)
        patience = jnp.int32(config.patience * config.validate_every)
        self.validation_key, self.patience = replicate((keys[0][2], patience))
        self._saved_at = 0.0
        self.anchor_score: float | None = None
        """Validation accuracy before the first step, when LEO is its anchor."""
        self.steps_per_second = 0.0
        """Speed of the last few meta-steps, over all seeds together, without validation."""

    def episodes(self, metaset: MetaSet) -> tuple[Episodes, Episodes]:
        """Training tasks and validation tasks."""
        config = self.config
        prepare = as_they_are if not config.structure.normalised else normalise
        prepare = prepare if self.anchor is None else self.anchor.preparation
        rows = place_rows(metaset, fits_on_device(metaset.features.size), prepare)
        self.calibration = Episodes.over(metaset.subset("val"), config.way, config.shot, None, rows)
        return training_tasks(config, metaset, rows), validation_tasks(config, metaset, rows)

    def check_classes(self) -> None:
        """Raise `BadInput` if the data file has changed, and with it the training classes of the run."""
        for path in self.folder.glob("model*.safetensors"):
            before = tuple(read_header(path).get("classes", ()))
            if before != self.class_names:
                raise BadInput(
                    f"{self.config.data} has other training classes than when {self.folder} was begun "
                    f"({len(self.class_names)} instead of {len(before)}, or other ones); start a new run"
                )

    def start(self) -> RunState:
        """The state before the first step; in joint training, the tail starts from its backbone."""
        joint = self.config.joint
        return self.begin(None if joint is None else Tail.of(load_backbone(Path(joint))))

    def begin(self, tail: Tail | None) -> RunState:
        def begin_one(key):
            learner = self.config.structure.init(key)
            if isinstance(learner, Joint) and tail is not None:
                learner = Joint(tail, learner.learner)
            if isinstance(learner, LEO) and self.anchor is not None:
                learner = dataclasses.replace(learner, anchor=self.anchor)
            return start_run(learner, make_optimiser(self.config.clip))

        return jax.jit(jax.vmap(begin_one))(self.init_keys)

    def load(self) -> RunState:
        """The last saved state, from which the same engine goes on; or the start if there is none yet."""
        path = self.folder / "state.safetensors"
        if not path.is_file():
            return self.start()
        header, runs = read_header(path), replicas_per_device(self.replicas)
        self.engine = engine_to_go_on(header, self.config.structure.blank(), self.config.engine, runs)
        warn_of_other_rounding(path, header, self.engine.name)
        state = load_tree(path, jax.eval_shape(self.begin, None), OLD_LEAF_NAMES)
        if self.anchor is not None and self.metaset is not None:  # the one it was begun with, to the last bit
            self.anchor = jax.tree.map(lambda leaf: leaf[0], state.learner.anchor)
            self.training, self.validation = replicate(self.episodes(self.metaset))
        return state

    def save(self, state: RunState) -> None:
        save_tree(self.folder / "state.safetensors", state, {"kind": "state", **rounding(self.engine.name)})
        self._saved_at = time.monotonic()

    def save_models(self, state: RunState) -> None:
        """Save the best learner of each seed, once there is one."""
        for index, seed in enumerate(self.seeds):
            if not np.isfinite(state.best_score[index]):
                continue
            score = {name: float(value) for name, value in self.named_score(state.best_score[index]).items()}
            header = {
                "config": self.config.to_json(),
                "engine": self.engine.name,
                "seed": seed,
                "step": int(state.best_step[index]),
                **score,
                "classes": self.class_names,
            }
            learner = jax.tree.map(lambda leaf, i=index: leaf[i], state.best)
            save_model(self.folder / self.model_name(seed), learner, self.config.structure, header)

    def named_score(self, value: Any) -> dict[str, Any]:
        """A validation score as files store it: an accuracy, or without classes a loss."""
        return {"validation_loss": -value} if self.config.data in PROBLEMS else {"validation_accuracy": value}

    def model_name(self, seed: int) -> str:
        return "model.safetensors" if len(self.seeds) == 1 else f"model-{seed}.safetensors"

    def train(self, report: Callable[[list[Record]], None]) -> RunState:
        """Train from the last saved state to the end; `report` receives a record per seed every few steps."""
        with owned(self.folder):
            return self.train_alone(report)

    def train_alone(self, report: Callable[[list[Record]], None]) -> RunState:
        """`train`, in a folder that no other process writes to."""
        config, runs = self.config, self.config.seeds
        state = self.load()
        step, stopped = int(state.step.max()), np.array(state.stopped)
        log = MetricsLog(self.folder / "metrics.jsonl", step)
        if is_first_host():
            self.save_models(state)
        state = shard_replicas(state, self.replicas)
        if (
            step == 0 and self.anchor is not None
        ):  # the anchor is the first candidate, so training can only improve on it
            validate = compile_validate(self.engine, self.replicas, config.validation_tasks)
            state, score = validate(state, self.validation_key, self.validation, self.patience)
            self.anchor_score = float(gather_to_host(score, runs)[0])
        with stop_signals() as asked_to_stop:
            while step < config.steps and not stopped.all():
                every = config.validate_every
                num_steps = min(report_every(), every - step % every, config.steps - step)
                decay_over = config.steps if config.decay else None
                advance = compile_advance(
                    self.engine, self.replicas, num_steps, config.meta_batch, config.clip, decay_over
                )
                begin = time.monotonic()
                state, info = advance(state, self.hyper, self.step_keys, self.training)
                jax.block_until_ready(info)
                self.steps_per_second = runs * num_steps / (time.monotonic() - begin)
                step += num_steps
                validated = step % every == 0 or step == config.steps
                if validated:
                    validate = compile_validate(self.engine, self.replicas, config.validation_tasks)
                    state, score = validate(state, self.validation_key, self.validation, self.patience)
                    info = info | self.named_score(score)
                seen = (info, state.step, state.stopped, state.skipped, state.skipped_in_a_row)
                info, steps, now_stopped, skipped, in_a_row = gather_to_host(seen, runs)
                records = self.records(info, steps, skipped, stopped)
                stopped = now_stopped
                log.write(records)
                stopping = any_host(bool(asked_to_stop))  # a signal after this line waits for the next save
                # several hosts must save together, but their clocks differ
                due = jax.process_count() == 1 and time.monotonic() - self._saved_at > SAVE_SECONDS
                if validated or stopping or due:
                    reached = gather_to_host(state, runs)
                    if is_first_host():
                        self.save(reached)
                        if validated:
                            self.save_models(reached)
                report(records)
                if int(in_a_row.max()) >= MOST_SKIPPED_IN_A_ROW:
                    raise BadInput(
                        f"the last {MOST_SKIPPED_IN_A_ROW} meta-gradients were NaN or Inf (by step {step}); the "
                        "weights are intact, but nothing is learned any more: lower `learning_rate=` or check the data"
                    )
                if stopping:
                    raise Interrupted
        barrier("end of training")
        return gather_to_host(state, runs)

    def calibrate(self, state: RunState) -> None:
        """Learn the temperatures of a finished run's models, on tasks of validation classes."""
        seen = "val" in self.config.train_on  # calibration on training classes would be over-confident
        if self.metaset is None or seen or not is_first_host():
            return
        for seed, score in zip(self.seeds, state.best_score, strict=True):
            if np.isfinite(score):
                calibrate_model(self.folder / self.model_name(seed), self.calibration)

    def records(
        self, info: dict[str, np.ndarray], steps: np.ndarray, skipped: np.ndarray, stopped: np.ndarray
    ) -> list[Record]:
        """A log record for each seed that was still running."""
        rows = []
        for index, seed in enumerate(self.seeds):
            if not stopped[index]:
                values = {name: finite_or_none(value[index]) for name, value in info.items()}
                rows.append({"step": int(steps[index]), "seed": seed, **values, "skipped": int(skipped[index])})
        return rows


def check_data(config: TrainConfig, metaset: MetaSet) -> None:
    """Raise `BadInput` if the tasks of a run cannot be drawn from these classes."""
    if metaset.dim != config.structure.dim:
        raise BadInput(f"{config.data} has {metaset.dim} features, the run was made for {config.structure.dim}")
    train, validation = metaset.subset(config.train_on), metaset.subset("val")
    if train.counts.size == 0:
        raise BadInput(f"{config.data} has no {config.train_on} classes: `split` marks them")
    (way, _), (shot, _) = config.spans
    check_classes(train, way, shot, 1 if config.mixed else config.query)
    check_classes(validation, way, shot, 1 if config.mixed else None)


def training_tasks(config: TrainConfig, metaset: MetaSet, rows: Rows) -> Episodes:
    train = metaset.subset(config.train_on)
    if config.mixed:
        return MixedEpisodes.between(train, *config.spans, config.query, rows)
    return Episodes.over(train, config.way, config.shot, config.query, rows)


def train_with_progress(run: TrainingRun, name: str, progress: Progress, how_to_resume: str) -> RunState:
    """Train to the end, and show speed, training accuracy (or loss) and the best validation scores in `progress`.

    If interrupted, say how to resume.
    """
    best: dict[int, dict[str, float]] = {}
    with progress.bar(name, run.config.steps, "compiling …") as bar:

        def report(records: list[Record]) -> None:
            for record in records:
                own = {name: record[name] for name in VALIDATION_SCORES if record.get(name) is not None}
                if own:
                    best[record["seed"]] = better_score(best.get(record["seed"], own), own)
            bar(records[0]["step"], note=describe_progress(records, run.steps_per_second, list(best.values())))

        try:
            state = run.train(report)
        except Interrupted:
            progress.say(f"stopped and saved; {how_to_resume}")
            raise
        reached = int(state.step.max())
        bar(reached, total=reached)
    return state


VALIDATION_SCORES = ("validation_accuracy", "validation_loss")


def describe_progress(records: list[Record], steps_per_second: float, best: list[dict[str, float]]) -> str:
    """The state of training in one line, for the progress bar."""
    training = {name: records[0][name] for name in ("query_accuracy", "query_loss") if records[0].get(name) is not None}
    name = next(iter(training), None)
    note = f"{steps_per_second:,.0f} steps/s"
    if name is not None:
        note += f" · train {name.removeprefix('query_')} {format_score({name: training[name]}, 1)}"
    if best:
        note += " · val " + ", ".join(format_score(score, 1) for score in best)
    if any(record["skipped"] for record in records):
        note += f" · {max(record['skipped'] for record in records)} steps skipped (NaN)"
    return note


def format_score(score: dict[str, float], digits: int = 2) -> str:
    """An accuracy in per cent, or a loss unchanged."""
    ((name, value),) = score.items()
    return f"{100 * value:.{digits}f} %" if name.endswith("accuracy") else f"{value:.{digits + 1}f}"


def better_score(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    choose = max if "validation_accuracy" in one else min
    return choose(one, other, key=lambda score: next(iter(score.values())))
