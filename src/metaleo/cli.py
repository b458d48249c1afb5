"""The command line: `metaleo quickstart`, `metaleo train`, `metaleo evaluate`."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from metaleo import __version__
from metaleo.config import LEARNERS, PRESETS, Clip, TrainConfig, find_preset
from metaleo.errors import BadInput

say = Console(stderr=True, highlight=False)
"""For people; standard output is for results."""


def flag(metavar: str) -> object:
    """A flag that may be left out; its help says what then holds."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Int = Annotated[int | None, flag("N")]
Float = Annotated[float | None, flag("X")]
Text = Annotated[str | None, flag("TEXT")]
Place = Annotated[Path | None, flag("PATH")]
YesNo = Annotated[bool | None, flag("{True,False}")]


@dataclasses.dataclass(frozen=True)
class Quickstart:
    """See LEO work, in about two minutes on two cores: nothing to download, nothing to configure.

    Meta-trains LEO and Meta-SGD on the miniImageNet features inside this package (5-way 1-shot), tests both and a
    nearest-centroid classifier on the same tasks of unseen classes, and leaves the models and a figure in a folder.

    Try:
      metaleo quickstart
    """

    steps: int = 3000
    """Meta-steps of each learner."""
    tasks: int = 2000
    """Test tasks, the same for every learner."""
    seed: int = 0
    """Of everything random."""
    out: Path = Path("metaleo-quickstart")
    """Folder for the models and the figure."""
    overwrite: bool = False
    """Replace the folder of an earlier quickstart."""
    json: bool = False
    """Print the results as JSON on standard output."""

    def run(self) -> None:
        from metaleo.quickstart import quickstart

        results = quickstart(self, say)
        if self.json:
            print(json.dumps(results, indent=2))


@dataclasses.dataclass(frozen=True)
class Train:
    """Meta-train a learner and keep the best by validation accuracy.

    Whatever is not given comes from the preset; without --preset, from the one for this learner and shot. The run
    folder holds the model, the resolved configuration, the metrics and a figure. Ctrl-C saves and leaves, and
    nothing is lost by a kill: --resume goes on to exactly the result of an uninterrupted run.

    Try:
      metaleo train --shot 5 --out runs/five-shot
      metaleo train --data features.npz --preset paper-mini-1shot --seeds 5
      metaleo train --learner meta-sgd --steps 5000
      metaleo train --resume --out runs/five-shot
    """

    data: Text = None
    """Feature file (.npz, .safetensors), folder of the authors' pickles, or `sample`, the one in this package."""
    learner: Text = None
    """leo, meta-sgd, maml or fomaml."""
    preset: Text = None
    """Hyper-parameters to start from; a wrong name lists them all."""
    way: Int = None
    """Classes per task (5)."""
    shot: Int = None
    """Labelled examples per class (1, or the preset's)."""
    query: Int = None
    """Query examples per class in training tasks (15); validation uses all the rest."""
    steps: Int = None
    """Meta-steps at most (100,000)."""
    seed: Int = None
    """Of everything random (0)."""
    seeds: Int = None
    """Train this many seeds, from --seed on, side by side (1)."""
    out: Place = None
    """Run folder (runs/<learner>-<way>way-<shot>shot)."""
    resume: bool = False
    """Go on with the run in --out; its own configuration holds, except for --steps."""
    overwrite: bool = False
    """Replace the run in --out."""
    json: bool = False
    """Print the result as JSON on standard output."""

    train_on: Annotated[Literal["train", "train+val"] | None, flag("{train,train+val}")] = None
    """Classes to learn from; train+val is the paper's last stage (train)."""
    meta_batch: Int = None
    """Tasks per meta-step (12)."""
    validate_every: Int = None
    """Meta-steps between validations (1000)."""
    validation_tasks: Int = None
    """Tasks per validation (1000)."""
    patience: Int = None
    """Validations without a better one before the run stops early (20)."""
    clip: Annotated[Clip | None, flag("{global,per-tensor}")] = None
    """Clip the norm of the whole meta-gradient (global: the paper) or of each tensor (per-tensor: its code)."""

    learning_rate: Float = None
    """η: Adam's step in the outer loop."""
    kl: Float = None
    """β: weight of the KL term."""
    encoder_penalty: Float = None
    """γ: weight of the pull of codes to adapted codes."""
    l2: Float = None
    """λ₁: weight of the L2 term."""
    orthogonality: Float = None
    """λ₂: weight of the decoder's orthogonality term."""
    keep: Float = None
    """p_keep: probability that dropout keeps a feature."""

    latent: Int = None
    """Size of a code (64)."""
    latent_steps: Int = None
    """Gradient steps on the codes (5)."""
    finetune_steps: Int = None
    """Gradient steps on the weights (5)."""
    latent_step_size: Float = None
    """Where the learned step sizes for codes start (1)."""
    finetune_step_size: Float = None
    """Where the learned step sizes for weights start; MAML's step size."""

    official: YesNo = None
    """LEO's scales and KL estimate exactly as in the authors' code, or not (the preset's; see docs/deviations.md)."""

    def given(self, kind: type) -> dict[str, object]:
        """The flags that were given, of those that this record has."""
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in vars(self).items() if name in names and value is not None}

    def resolve(self, dim: int) -> TrainConfig:
        """The whole configuration: defaults, then the preset, then what was given."""
        learner = self.learner or (PRESETS[self.preset].structure.learner if self.preset in PRESETS else "leo")
        if learner not in LEARNERS:
            raise BadInput(f"unknown learner {learner!r}; known are {', '.join(LEARNERS)}")
        if learner == "nearest-centroid":
            raise BadInput("nearest-centroid has nothing to learn; `metaleo quickstart` shows how it does")
        preset = find_preset(self.preset, learner, self.shot)
        structure = preset.structure
        if structure.learner != learner:
            structure = dataclasses.replace(find_preset(None, learner, self.shot).structure, learner=learner)
        given = self.given(TrainConfig)
        if self.data not in (None, "sample"):
            given["data"] = str(Path(str(self.data)).resolve())  # so that a run can be resumed from anywhere
        config = TrainConfig(**{"shot": preset.shot, "clip": preset.clip, **given})  # type: ignore[arg-type]
        changes = {"learner": learner, "dim": dim, "way": config.way}
        config = dataclasses.replace(
            config,
            structure=dataclasses.replace(structure, **{**self.given(type(structure)), **changes}),  # type: ignore[arg-type]
            hyper=dataclasses.replace(preset.hyper, **self.given(type(preset.hyper))),  # type: ignore[arg-type]
        )
        check_config(config)
        return config

    def run(self) -> None:
        from metaleo import data, runs
        from metaleo.figures import plot_curves

        if self.resume and self.overwrite:
            raise BadInput("--resume keeps a run and --overwrite replaces it; give one of them")
        if self.resume:
            if self.out is None:
                raise BadInput("--resume needs --out, the run to go on with")
            folder = self.out
            config = runs.resume(folder, self.steps)
            metaset = data.load(config.data)
        else:
            metaset = data.load(self.data or "sample")
            config = self.resolve(metaset.dim)
            default = f"runs/{config.structure.learner}-{config.way}way-{config.shot}shot"
            folder = self.out or Path(default)
        run = runs.Run(config, folder, metaset)  # bad data says so before the folder is touched
        if not self.resume:
            runs.prepare(folder, config, self.overwrite)
        say.print(f"{config.data}: {metaset.describe()}")
        say.print(f"{config.structure.learner}, {config.way}-way {config.shot}-shot → {folder}")
        title = f"{config.structure.learner}, {config.way}-way {config.shot}-shot, {Path(config.data).name}"
        state = train_with_progress(run, config.structure.learner)
        plot_curves(
            folder / "curves.png",
            {config.structure.learner: runs.read_metrics(folder / "metrics.jsonl")},
            title,
        )
        best = [100 * float(accuracy) for accuracy in state.best_accuracy]
        shown = ", ".join(f"{accuracy:.2f} %" for accuracy in best)
        say.print(f"best validation accuracy {shown}; test it with:\n  metaleo evaluate {folder}")
        if self.json:
            fields = ("best_step", "skipped", "step")
            per_seed = [
                {"seed": seed, "validation_accuracy": best[i] / 100}
                | {name: int(getattr(state, name)[i]) for name in fields}
                for i, seed in enumerate(run.seeds)
            ]
            print(json.dumps({"run": str(folder), "config": config.to_json(), "seeds": per_seed}, indent=2))


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Test a trained model on tasks of unseen classes: accuracy ± 95 % interval, NLL, calibration error.

    The same seed gives the same tasks to every model. With several seeds in a run, each is tested.

    Try:
      metaleo evaluate runs/leo-5way-1shot
      metaleo evaluate runs/leo-5way-1shot --tasks 50000 --json
      metaleo evaluate model.safetensors --data other.npz --way 10 --shot 3
    """

    run_or_model: Annotated[Path, tyro.conf.Positional]
    """Run folder, or a model file."""
    tasks: int = 10_000
    """Test tasks (the paper: 50,000)."""
    data: Text = None
    """Features to test on (those that the model was trained with)."""
    split: Literal["train", "val", "test"] = "test"
    """Classes to test on."""
    way: Int = None
    """Classes per task (as in training)."""
    shot: Int = None
    """Labelled examples per class (as in training)."""
    query: Int = None
    """Query examples per class (all the rest)."""
    seed: int = 0
    """Which tasks."""
    per_task: Place = None
    """Also write every task's accuracy and NLL to this CSV file."""
    json: bool = False
    """Print the results as JSON on standard output."""

    def run(self) -> None:
        from metaleo import data, runs
        from metaleo.checkpoint import load_model
        from metaleo.data.rows import place
        from metaleo.evaluation import summarise, write_scores
        from metaleo.tasks import Episodes

        if self.tasks < 1:
            raise BadInput(f"--tasks must be at least 1, not {self.tasks}")
        paths = runs.model_paths(self.run_or_model)
        models = [load_model(path) for path in paths]
        trained = TrainConfig.from_json(models[0].header["config"])
        source = self.data or trained.data
        metaset = data.load(source)
        if metaset.dim != models[0].structure.dim:
            raise BadInput(
                f"{source} has {metaset.dim} numbers per example, but "
                f"{paths[0]} was trained on {models[0].structure.dim}"
            )
        way = trained.way if self.way is None else self.way
        shot = trained.shot if self.shot is None else self.shot
        episodes = Episodes.over(metaset.subset(self.split), way, shot, self.query, place(metaset))
        scores = {}
        for path, model in zip(paths, models, strict=True):
            scores[model.header["seed"]] = score_with_progress(
                model.learner, episodes, self.seed, self.tasks, path.name
            )
        reports = {seed: summarise(score) for seed, score in scores.items()}
        if self.per_task is not None:
            write_scores(self.per_task, scores)
        title = f"{way}-way {shot}-shot, {self.tasks:,} {self.split} tasks of {source}, seed {self.seed}"
        print_reports(title, {f"seed {seed}": report for seed, report in reports.items()})
        if self.json:
            result = {
                "data": source, "split": self.split, "way": way, "shot": shot, "query": self.query, "seed": self.seed,
                "models": [{"model": str(path), "seed": seed, **vars(report)}
                           for path, (seed, report) in zip(paths, reports.items(), strict=True)],
            }  # fmt: skip
            print(json.dumps(result, indent=2))


def check_config(config: TrainConfig) -> None:
    """Numbers that make no sense, in one line each."""
    for name in ("steps", "seeds", "meta_batch", "validate_every", "validation_tasks", "patience"):
        if getattr(config, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1, not {getattr(config, name)}")
    for name in ("latent_steps", "finetune_steps"):
        if getattr(config.structure, name) < 0:
            raise BadInput(f"--{name.replace('_', '-')} cannot be negative")
    if config.structure.latent < 1:
        raise BadInput(f"--latent must be at least 1, not {config.structure.latent}")
    for name, value in vars(config.hyper).items():
        if not 0 <= value < float("inf"):
            raise BadInput(f"--{name.replace('_', '-')} must be a finite number of at least 0, not {value}")
    if not 1 / 256 <= config.hyper.keep <= 1:
        raise BadInput(f"--keep is a probability above 1/256, not {config.hyper.keep}")
    if config.seed < 0:
        raise BadInput(f"--seed cannot be negative, not {config.seed}")


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=say)


def train_with_progress(run, name: str):
    """Train, with a live bar: speed, accuracy on training tasks, best validation accuracy so far."""
    from metaleo import runs

    best = dict.fromkeys(run.seeds, 0.0)
    with progress_bar() as progress:
        bar = progress.add_task(name, total=run.config.steps, note="compiling …")
        clock = [time.monotonic(), 0]

        def report(records):
            step = records[0]["step"]
            for record in records:
                best[record["seed"]] = max(best[record["seed"]], record.get("validation_accuracy") or 0)
            now = time.monotonic()
            speed = (step - clock[1]) / (now - clock[0])
            clock[:] = now, step
            training = records[0]["query_accuracy"]
            note = f"{speed * len(records):,.0f} steps/s · train {100 * (training or 0):.1f} %"
            if any(best.values()):
                note += " · val " + ", ".join(f"{100 * value:.1f}" for value in best.values()) + " %"
            if any(record["skipped"] for record in records):
                note += f" · [red]{max(record['skipped'] for record in records)} steps skipped (NaN)[/red]"
            progress.update(bar, completed=step, note=note)

        try:
            state = run.train(report)
        except runs.Interrupted:
            progress.stop()
            say.print(f"stopped and saved; go on with:\n  metaleo train --resume --out {run.folder}")
            raise
        if bool(state.stopped.all()):
            progress.update(bar, total=int(state.step.max()))
    return state


def score_with_progress(learner, episodes, seed: int, tasks: int, name: str):
    from metaleo.evaluation import evaluate

    with progress_bar() as progress:
        bar = progress.add_task(name, total=tasks, note="")
        return evaluate(learner, episodes, seed, tasks, lambda done: progress.update(bar, completed=done))


def print_reports(title: str, reports: dict) -> None:
    import statistics

    table = Table(title=title, title_justify="left")
    for column in ("", "accuracy (95 %)", "NLL", "calibration error"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, report in reports.items():
        table.add_row(
            name,
            f"{100 * report.accuracy:.2f} ± {100 * report.accuracy_interval:.2f} %",
            f"{report.nll:.3f} ± {report.nll_interval:.3f}",
            f"{100 * report.calibration_error:.1f} %",
        )
    say.print(table)
    if len(reports) > 1 and all(name.startswith("seed ") for name in reports):
        accuracies = [100 * report.accuracy for report in reports.values()]
        say.print(
            f"over {len(accuracies)} seeds: {statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f} % "
            "(mean ± standard deviation)"
        )


Command = (
    Annotated[Quickstart, tyro.conf.subcommand("quickstart")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one line and exit code 2 for bad input, 130 when interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in (["--version"], ["-V"]):
        print(f"metaleo {__version__}")
        return
    from metaleo.runs import Interrupted

    command = tyro.cli(
        Command,  # type: ignore[arg-type]
        prog="metaleo",
        description="Meta-learning with Latent Embedding Optimization (LEO).",
        args=arguments,
    )
    try:
        command.run()
    except BadInput as error:
        say.print(f"metaleo: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except Interrupted:
        sys.exit(130)


if __name__ == "__main__":
    main()
