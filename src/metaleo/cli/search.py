"""`metaleo search`."""

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.table import Table

from metaleo.cli.common import Int, Text, progress_bar, say
from metaleo.cli.train import Train
from metaleo.config import TrainConfig
from metaleo.errors import BadInput
from metaleo.population import is_first_host, meet


@dataclasses.dataclass(frozen=True)
class Search:
    """Find hyper-parameters: many draws, trained side by side, the worse half stopped three times on the way.

    LEO and its ablations are searched over the paper's six hyper-parameters, other learners over those they have,
    by validation accuracy. The trials are an Optuna study. The same command again goes on where it was stopped or
    killed, and ends in the same table. With --storage several machines work on one study, each with its own --out;
    the trials of one that dies are taken over by the others.

    Try:
      metaleo search --shot 1 --trials 16 --steps 1000
      metaleo search --data features.npz --learner leo-deterministic --shot 5 --out searches/deterministic
      metaleo search --storage postgresql://me@host/studies --study leo-1shot --batch 32
      metaleo train --preset search/best.json
    """

    data: str = "sample"
    """Feature file (.npz, .safetensors), folder of the authors' pickles, or `sample`, the one in this package."""
    learner: str = "leo"
    """Learner to search for; a wrong name lists them."""
    way: int = 5
    """Classes per task."""
    shot: int = 1
    """Labelled examples per class."""
    trials: int = 64
    """Draws of the hyper-parameters."""
    steps: int = 20_000
    """Meta-steps of the trials that get to the end."""
    halvings: int = 3
    """How often the worse half is stopped: at 1/8, 1/4 and 1/2 of the steps for three; 0 trains all to the end."""
    sampler: Annotated[str, tyro.conf.arg(metavar="{random,tpe}")] = "random"
    """random: the paper's search; tpe: later batches are drawn near what did well in earlier ones."""
    batch: Int = None
    """Trials taken at once and halved among themselves (all for random, 16 for tpe)."""
    lanes: Int = None
    """Trials trained at the same time, over all devices (16 for each GPU, 4 for each CPU)."""
    validate_every: int = 500
    """Meta-steps between validations."""
    validation_tasks: int = 1000
    """Tasks per validation."""
    seed: int = 0
    """Of everything random."""
    storage: Text = None
    """URL of a database for the study (a SQLite file in --out)."""
    study: Text = None
    """Name of the study in the database (<learner>-<way>way-<shot>shot)."""
    lost_after: float = 60.0
    """Seconds of silence after which another worker counts as dead."""
    out: Path = Path("search")
    """Folder for the study and its results."""
    json: bool = False
    """Print the trials as JSON on standard output, best first."""

    def run(self) -> None:
        from metaleo import data
        from metaleo.config import UNTRAINED
        from metaleo.search import SearchConfig

        if self.learner in UNTRAINED:
            raise BadInput(f"{self.learner} has nothing to learn, so nothing to search for")
        if self.sampler not in ("random", "tpe"):
            raise BadInput(f"unknown sampler {self.sampler!r}; known are random, tpe")
        batch = self.batch or (self.trials if self.sampler == "random" else min(16, self.trials))
        for name in ("trials", "steps", "validate_every", "validation_tasks"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if batch < 1 or (self.lanes is not None and self.lanes < 1):
            raise BadInput("--batch and --lanes must be at least 1")
        if not 0 <= self.halvings <= 10:
            raise BadInput(f"--halvings must be between 0 and 10, not {self.halvings}")
        if self.lost_after <= 0:
            raise BadInput(f"--lost-after must be above 0, not {self.lost_after}")
        metaset = data.load(self.data)
        flags = Train(
            data=self.data,
            learner=self.learner,
            way=self.way,
            shot=self.shot,
            steps=self.steps,
            seed=self.seed,
            validate_every=self.validate_every,
            validation_tasks=self.validation_tasks,
        )
        config = SearchConfig(flags.resolve(metaset.dim), self.trials, self.halvings, self.sampler, batch)
        say.print(f"{config.train.data}: {metaset.describe()}", markup=False, soft_wrap=True)
        title = f"{self.learner}, {self.way}-way {self.shot}-shot"
        say.print(f"{title}: {self.trials} trials of {self.steps:,} meta-steps → {self.out}", markup=False)
        rows, _ = search_with_progress(
            config,
            self.out,
            metaset,
            storage=self.storage,
            name=self.study,
            lost_after=self.lost_after,
            lanes=self.lanes,
        )
        print_trials(rows)
        say.print(f"train with the best:\n  metaleo train --preset {self.out}/best.json")
        if self.json:
            print(json.dumps(rows, indent=2))


def search_with_progress(
    config: Any,
    folder: Path,
    metaset: Any,
    *,
    storage: str | None = None,
    name: str | None = None,
    lost_after: float = 60.0,
    lanes: int | None = None,
) -> tuple[list[dict[str, Any]], TrainConfig]:
    """Search, with a live bar: the trials, best first, and the configuration with the best draw."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    from metaleo import search, study
    from metaleo.figures import plot_search
    from metaleo.journal import Interrupted

    train = config.train
    title = f"{train.structure.learner}, {train.way}-way {train.shot}-shot"
    worker = search.Search(config, folder, metaset, lanes)  # bad data says so before the folder is touched
    with contextlib.ExitStack() as stack:
        trials = None
        if is_first_host():
            trials = study.Study(
                storage or f"sqlite:///{make(folder) / 'study.db'}",
                name or f"{train.structure.learner}-{train.way}way-{train.shot}shot",
                worker.space,
                config.settings(),
                slots=config.trials,
                sampler=config.sampler,
                seed=train.seed,
                worker=stack.enter_context(search.locked(folder)),
                lost_after=lost_after,
            )
            stack.enter_context(trials.heartbeat())
        progress = stack.enter_context(progress_bar())
        bar = progress.add_task("search", total=None, note="compiling …")
        clock = [time.monotonic(), 0]

        def report(now: search.Progress) -> None:
            elapsed = time.monotonic() - clock[0]
            speed = (now.done - clock[1]) / elapsed if now.done > clock[1] else 0
            clock[:] = time.monotonic(), now.done
            note = f"{speed:,.0f} steps/s · rung {now.rung + 1}/{now.rungs}, {now.alive} trials"
            if now.best > 0:
                note += f" · best {100 * now.best:.2f} %"
            progress.update(bar, completed=now.done, total=now.total, note=note)

        def waiting() -> None:
            progress.update(bar, note="waiting for other workers")

        try:
            worker.run(trials, report, waiting)
        except Interrupted:
            progress.stop()
            say.print("stopped and saved; run the same command again to go on")
            raise
        except (SQLAlchemyError, StorageInternalError) as error:
            reason = str(error).strip().splitlines()[0]
            raise BadInput(f"lost the database of the study: {reason}; run the same command again to go on") from error
        if trials is not None:
            progress.update(bar, note=progress.tasks[bar].fields["note"].replace("compiling …", "done"))
            rows = search.rows_of(trials)
            search.write_results(config, folder, rows)
            plot_search(folder / "search.png", rows, worker.space, search.importances(config, rows), title)
    meet("search done")
    rows = json.loads((folder / "trials.json").read_text(encoding="utf-8"))
    return rows, TrainConfig.read(folder / "best.json")


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def print_trials(rows: list[dict[str, Any]], shown: int = 10) -> None:
    say.print(f"the best of {len(rows)} trials, by validation accuracy:")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("trial", "accuracy", "steps", *(name.replace("_", "\n") for name in rows[0]["draw"])):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows[:shown]:
        draw = (f"{value:.2g}" for value in row["draw"].values())
        table.add_row(str(row["trial"]), f"{100 * row['accuracy']:.2f} %", f"{row['steps']:,}", *draw)
    say.print(table)
