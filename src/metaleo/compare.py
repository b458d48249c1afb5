"""`metaleo compare`: many learners, the same data, the same test tasks; it goes on where it was stopped.

OUT/compare.json                      the settings
OUT/<shot>shot/<learner>/             a run folder, and with it:
OUT/<shot>shot/<learner>/test.npz     each test task's accuracy, NLL and calibration counts
OUT/<shot>shot/<learner>/times.json   seconds of training and testing
OUT/results.json, compare.md, compare.png
"""

import contextlib
import dataclasses
import json
import math
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich import box
from rich.table import Table

import metaleo
from metaleo import data, runs
from metaleo.checkpoint import load_model, save_model
from metaleo.cli.common import say, score_with_progress, train_with_progress
from metaleo.cli.train import Train
from metaleo.config import LEARNERS, UNTRAINED, Structure, TrainConfig
from metaleo.data.metaset import SLAB, MetaSet
from metaleo.data.rows import normalise, place
from metaleo.errors import BadInput
from metaleo.evaluation import Report, Score, load_score, save_score, summarise
from metaleo.figures import plot_comparison, plot_curves
from metaleo.files import read_json, write_text
from metaleo.journal import Interrupted, read_metrics
from metaleo.tasks import Episodes
from metaleo.tasks.episodes import check
from metaleo.trees import read_header

GO_ON = "run the same command again to go on"
VALIDATIONS = 4
"""At least this many in a run, however short."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compared, and on what."""

    data: str
    shots: tuple[int, ...]
    learners: tuple[str, ...]
    way: int
    steps: int
    tasks: int
    seed: int

    @property
    def reference(self) -> str:
        """The learner that the others are measured against."""
        return "leo" if "leo" in self.learners else self.learners[0]

    @property
    def command(self) -> str:
        words = ["metaleo", "compare", "--data", self.data, "--learners", *self.learners]
        words += ["--shot", *map(str, self.shots)]
        for name in ("way", "steps", "tasks", "seed"):
            words += [f"--{name}", str(getattr(self, name))]
        return shlex.join(words)

    def check(self, metaset: MetaSet) -> None:
        """Every mistake, before anything is trained."""
        unknown = [learner for learner in self.learners if learner not in LEARNERS]
        if unknown:
            raise BadInput(f"unknown learner {unknown[0]!r}; known are {', '.join(LEARNERS)}")
        for flag, values in (("--learners", self.learners), ("--shot", self.shots)):
            if not values:
                raise BadInput(f"{flag} needs at least one value")
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise BadInput(f"{flag} has {twice[0]} twice")
        for name, least in (("steps", 1), ("tasks", 2), ("seed", 0)):  # an interval needs two tasks
            if getattr(self, name) < least:
                raise BadInput(f"--{name} must be at least {least}, not {getattr(self, name)}")
        for shot in self.shots:
            for split, query in (("train", TrainConfig.query), ("val", None), ("test", None)):
                check(metaset.subset(split), self.way, shot, query)

    def config(self, learner: str, shot: int, dim: int) -> TrainConfig:
        """A learner's run: its preset for this shot; for those that learn nothing, a run of no steps."""
        if learner in UNTRAINED:
            structure = Structure(learner=learner, dim=dim, way=self.way)
            return TrainConfig(self.data, way=self.way, shot=shot, steps=0, seed=self.seed, structure=structure)
        every = max(1, min(TrainConfig.validate_every, self.steps // VALIDATIONS))
        flags = Train(data=self.data, learner=learner, way=self.way, shot=shot, steps=self.steps, seed=self.seed,
                      validate_every=every)  # fmt: skip
        return flags.resolve(dim)


@dataclasses.dataclass(frozen=True)
class Standing:
    """A learner's line in a table: its report, and how its accuracy differs from the reference's, task by task."""

    learner: str
    report: Report
    difference: float
    difference_interval: float
    best_step: int
    """Meta-steps of the model that was tested."""
    training_seconds: float | None
    """Compilation included; None where a kill has lost count."""
    testing_seconds: float | None

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        report = fields.pop("report")
        return {"learner": fields.pop("learner"), **report, **fields}


Standings = dict[int, list[Standing]]
"""By shot; the most accurate first."""


def compare(plan: Plan, folder: Path, overwrite: bool) -> dict[str, Any]:
    """Train, test, rank; what results.json holds. Whatever is in the folder already is not done again."""
    if jax.process_count() > 1:
        raise BadInput("compare runs on one host; start it without JAX_COORDINATOR_ADDRESS")
    metaset = data.load(plan.data)
    plan.check(metaset)
    jobs = {
        folder / f"{shot}shot" / learner: plan.config(learner, shot, metaset.dim)
        for shot in plan.shots
        for learner in plan.learners
    }
    claim(folder, dataclasses.asdict(plan) | {"checksum": metaset.checksum()}, overwrite)
    for own, config in jobs.items():
        if (own / "config.json").is_file():  # of another version of Metaleo, or resumed with more steps
            refuse_other(own, runs.resume(own, None).to_json(), config.to_json(), set())
    say.print(f"{plan.data}: {metaset.describe()}", markup=False, soft_wrap=True)
    standings: Standings = {}
    scores: dict[int, dict[str, Score]] = {shot: {} for shot in plan.shots}
    try:
        for number, (own, config) in enumerate(jobs.items(), start=1):
            shot = config.shot
            scores[shot][own.name] = work(plan, metaset, own, config, f"[{number}/{len(jobs)}]")
            if len(scores[shot]) == len(plan.learners):
                standings[shot] = rank(own.parent, scores[shot], plan.reference)
                print_standings(plan, shot, standings[shot])
    except KeyboardInterrupt as interrupt:  # between runs, which save and say so themselves
        say.print(f"stopped; {GO_ON}")
        raise Interrupted from interrupt
    device = jax.devices()[0]
    results = {
        "settings": dataclasses.asdict(plan),
        "machine": {"device": device.device_kind, "backend": jax.default_backend()},
        "versions": {"metaleo": metaleo.__version__, "jax": jax.__version__},
        "reference": plan.reference,
        "shots": {str(shot): [standing.to_json() for standing in rows] for shot, rows in standings.items()},
    }
    write_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    write_text(folder / "compare.md", to_markdown(plan, results["machine"], standings))
    panels = {
        f"{plan.way}-way {shot}-shot": {
            row.learner: (row.report.accuracy, row.report.accuracy_interval) for row in rows
        }
        for shot, rows in standings.items()
    }
    plot_comparison(folder / "compare.png", panels, plan.reference)
    say.print(f"table: {folder}/compare.md\nfigure: {folder}/compare.png\nmodels: {folder}/<shot>shot/<learner>",
              markup=False, soft_wrap=True)  # fmt: skip
    return results


# The folder


def claim(folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Write down the settings, unless the folder holds something else. Learners and shots may be added later."""
    path = folder / "compare.json"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        before = read_json(path)
        if not {"data", "learners", "checksum"} <= before.keys():
            raise BadInput(f"{folder} exists and is not a comparison; give another --out")
        if overwrite:
            shutil.rmtree(folder)
        else:
            refuse_other(folder, before, settings, {"learners", "shots"})
    write_text(path, json.dumps(settings, indent=2) + "\n")


def refuse_other(folder: Path, before: dict[str, Any], now: dict[str, Any], free: set[str]) -> None:
    """Results under two different settings must not be mixed."""
    for name in now:
        if name not in free and before.get(name) != now[name]:
            what = (
                "the features are not the same" if name == "checksum" else f"{name} {before.get(name)}, not {now[name]}"
            )
            raise BadInput(f"{folder} was made with other settings ({what}); replace the comparison with --overwrite")


@contextlib.contextmanager
def clocked(folder: Path, what: str) -> Iterator[None]:
    """Add the seconds of a block to those of earlier attempts; unknown, should it be killed."""
    path = folder / "times.json"
    times = read_json(path)
    before, start = times.get(what, 0.0), time.monotonic()
    write_text(path, json.dumps(times | {what: None}) + "\n")
    try:
        yield
    finally:
        seconds = None if before is None else round(before + time.monotonic() - start, 2)
        write_text(path, json.dumps(times | {what: seconds}) + "\n")


# The work


def work(plan: Plan, metaset: MetaSet, folder: Path, config: TrainConfig, where: str) -> Score:
    """One learner at one shot: train it, unless that is done, and test it, unless that is done."""
    learner, model = config.structure.learner, folder / "model.safetensors"
    title = f"{where} {learner}, {plan.way}-way {config.shot}-shot"
    if not (folder / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # at most what a kill has left
        runs.prepare(folder, config, overwrite=False)
    score = load_score(folder / "test.npz", plan.seed, plan.tasks)
    if score is not None and model.is_file():
        say.print(f"{title}: done", markup=False)
        return score
    say.print(title, markup=False)
    with clocked(folder, "training"):
        make_untrained(metaset, model, config) if learner in UNTRAINED else meta_train(metaset, folder, config)
    testing = Episodes.over(metaset.subset("test"), plan.way, config.shot, None, place(metaset))
    with clocked(folder, "testing"):
        score = score_with_progress(load_model(model).learner, testing, plan.seed, plan.tasks, "testing")
    save_score(folder / "test.npz", score, plan.seed)
    return score


def meta_train(metaset: MetaSet, folder: Path, config: TrainConfig) -> None:
    """Go on with a run to its end."""
    train_with_progress(runs.Run(config, folder, metaset), "training", GO_ON)
    name = config.structure.learner
    title = f"{name}, {config.way}-way {config.shot}-shot, {Path(config.data).name}"
    plot_curves(folder / "curves.png", {name: read_metrics(folder / "metrics.jsonl")}, title)


def make_untrained(metaset: MetaSet, path: Path, config: TrainConfig) -> None:
    """A learner with nothing to meta-train knows the mean of the train features, and no more."""
    train = metaset.subset("train")
    learner = config.structure.init(jax.random.key(config.seed)).informed(mean_feature(train))
    header = {"config": config.to_json(), "seed": config.seed, "step": 0, "classes": train.class_names}
    save_model(path, learner, config.structure, header)


def mean_feature(metaset: MetaSet) -> Float[Array, " dim"]:
    """The mean of all features, each of length one; a bounded number of them at a time."""
    total = np.zeros(metaset.dim)
    for start in range(0, len(metaset.rows), SLAB):
        vectors = normalise(metaset.read(metaset.rows[start : start + SLAB]))
        total += np.asarray(vectors, np.float64).sum(0)
    return jnp.asarray(total / len(metaset.rows), jnp.float32)


# The results


def rank(folder: Path, scores: dict[str, Score], reference: str) -> list[Standing]:
    """Every learner beside the reference, the most accurate first."""
    standings = []
    for learner, score in scores.items():
        difference, interval = paired_difference(score.accuracy, scores[reference].accuracy)
        best_step = read_header(folder / learner / "model.safetensors")["step"]
        times = read_json(folder / learner / "times.json")
        seconds = times.get("training"), times.get("testing")
        standings.append(Standing(learner, summarise(score), difference, interval, best_step, *seconds))
    return sorted(standings, key=lambda standing: -standing.report.accuracy)


def paired_difference(
    ours: Float[Array | np.ndarray, " task"], theirs: Float[Array | np.ndarray, " task"]
) -> tuple[float, float]:
    """Mean of a - b over the same tasks, and 1.96 of its standard errors: what tasks have in common cancels."""
    differences = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    return float(differences.mean()), float(1.96 * differences.std(ddof=1) / math.sqrt(len(differences)))


def cells(standing: Standing, reference: str) -> list[str]:
    """A row of the table, in the columns of `columns`."""
    report, seconds = standing.report, standing.training_seconds
    return [
        standing.learner,
        f"{100 * report.accuracy:.2f} ± {100 * report.accuracy_interval:.2f}",
        "–" if standing.learner == reference
        else f"{100 * standing.difference:+.2f} ± {100 * standing.difference_interval:.2f}",
        f"{report.nll:.3f}",
        f"{100 * report.calibration_error:.1f}",
        "?" if seconds is None else f"{seconds:,.0f}",
        f"{standing.best_step:,}",
    ]  # fmt: skip


def columns(reference: str) -> list[str]:
    return ["learner", "accuracy (%)", f"minus {reference} (%)", "NLL", "ECE (%)", "training (s)", "best step"]


def print_standings(plan: Plan, shot: int, standings: list[Standing]) -> None:
    say.print(f"\n{plan.way}-way {shot}-shot, the same {plan.tasks:,} test tasks (±: 95 %; ECE: calibration error)")
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name in columns(plan.reference):
        heading = "\n".join(name.rsplit(" ", 1))  # so that the longest names fit eighty columns
        table.add_column(heading, justify="left" if name == "learner" else "right", no_wrap=True)
    for standing in standings:
        style = "bold" if standing.learner == plan.reference else None
        table.add_row(*cells(standing, plan.reference), style=style)
    say.print(table, "")


def to_markdown(plan: Plan, machine: dict[str, str], standings: Standings) -> str:
    """The settings, then a table per shot."""
    lines = [
        f"```sh\n{plan.command}\n```\n",
        f"- data: `{plan.data}`; seed {plan.seed} for training and for the test tasks",
        f"- at most {plan.steps:,} meta-steps, each learner with its preset; the best by validation accuracy is tested",
        f"- {plan.tasks:,} test tasks, the same for every learner; every image outside the support set is a query",
        f"- machine: {machine['device']} ({machine['backend']}); metaleo {metaleo.__version__}, jax {jax.__version__}",
        "- ± is 1.96 standard errors over tasks (95 %); "
        f"“minus {plan.reference}” is the mean difference of accuracy on the same tasks",
        "- ECE: expected calibration error; training: wall time, compilation included; best step: meta-steps of the "
        "tested model",
    ]
    for shot, rows in standings.items():
        names = columns(plan.reference)
        lines += [f"\n## {plan.way}-way {shot}-shot\n", "| " + " | ".join(names) + " |", "|---" + "|---:" * 6 + "|"]
        for standing in rows:
            texts = cells(standing, plan.reference)
            if standing.learner == plan.reference:
                texts = [f"**{text}**" for text in texts]
            lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"
