"""`metaleo search`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.table import Table

from metaleo.cli.common import Int, Text, console, progress
from metaleo.errors import BadInput, needs_extra, unknown_name


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
    replicas: Int = None
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
        from metaleo.config.presets import resolve_config
        from metaleo.data.feature_files import load_data
        from metaleo.learners.registry import UNTRAINED

        with needs_extra("search"):
            from metaleo.search.random_search import SearchConfig
            from metaleo.search.run_search import run_search

        if self.learner in UNTRAINED:
            raise BadInput(f"{self.learner} has nothing to learn, so nothing to search for")
        if self.sampler not in ("random", "tpe"):
            raise unknown_name("sampler", self.sampler, ("random", "tpe"))
        batch = self.batch or (self.trials if self.sampler == "random" else min(16, self.trials))
        for name in ("trials", "steps", "validate_every", "validation_tasks"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if batch < 1 or (self.replicas is not None and self.replicas < 1):
            raise BadInput("--batch and --replicas must be at least 1")
        if not 0 <= self.halvings <= 10:
            raise BadInput(f"--halvings must be between 0 and 10, not {self.halvings}")
        if self.lost_after <= 0:
            raise BadInput(f"--lost-after must be above 0, not {self.lost_after}")
        metaset = load_data(self.data)
        train = resolve_config(
            metaset.dim,
            data=self.data,
            learner=self.learner,
            way=self.way,
            shot=self.shot,
            steps=self.steps,
            seed=self.seed,
            validate_every=self.validate_every,
            validation_tasks=self.validation_tasks,
        )
        config = SearchConfig(train, self.trials, self.halvings, self.sampler, batch)
        console.print(f"{config.train.data}: {metaset.describe()}", markup=False, soft_wrap=True)
        title = f"{self.learner}, {self.way}-way {self.shot}-shot"
        console.print(f"{title}: {self.trials} trials of {self.steps:,} meta-steps → {self.out}", markup=False)
        trials, _ = run_search(
            config,
            self.out,
            metaset,
            progress,
            storage=self.storage,
            name=self.study,
            lost_after=self.lost_after,
            replicas=self.replicas,
        )
        print_trials(trials)
        console.print(f"train with the best:\n  metaleo train --preset {self.out}/best.json")
        if self.json:
            print(json.dumps(trials, indent=2))


def print_trials(rows: list[dict[str, Any]], shown: int = 10) -> None:
    console.print(f"the best of {len(rows)} trials, by validation accuracy:")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("trial", "accuracy", "steps", *(name.replace("_", "\n") for name in rows[0]["draw"])):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows[:shown]:
        draw = (f"{value:.2g}" for value in row["draw"].values())
        table.add_row(str(row["trial"]), f"{100 * row['accuracy']:.2f} %", f"{row['steps']:,}", *draw)
    console.print(table)
