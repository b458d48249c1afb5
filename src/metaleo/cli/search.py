"""`metaleo search`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import RenderableType

from metaleo.cli.common import Columns, Out, Switch, default_is, emit, make_table, progress, tell
from metaleo.errors import needs_extra


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
    """As in `metaleo train`."""
    label: Annotated[str | None, default_is("label")] = None
    """Of a table, the column of the labels."""
    ignore: Columns = ()
    """Of a table, columns of numbers that are no part of the vector."""
    learner: str = "leo"
    """Learner to search for (`metaleo list learners`)."""
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
    sampler: Literal["random", "tpe"] = "random"
    """random: the paper's search; tpe: later batches are drawn near what did well in earlier ones."""
    batch: Annotated[int | None, default_is("all for random, 16 for tpe")] = None
    """Trials taken at once and halved among themselves."""
    replicas: Annotated[int | None, default_is("16 for each GPU, 4 for each CPU")] = None
    """Trials trained at the same time, over all devices."""
    validate_every: int = 500
    """Meta-steps between validations."""
    validation_tasks: int = 1000
    """Tasks per validation."""
    seed: int = 0
    """Seed of all randomness."""
    storage: Annotated[str | None, default_is("a SQLite file in --out")] = None
    """URL of a database for the study."""
    study: Annotated[str | None, default_is("LEARNER-WAYway-SHOTshot")] = None
    """Name of the study in the database."""
    lost_after: float = 60.0
    """Seconds of silence after which another worker counts as dead."""
    out: Out = Path("search")
    """Folder for the study and its results."""
    overwrite: Switch = False
    """Replace the search in --out."""
    json: Switch = False
    """Print the trials as JSON, best first."""

    def run(self) -> None:
        from metaleo.config.presets import resolve_config
        from metaleo.data.feature_files import load_data

        with needs_extra("search"):
            from metaleo.search.random_search import SearchConfig
            from metaleo.search.run_search import run_search

        at_once = self.trials if self.sampler == "random" else min(16, self.trials)
        batch = at_once if self.batch is None else self.batch
        metaset = load_data(self.data, self.label, self.ignore)
        train = resolve_config(
            metaset.dim,
            data=self.data,
            label=self.label,
            ignore=self.ignore,
            learner=self.learner,
            way=self.way,
            shot=self.shot,
            steps=self.steps,
            seed=self.seed,
            validate_every=self.validate_every,
            validation_tasks=self.validation_tasks,
        )
        config = SearchConfig(train, self.trials, self.halvings, self.sampler, batch)
        config.check()
        tell(f"{config.train.data}: {metaset.describe()}")
        tell(f"{config.train.title}: {self.trials} trials of {self.steps:,} meta-steps → {self.out}")
        trials, _ = run_search(
            config,
            self.out,
            metaset,
            progress,
            storage=self.storage,
            name=self.study,
            lost_after=self.lost_after,
            replicas=self.replicas,
            overwrite=self.overwrite,
        )
        emit(trials, self.json, *trial_table(trials))
        tell(f"train with the best:\n  metaleo train --preset {self.out}/best.json")


def trial_table(trials: list[dict[str, Any]], most: int = 10) -> tuple[RenderableType, ...]:
    headings = ("trial", "accuracy", "steps", *(name.replace("_", "\n") for name in trials[0]["draw"]))
    rows = [
        (str(trial["trial"]), f"{100 * trial['accuracy']:.2f} %", f"{trial['steps']:,}",
         *(f"{value:.2g}" for value in trial["draw"].values()))
        for trial in trials[:most]
    ]  # fmt: skip
    return f"the best of {len(trials)} trials, by validation accuracy:", make_table(headings, rows)
