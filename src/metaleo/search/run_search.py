"""Run a search from its start, or from where it was stopped, to its results."""

import contextlib
import json
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from metaleo._io.files import write_text
from metaleo._io.progress import Progress
from metaleo._io.run_log import owned, remove_results, require_ours
from metaleo._jax.devices import barrier, is_first_host
from metaleo.config.schema import TrainConfig
from metaleo.data.metaset import MetaSet
from metaleo.errors import BadInput, Interrupted, require_at_least, require_between
from metaleo.plotting.figures import plot_search
from metaleo.search.random_search import (
    Search,
    SearchConfig,
    SearchProgress,
    importances,
    trial_records,
    write_results,
)
from metaleo.search.study import Study


def run_search(
    config: SearchConfig,
    folder: Path,
    metaset: MetaSet,
    progress: Progress,
    *,
    storage: str | None = None,
    name: str | None = None,
    lost_after: float = 60.0,
    replicas: int | None = None,
    overwrite: bool = False,
) -> tuple[list[dict[str, Any]], TrainConfig]:
    """Search until all trials have ended; return the trials, best first, and the configuration with the best draw.

    Several workers may share a study: `storage` is the URL of its database, `name` its name there. `replicas` trials
    train at a time. `overwrite` replaces the search in the folder; a study in a database stays.
    """
    config.check()
    require_at_least(1, replicas=1 if replicas is None else replicas)
    require_between(1e-3, 1e6, lost_after=lost_after)
    if overwrite and storage is not None:
        raise BadInput(
            "overwrite=True replaces a search in a folder; for a new study in a database, give it a new name"
        )
    train = config.train
    title = f"{train.structure.learner}, {train.way}-way {train.shot}-shot"
    worker = Search(config, folder, metaset, replicas)  # bad data raises before the folder is touched
    with contextlib.ExitStack() as stack:
        stack.enter_context(lost_database())
        study = None
        if is_first_host():
            if overwrite:
                require_ours(folder, "worker")
            stack.enter_context(owned(folder))
            if overwrite:
                remove_results(folder, "worker")
            study = Study(
                storage or f"sqlite:///{folder / 'study.db'}",
                name or f"{train.structure.learner}-{train.way}way-{train.shot}shot",
                worker.space,
                config.settings(),
                slots=config.trials,
                sampler=config.sampler,
                seed=train.seed,
                worker=worker_name(folder),
                lost_after=lost_after,
            )
            stack.enter_context(study.heartbeat())
        bar = stack.enter_context(progress.bar("search", None, "compiling …"))
        clock = [time.monotonic(), 0]

        def report(now: SearchProgress) -> None:
            elapsed = time.monotonic() - clock[0]
            speed = (now.done - clock[1]) / elapsed if now.done > clock[1] else 0
            clock[:] = time.monotonic(), now.done
            note = f"{speed:,.0f} steps/s · rung {now.rung + 1}/{now.rungs}, {now.alive} trials"
            if now.best > 0:
                note += f" · best {100 * now.best:.2f} %"
            bar(now.done, total=now.total, note=note)

        try:
            worker.run(study, report, lambda: bar(note="waiting for other workers"))
        except Interrupted:
            progress.say("stopped and saved; run the same command again to go on")
            raise
        if study is not None:
            trials = trial_records(study)
            write_results(config, folder, trials)
            plot_search(folder / "search.png", trials, worker.space, importances(config, trials), title)
    barrier("search done")
    trials = json.loads((folder / "trials.json").read_text(encoding="utf-8"))
    return trials, TrainConfig.read(folder / "best.json")


@contextlib.contextmanager
def lost_database() -> Iterator[None]:
    """One line for a database that fails, such as one out of reach or on a full disk."""
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        reason = str(cause).strip().splitlines()[0]
        raise BadInput(f"lost the database of the study: {reason}; run the same command again to go on") from error


def worker_name(folder: Path) -> str:
    """The name of the worker in this folder, which survives a kill; a file that holds no name is replaced."""
    path = folder / "worker"
    if not path.is_file() or not re.fullmatch(rb"[0-9a-f]{12}\s*", path.read_bytes()):
        write_text(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8").strip()
