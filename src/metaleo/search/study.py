"""Optuna studies: the assignment of trials to workers, in a database that several workers may share.

A study has a fixed number of slots, one for each trial of its final result. A worker claims slots, trains their trials
and stores the results. If a worker dies, its trials fail, and other workers, or the same one after a restart, claim
their slots again. The oldest trial of a slot that has not failed counts, so no slot is lost or counted twice.
"""

import contextlib
import dataclasses
import json
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import filelock
import numpy as np
import optuna
import sqlalchemy
from optuna.distributions import FloatDistribution
from optuna.exceptions import StorageInternalError
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import ArgumentError, IntegrityError, ProgrammingError, SQLAlchemyError

from metaleo.errors import BadInput, needs_extra

optuna.logging.set_verbosity(optuna.logging.ERROR)  # otherwise it logs every trial

Space = Mapping[str, tuple[float, float]]
"""Log-uniform ranges (low, high) by name."""
Sampler = Literal["random", "tpe"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A trial that this worker trains. Its slot determines its random key."""

    number: int
    slot: int
    draw: dict[str, float]


class SlotSampler(BaseSampler):
    """Random search: the draw of a slot depends only on the seed and the slot, not on the worker or the time."""

    def __init__(self, seed: int):
        self.seed = seed

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: Any) -> float:
        random = np.random.default_rng([self.seed, max(0, slot_of(trial)), zlib.crc32(param_name.encode())])
        low, high = np.log(param_distribution.low), np.log(param_distribution.high)
        return float(np.clip(np.exp(random.uniform(low, high)), param_distribution.low, param_distribution.high))


def slot_of(trial: FrozenTrial) -> int:
    """Slot of a trial; -1 if Optuna added it because another worker took the last one waiting. Such a trial fails."""
    return trial.user_attrs.get("slot", -1)


class Study:
    """The trials of one search, as seen by one worker."""

    def __init__(
        self,
        url: str,
        name: str,
        space: Space,
        settings: dict[str, Any],
        *,
        slots: int,
        sampler: Sampler,
        seed: int,
        worker: str,
        lost_after: float,
    ):
        self.url, self.slots, self.sampler, self.seed = url, slots, sampler, seed
        self.worker, self.lost_after = worker, lost_after
        self.distributions: dict[str, Any] = {
            name: FloatDistribution(low, high, log=True) for name, (low, high) in space.items()
        }
        self.study, self.storage = open_study(url, name)
        self.agree({"space": {name: list(ends) for name, ends in space.items()}, **settings})

    def agree(self, settings: dict[str, Any]) -> None:
        """Store the settings of a new study; raise `BadInput` if an existing one has others."""
        settings = json.loads(json.dumps(settings))
        known = self.study.user_attrs.get("settings")
        if known is None:
            if self.study.get_trials(deepcopy=False):
                raise BadInput(f"study {self.study.study_name} is not one of Metaleo's; choose another `study=`")
            self.study.set_user_attr("settings", settings)
            known = settings
        if known.get("space") != settings["space"]:
            raise BadInput(
                f"study {self.study.study_name} has another search space ({describe(known.get('space', {}))}; "
                f"now {describe(settings['space'])}): choose another `study=` or `out=`"
            )
        for name, value in settings.items():
            if known.get(name) != value:
                raise BadInput(
                    f"study {self.study.study_name} was started with {name} {known.get(name)}, not {value}: "
                    "choose another `study=` or `out=`"
                )

    def trials(self) -> list[FrozenTrial]:
        """The trial that counts for each slot: the oldest that has not failed."""
        counts: dict[int, FrozenTrial] = {}
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state != TrialState.FAIL and slot_of(trial) >= 0:
                counts.setdefault(slot_of(trial), trial)
        return [counts[slot] for slot in sorted(counts)]

    def finished(self) -> bool:
        trials = self.trials()
        return len(trials) == self.slots and all(trial.state.is_finished() for trial in trials)

    def claim(self, want: int) -> list[Claim]:
        """Claim up to `want` trials: those that this worker had before it was killed, then new ones."""
        claims = [self.as_claim(t) for t in self.trials() if t.state == TrialState.RUNNING and self.is_mine(t)]
        with one_at_a_time(self.url):
            self.end_lost()
            while len(claims) < want and (offered := self.offer(want - len(claims))):
                asked = [self.ask() for _ in range(offered)]
                counting = {trial.number: trial for trial in self.trials()}
                for number in asked:
                    if number in counting:
                        claims.append(self.as_claim(counting[number]))
                    else:  # at the same moment, another worker offered this slot or took the waiting trial
                        self.tell(number, TrialState.FAIL)
        return claims

    def offer(self, want: int) -> int:
        """Ensure that up to `want` trials are waiting; return how many are."""
        trials = self.trials()
        waiting = sum(trial.state == TrialState.WAITING for trial in trials)
        taken = {slot_of(trial) for trial in trials}
        tried = {slot_of(trial): trial.params for trial in self.study.get_trials(deepcopy=False)}
        missing = [slot for slot in range(self.slots) if slot not in taken][: max(0, want - waiting)]
        for slot in missing:  # a slot whose trial was lost keeps its draw
            self.study.enqueue_trial(tried.get(slot, {}), user_attrs={"slot": slot})
        return min(want, waiting + len(missing))

    def ask(self) -> int:
        """Take a waiting trial, sample its draw, mark it as this worker's, and return its number."""
        if self.sampler == "tpe":
            before = sum(trial.state != TrialState.WAITING for trial in self.study.get_trials(deepcopy=False))
            self.study.sampler = TPESampler(seed=(self.seed * 100_003 + before) % 2**32, n_startup_trials=16)
        else:
            self.study.sampler = SlotSampler(self.seed)
        trial = self.study.ask(self.distributions)
        trial.set_user_attr("worker", self.worker)
        return trial.number

    def end_lost(self) -> None:
        """Fail the trials of workers whose heartbeat has stopped, which frees their slots."""
        time_now, beats = now(), self.study.user_attrs
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state != TrialState.RUNNING or self.is_mine(trial):
                continue
            started = trial.datetime_start.timestamp() if trial.datetime_start else time_now
            if time_now - beats.get(f"worker {trial.user_attrs.get('worker')}", started) > self.lost_after:
                self.tell(trial.number, TrialState.FAIL)

    def is_mine(self, trial: FrozenTrial) -> bool:
        return trial.user_attrs.get("worker") == self.worker

    def as_claim(self, trial: FrozenTrial) -> Claim:
        return Claim(trial.number, slot_of(trial), dict(trial.params))

    def holds(self, claims: Sequence[Claim]) -> bool:
        """Whether these are trials of the study; they may have ended, or been given up as lost."""
        slots = {trial.number: slot_of(trial) for trial in self.study.get_trials(deepcopy=False)}
        return all(slots.get(claim.number) == claim.slot for claim in claims)

    def report(self, accuracies: Mapping[int, float], step: int) -> None:
        """Store intermediate results of trials, by number."""
        trials = {trial.number: trial for trial in self.study.get_trials(deepcopy=False)}
        for number, accuracy in accuracies.items():
            if not trials[number].state.is_finished():
                with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                    self.storage.set_trial_intermediate_value(trials[number]._trial_id, step, accuracy)

    def tell(self, number: int, state: TrialState, accuracy: float | None = None) -> None:
        """End a trial; one that has already ended stays unchanged."""
        with contextlib.suppress(ValueError, RuntimeError):  # Optuna: the trial has already finished
            self.study.tell(number, accuracy, state, skip_if_finished=True)

    def beat(self) -> None:
        self.study.set_user_attr(f"worker {self.worker}", now())

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Record regularly, from a thread, that this worker is alive, also while it compiles."""
        over = threading.Event()

        def keep_beating() -> None:
            while not over.wait(self.lost_after / 4):
                with contextlib.suppress(SQLAlchemyError, StorageInternalError):  # the next heartbeat may succeed
                    self.beat()

        self.beat()
        thread = threading.Thread(target=keep_beating, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def now() -> float:
    """Wall-clock time in seconds, comparable between hosts."""
    return time.time()


@contextlib.contextmanager
def one_at_a_time(url: str) -> Iterator[None]:
    """For SQLite, lock a file: Optuna locks a row to give a waiting trial to one worker only, which SQLite cannot."""
    database = sqlalchemy.make_url(url)
    if database.get_backend_name() != "sqlite" or not database.database:
        yield
        return
    path = f"{database.database}.lock"
    try:
        lock = filelock.FileLock(path).acquire()
    except OSError as error:
        why = error.strerror or error
        raise BadInput(f"cannot write {path}: {why}; run the same command again to go on") from error
    with lock:
        yield


def open_study(url: str, name: str) -> tuple[optuna.Study, RDBStorage]:
    """Open the study of this name in a database, or create it."""
    shown = url
    try:
        shown = sqlalchemy.make_url(url).render_as_string(hide_password=True)
        timeout = {"connect_timeout": 10} if url.startswith(("postgresql", "mysql")) else {}
        with needs_extra("postgres"):
            storage = open_storage(url, {"connect_args": timeout})
        study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        return study, storage
    except ArgumentError as error:
        raise BadInput(f"storage={url} is not a database URL such as postgresql://user@host/name") from error
    except ImportError as error:
        raise BadInput(f"storage={shown} needs a driver: {error.__cause__ or error}") from error
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise BadInput(f"cannot reach the database {shown}: {reason}") from error


def open_storage(url: str, engine: dict[str, Any]) -> RDBStorage:
    """Open or create Optuna's tables in a database; retry, as another worker may be creating them at the same time."""
    for _ in range(10):
        with contextlib.suppress(IntegrityError, ProgrammingError, StorageInternalError):
            return RDBStorage(url, engine_kwargs=engine)
        time.sleep(0.5)
    return RDBStorage(url, engine_kwargs=engine)


def describe(space: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {ends[0]:g}-{ends[1]:g}" for name, ends in space.items())
