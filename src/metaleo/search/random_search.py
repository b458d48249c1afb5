"""Random search (stage 2 of the paper): many draws of hyper-parameters, trained in parallel with successive halving.

OUT/study.db                  the Optuna study, unless another database holds it
OUT/population.safetensors    the trials in training, while there are any
OUT/trials.json               every trial: its draw, its meta-steps, its validation accuracy; best first
OUT/best.json                 a preset with the best draw: metaleo train --preset OUT/best.json
OUT/search.png                accuracy over each hyper-parameter, and the importance of each
"""

import dataclasses
import functools
import json
import reprlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree
from optuna.trial import FrozenTrial, TrialState

from metaleo._io.files import damaged, load_tree, read_header, save_tree, write_text
from metaleo._io.json_values import from_json
from metaleo._io.run_log import stop_signals
from metaleo._jax.devices import (
    any_host,
    barrier,
    broadcast,
    fits_on_device,
    is_first_host,
    replicate,
    rounding,
    warn_of_other_rounding,
)
from metaleo.config.schema import Clip, TrainConfig
from metaleo.data.metaset import MetaSet
from metaleo.engines import Engine, choose_engine
from metaleo.errors import BadInput, Interrupted, require_at_least, require_between, unknown_name
from metaleo.learners import HyperParams
from metaleo.learners.registry import ABLATIONS, Structure
from metaleo.search.study import Claim, Sampler, Space, Study
from metaleo.tasks.episodes import Episodes, place_rows
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

PAPER_SPACE: Space = {
    "learning_rate": (1e-4, 3e-3),
    "kl": (1e-6, 2.0),
    "encoder_penalty": (1e-9, 1e-1),
    "l2": (1e-10, 1e-3),
    "orthogonality": (1e-3, 1e4),
    "keep_prob": (0.1, 1.0),
}
"""Log-uniform ranges that contain every value of the paper's Table 6 and of the README of the authors' code."""
SAVE_SECONDS = 30.0
"""Minimum time between two saves within a rung; the end of each rung is always saved."""


def space_of(learner: str) -> Space:
    """The search space: the paper's six hyper-parameters for LEO and its ablations; for other learners, their own."""
    if learner in ABLATIONS:
        return PAPER_SPACE
    if learner in ("maml", "fomaml", "reptile", "meta-sgd"):
        start = {"finetune_step_size": (0.1, 30.0)} if learner == "meta-sgd" else {}
        return {"learning_rate": (1e-4, 1e-2), "l2": PAPER_SPACE["l2"], "keep_prob": PAPER_SPACE["keep_prob"]} | start
    return {"learning_rate": (1e-5, 1e-2), "l2": (1e-6, 1e-1), "keep_prob": PAPER_SPACE["keep_prob"]}


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Everything that determines the result of a search; `train` holds what its trials have in common."""

    train: TrainConfig
    trials: int = 64
    halvings: int = 3
    """How often the worse half of the trials is stopped: with 3, at 1/8, 1/4 and 1/2 of the steps."""
    sampler: Sampler = "random"
    batch: int = 64
    """Trials that a worker claims at a time; halving compares the trials of one batch."""

    def check(self) -> None:
        """Raise `BadInput` for invalid values."""
        if self.sampler not in get_args(Sampler):
            raise unknown_name("sampler", self.sampler, get_args(Sampler))
        require_at_least(1, trials=self.trials, batch=self.batch)
        require_between(0, 10, halvings=self.halvings)
        if self.train.structure.anchored:
            raise BadInput("a search cannot vary leo-anchored, whose anchors belong to the data; `metaleo train` can")

    def settings(self) -> dict[str, Any]:
        """Settings on which all workers of a study must agree; the folder of the data may differ."""
        searched = space_of(self.train.structure.learner)
        common: dict[str, Any] = self.train.to_json() | {"data": Path(self.train.data).name}
        for part in ("structure", "hyper"):
            common[part] = {name: value for name, value in common[part].items() if name not in searched}
        return common | {name: getattr(self, name) for name in ("trials", "halvings", "sampler")}

    def with_draw(self, draw: dict[str, float]) -> TrainConfig:
        """The configuration of a run with these hyper-parameters."""
        structure, hyper = split_draw(self.train.structure, self.train.hyper, draw)
        return dataclasses.replace(self.train, structure=structure, hyper=hyper)


def split_draw(structure: Structure, hyper: HyperParams, draw: dict[str, Any]) -> tuple[Structure, HyperParams]:
    """Apply a draw, whose names are hyper-parameters or initial step sizes, to structure and hyper-parameters."""
    own = {name: value for name, value in draw.items() if hasattr(hyper, name)}
    rest = {name: value for name, value in draw.items() if name not in own}
    return dataclasses.replace(structure, **rest), dataclasses.replace(hyper, **own)


def rungs(steps: int, halvings: int, every: int) -> list[int]:
    """The meta-steps at which trials are compared, the last being `steps`; multiples of `every` where possible."""
    ends = [min(steps, max(1, round(steps / 2**k / every)) * every) for k in range(halvings, 0, -1)]
    return sorted({*ends, steps})


@dataclasses.dataclass
class TrialBatch:
    """Trials that are trained together; `states` has an entry for each surviving trial."""

    claims: list[Claim]
    alive: list[int]
    rung: int
    states: RunState

    def save(self, path: Path, engine: Engine) -> None:
        header = {
            "kind": "population",
            **rounding(engine.name),
            "claims": [vars(claim) for claim in self.claims],
            "alive": self.alive,
            "rung": self.rung,
        }
        save_tree(path, self.states, header)


@functools.cache
def beginner(structure: Structure, hyper: HyperParams, clip: Clip) -> Callable[..., Any]:
    """A compiled function that starts many runs, each with its own draw and key."""

    def begin(draw: dict[str, Any], key: PRNGKeyArray) -> RunState:
        own, _ = split_draw(structure, hyper, draw)
        return start_run(own.init(key), make_optimiser(clip))

    return jax.jit(jax.vmap(begin))


@dataclasses.dataclass
class SearchProgress:
    """Progress of a search."""

    done: int
    total: int
    """`done` and `total` count the meta-steps of all trials of this worker's batch."""
    rung: int
    rungs: int
    alive: int
    best: float


class Search:
    """One worker of a search."""

    def __init__(self, config: SearchConfig, folder: Path, metaset: MetaSet, replicas: int | None = None):
        self.config, self.folder = config, folder
        train = config.train
        rows = place_rows(metaset, fits_on_device(metaset.features.size))
        training = Episodes.over(metaset.subset(train.train_on), train.way, train.shot, train.query, rows)
        validation = Episodes.over(metaset.subset("val"), train.way, train.shot, None, rows)
        self.training, self.validation = replicate((training, validation))
        self.space = space_of(train.structure.learner)
        self.ends = rungs(train.steps, config.halvings, train.validate_every)
        widest = (4 if jax.default_backend() == "cpu" else 16) * jax.device_count() if replicas is None else replicas
        self.replicas = replicas_for(min(widest, config.batch))
        self.engine = choose_engine(train.structure.blank(), train.engine, replicas_per_device(self.replicas))
        self.path = folder / "population.safetensors"
        self._saved_at = time.monotonic()

    def run(
        self,
        study: Study | None,
        report: Callable[[SearchProgress], None] = lambda progress: None,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Train until every trial of the study has ended. Only the first host has a study; it informs the others."""
        with stop_signals() as asked_to_stop:
            while True:
                batch = self.load()
                if batch is not None and study is not None and not study.holds(batch.claims):
                    raise BadInput(
                        f"{self.path} has trials in training that study {study.study.study_name} does not have: "
                        "remove that file, or go on with its own study"
                    )
                batch = batch or self.next_batch(study)
                if batch is not None:
                    self.train(batch, study, report, asked_to_stop)
                elif bool(broadcast(np.array(study is None or study.finished()))):
                    return
                else:  # other workers hold the rest: they finish it, or are lost and it becomes free again
                    waiting()
                    time.sleep(min(1.0, study.lost_after / 4) if study else 0)
                    if any_host(bool(asked_to_stop)):
                        raise Interrupted

    def load(self) -> TrialBatch | None:
        """The batch that this worker was training when it was stopped, if any."""
        if not self.path.is_file():
            return None
        header, train = read_header(self.path), self.config.train
        with damaged(self.path, "file"):
            claims, alive, rung = self.read_batch(header)
        runs = replicas_per_device(self.replicas)
        self.engine = engine_to_go_on(header, train.structure.blank(), train.engine, runs)
        warn_of_other_rounding(self.path, header, self.engine.name)
        like = jax.eval_shape(lambda: self.start([claims[index] for index in alive]))
        return TrialBatch(claims, alive, rung, jax.tree.map(np.asarray, load_tree(self.path, like)))

    def read_batch(self, header: dict[str, Any]) -> tuple[list[Claim], list[int], int]:
        """The claims of a saved batch, the places of those in training, and the rung; raises `BadInput`."""
        for name in ("claims", "alive", "rung"):
            if name not in header:
                raise BadInput(f"{name} is missing")
        claims = [from_json(Claim, claim, f"claims.{place}") for place, claim in enumerate(header["claims"])]
        alive, rung = header["alive"], header["rung"]
        for claim in claims:
            if claim.slot >= self.config.trials:
                raise BadInput(f"slot={claim.slot} is not one of {self.config.trials:,} trials")
            if claim.draw.keys() != self.space.keys():
                raise BadInput(f"it has draws of {', '.join(sorted(claim.draw)) or 'nothing'}")
            require_between(0, float(np.finfo(np.float32).max), **claim.draw)
        if not alive or sorted(set(alive)) != alive or alive[-1] >= len(claims):
            raise BadInput(f"alive={reprlib.repr(alive)} are not places among {len(claims):,} claims")
        if rung >= len(self.ends):
            raise BadInput(f"rung={rung} is not one of {len(self.ends)}")
        return claims, alive, rung

    def next_batch(self, study: Study | None) -> TrialBatch | None:
        """Claim new trials from the first host's study, for all hosts."""
        names = list(self.space)
        table = np.full((self.config.batch, 2 + len(names)), -1, np.float32)
        if study is not None:
            for row, claim in zip(table, study.claim(self.config.batch), strict=False):
                row[:] = claim.number, claim.slot, *(claim.draw[name] for name in names)
        claims = [
            Claim(int(row[0]), int(row[1]), dict(zip(names, row[2:].tolist(), strict=True)))
            for row in np.asarray(broadcast(table))
            if row[0] >= 0
        ]
        return TrialBatch(claims, list(range(len(claims))), 0, self.start(claims)) if claims else None

    def start(self, claims: list[Claim]) -> RunState:
        train = self.config.train
        draws = {name: jnp.array([claim.draw[name] for claim in claims], jnp.float32) for name in self.space}
        keys = jnp.stack([self.keys(claim)[0] for claim in claims])
        return beginner(train.structure, train.hyper, train.clip)(draws, keys)

    def keys(self, claim: Claim) -> tuple[PRNGKeyArray, PRNGKeyArray, PRNGKeyArray]:
        return split_run_key(jax.random.fold_in(jax.random.key(self.config.train.seed), claim.slot))

    def train(
        self, batch: TrialBatch, study: Study | None, report: Callable[[SearchProgress], None], asked_to_stop: list[int]
    ) -> None:
        """For each rung, train all surviving trials, compare them, and continue with the better half."""
        batch.states = jax.tree.map(np.array, batch.states)  # on the host, where any number of trials fits
        while True:
            end = self.ends[batch.rung]
            for first in range(0, len(batch.alive), self.replicas):
                self.train_to_rung(
                    batch, range(first, min(first + self.replicas, len(batch.alive))), end, report, asked_to_stop
                )
            accuracy = batch.states.best_score.tolist()
            order = sorted(range(len(accuracy)), key=lambda i: (-accuracy[i], batch.claims[batch.alive[i]].slot))
            last = batch.rung == len(self.ends) - 1
            kept = len(order) if last else -(-len(order) // 2)
            self.save(batch)
            if study is not None:
                study.report({batch.claims[j].number: accuracy[i] for i, j in enumerate(batch.alive)}, end)
                for i in order[:kept] if last else order[kept:]:
                    state = TrialState.COMPLETE if last else TrialState.PRUNED
                    study.tell(batch.claims[batch.alive[i]].number, state, accuracy[i] if last else None)
            if last:
                break
            survivors = sorted(order[:kept])
            batch.alive = [batch.alive[i] for i in survivors]
            batch.states = jax.tree.map(lambda leaf, keep=survivors: leaf[keep], batch.states)
            batch.rung += 1
        if is_first_host():
            self.path.unlink(missing_ok=True)
        barrier("batch done")

    def train_to_rung(
        self,
        batch: TrialBatch,
        block: range,
        end: int,
        report: Callable[[SearchProgress], None],
        asked_to_stop: list[int],
    ) -> None:
        """Train a block of trials, at most one per replica, to the end of the rung."""
        train, every = self.config.train, self.config.train.validate_every
        part = slice(block.start, block.stop)
        step = int(batch.states.step[block.start])
        if step >= end:
            return
        claims = [batch.claims[batch.alive[i]] for i in block]
        draws = {name: jnp.array([claim.draw[name] for claim in claims], jnp.float32) for name in self.space}
        _, hyper = split_draw(train.structure, train.hyper, draws)
        hyper = jax.tree.map(lambda value: jnp.broadcast_to(jnp.float32(value), len(claims)), hyper)
        keys = [self.keys(claim) for claim in claims]
        states = jax.tree.map(lambda leaf: leaf[part], batch.states)
        states, hyper, step_keys = shard_replicas((states, hyper, jnp.stack([key[1] for key in keys])), self.replicas)
        validation_key, patience = replicate((keys[0][2], jnp.int32(2**31 - 1)))
        validate = compile_validate(self.engine, self.replicas, train.validation_tasks)
        while step < end:
            num_steps = min(report_every(), every - step % every, end - step)
            advance = compile_advance(self.engine, self.replicas, num_steps, train.meta_batch, train.clip)
            states, _ = advance(states, hyper, step_keys, self.training)
            step += num_steps
            if step % every == 0 or step == end:
                states, _ = validate(states, validation_key, self.validation, patience)
            jax.block_until_ready(states)
            stopping = any_host(bool(asked_to_stop))
            due = jax.process_count() == 1 and time.monotonic() - self._saved_at > SAVE_SECONDS
            if stopping or due or step == end:
                put_back(batch.states, part, gather_to_host(states, len(claims)))
            if stopping or due:
                self.save(batch)
            report(self.progress(batch, block, step))
            if stopping:
                raise Interrupted

    def save(self, batch: TrialBatch) -> None:
        if is_first_host():
            batch.save(self.path, self.engine)
        self._saved_at = time.monotonic()

    def progress(self, batch: TrialBatch, block: range, step: int) -> SearchProgress:
        total = done = 0
        before, left = 0, len(batch.claims)
        for rung, end in enumerate(self.ends):
            total += left * (end - before)
            if rung < batch.rung:
                done += left * (end - before)
            elif rung == batch.rung:
                reached = [step if i in block else int(at) for i, at in enumerate(batch.states.step)]
                done += sum(reached) - left * before
            before, left = end, -(-left // 2)
        best = float(batch.states.best_score.max())
        return SearchProgress(done, total, batch.rung, len(self.ends), len(batch.alive), best)


def put_back(whole: PyTree, part: slice, values: PyTree) -> None:
    """Write the values of some runs into a population on the host, in place."""
    for leaf, value in zip(jax.tree.leaves(whole), jax.tree.leaves(values), strict=True):
        leaf[part] = value


def trial_records(study: Study) -> list[dict[str, Any]]:
    """One record per trial, sorted by the number of meta-steps, then by accuracy, both descending."""

    def row(trial: FrozenTrial) -> dict[str, Any]:
        return {
            "trial": trial.user_attrs["slot"],
            "accuracy": round(max(trial.intermediate_values.values(), default=float("nan")), 6),
            "steps": max(trial.intermediate_values, default=0),
            "accuracy_at": {str(step): round(value, 6) for step, value in sorted(trial.intermediate_values.items())},
            "draw": {name: float(f"{value:.6g}") for name, value in trial.params.items()},
        }

    rows = [row(trial) for trial in study.trials() if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    return sorted(rows, key=lambda row: (-row["steps"], -row["accuracy"], row["trial"]))


def write_results(config: SearchConfig, folder: Path, rows: list[dict[str, Any]]) -> TrainConfig:
    """Write the table of trials and the configuration with the best draw; return the latter."""
    write_text(folder / "trials.json", json.dumps(rows, indent=1) + "\n")
    best = config.with_draw(rows[0]["draw"])
    write_text(folder / "best.json", json.dumps(best.to_json(), indent=2) + "\n")
    return best


def importances(config: SearchConfig, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Share of each hyper-parameter in the variance of accuracy (fANOVA) at the first rung, which all trials reach."""
    import optuna
    from optuna.distributions import FloatDistribution

    space = space_of(config.train.structure.learner)
    distributions: dict[str, Any] = {name: FloatDistribution(*ends, log=True) for name, ends in space.items()}
    study = optuna.create_study(direction="maximize")
    for row in rows:
        draw = {name: float(np.clip(row["draw"][name], *ends)) for name, ends in space.items()}
        first = next(iter(row["accuracy_at"].values()))
        study.add_trial(optuna.trial.create_trial(params=draw, distributions=distributions, value=first))
    if len({trial.value for trial in study.get_trials(deepcopy=False)}) < 4:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)
