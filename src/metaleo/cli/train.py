"""`metaleo train`."""

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from metaleo.cli.common import (
    Columns,
    Span,
    Switch,
    default_is,
    emit,
    make_table,
    progress,
    records,
    registry,
    tell,
    visible,
)
from metaleo.config.presets import default_config, resolve_config
from metaleo.config.schema import TrainConfig
from metaleo.errors import BadInput, unknown_name
from metaleo.learners.base import HyperParams
from metaleo.learners.registry import ANCHORED, Structure
from metaleo.tasks import PROBLEMS

if TYPE_CHECKING:
    from metaleo.data.metaset import MetaSet
    from metaleo.training.run import TrainingRun

EVERYDAY = ("data", "label", "ignore", "way", "shot", "steps", "seed")
records[TrainConfig] = (*EVERYDAY, "ways", "shots", "structure", "hyper")
records[Structure] = ("learner", "dim", "way", "noise", "tail")  # `--learner`, `--way`, and what the data decide
records[HyperParams] = ()


@dataclasses.dataclass(frozen=True)
class Selection:
    """The flags that decide the defaults of all others."""

    learner: str | None = None
    shot: str | None = None
    preset: str | None = None
    problem: str | None = None
    joint: str | None = None
    out: Path | None = None
    resume: Switch = False


@dataclasses.dataclass(frozen=True)
class Train:
    """Meta-train a learner and keep the best by validation accuracy, or for functions by validation loss.

    Defaults are those of the preset: `metaleo train --preset NAME --help` shows them. The run folder holds the model,
    the configuration, the metrics and a figure. Ctrl-C saves and stops, and a kill loses nothing: --resume continues,
    with the number of CPU devices and the engine that the run began with, to exactly the result of an uninterrupted
    run; where that cannot be, it says so and goes on.

    Try:
      metaleo train --data my-vectors.csv --out runs/mine
      metaleo train --learner leo --shot 5 --out runs/five-shot
      metaleo train --data banking.csv --label category --ignore id --out runs/banking
      metaleo train --data features.npz --preset paper-mini-1shot --seeds 5
      metaleo train --learner meta-sgd --steps 5000
      metaleo train --problem sines-and-lines
      metaleo train --resume --out runs/five-shot
    """

    data: str = "sample"
    """Table with a row per example (.csv, .tsv, .parquet, a Hugging Face folder), feature file (.npz, .safetensors), a
    folder of the authors' pickles, or data in this package: sample, strokes, intents."""
    label: Annotated[str | None, default_is("label")] = None
    """Of a table, the column of the labels."""
    ignore: Columns = ()
    """Of a table, columns of numbers that are no part of the vector."""
    learner: str = ANCHORED
    """What to meta-train: leo-anchored, which is never worse than its anchor on validation tasks; leo, as in the paper;
    meta-sgd, maml, prototypical, … (`metaleo list learners`)."""
    preset: Annotated[str | None, default_is("the one for this learner and shot")] = None
    """Hyper-parameters to start from: a name (`metaleo list presets`), or best.json of a search."""
    way: Span = Span(TrainConfig.way, TrainConfig.way)
    """Classes per task; leo-anchored also learns from tasks of many ways: 2..20."""
    shot: Span = Span(TrainConfig.shot, TrainConfig.shot)
    """Labelled examples per class; of leo-anchored also 1..20, and then also unequal ones."""
    steps: int = TrainConfig.steps
    """Meta-steps at most; the run stops earlier when validation no longer improves."""
    seed: int = TrainConfig.seed
    """Seed of all randomness."""
    out: Annotated[Path | None, default_is("runs/LEARNER-WAYway-SHOTshot", aliases=["-o"])] = None
    """Run folder."""
    resume: Switch = False
    """Continue the run in --out with its own configuration; only --steps may change."""
    overwrite: Switch = False
    """Replace the run in --out."""
    json: Switch = False
    """Print the result as JSON."""

    problem: Annotated[str | None, default_is("none")] = None
    """Tasks that need no data: sines-and-lines, 5-shot regression."""
    training: Annotated[TrainConfig, tyro.conf.arg(name="research: training")] = TrainConfig()
    hyper: Annotated[HyperParams, tyro.conf.arg(name="research: hyper-parameter")] = HyperParams()
    structure: Annotated[Structure, tyro.conf.arg(name="research: learner")] = Structure()

    @classmethod
    def defaults(cls, arguments: list[str]) -> "Train":
        """What holds where nothing else is said: the values of the preset, or of the run to be resumed."""
        asked = [argument for argument in arguments if argument not in ("-h", "--help")]
        chosen, _ = tyro.cli(
            Selection, prog="metaleo train", args=asked, return_unknown_args=True, registry=registry,
            config=(tyro.conf.DisallowNone,),
        )  # fmt: skip
        if chosen.problem is not None and chosen.problem not in PROBLEMS:
            raise unknown_name("problem", chosen.problem, PROBLEMS)
        if chosen.resume and chosen.out is not None and (chosen.out / "config.json").is_file():
            return cls.of(TrainConfig.read(chosen.out / "config.json"), out=chosen.out)
        least = (chosen.shot or "").partition("..")[0]
        shot = int(least) if least.isdecimal() else None  # any other word is refused when all flags are read
        said = chosen.learner or chosen.preset or chosen.problem or chosen.joint
        learner = chosen.learner if said else ANCHORED  # what is right for data never seen before
        config = default_config(learner, shot, preset=chosen.preset, problem=chosen.problem)
        return cls.of(config, preset=chosen.preset, problem=chosen.problem)

    @classmethod
    def of(cls, config: TrainConfig, **others: Any) -> "Train":
        """The flags that mean this configuration."""
        everyday = {name: getattr(config, name) for name in EVERYDAY}
        everyday |= {name: Span(*span) for name, span in zip(("way", "shot"), config.spans, strict=True)}
        if config.data in PROBLEMS:
            everyday["data"], others["problem"] = cls.data, config.data
        parts = {"training": config, "hyper": config.hyper, "structure": config.structure}
        return cls(learner=config.structure.learner, **everyday, **parts, **others)

    def resolve(self, dim: int) -> TrainConfig:
        """The whole configuration, checked."""
        flags = {name: getattr(self, name) for name in (*EVERYDAY, "learner", "preset", "problem")}
        mixed = self.way.least != self.way.most or self.shot.least != self.shot.most
        flags |= {"ways": tuple(self.way) if mixed else None, "shots": tuple(self.shot) if mixed else None}
        usual = max(self.way.least, min(TrainConfig.way, self.way.most))  # what a mixed model is tested on by default
        flags |= {"way": usual if mixed else self.way.least, "shot": self.shot.least}
        parts = visible(self.training) | visible(self.hyper) | visible(self.structure)
        return resolve_config(dim, **flags, **parts)

    def resumed(self) -> TrainConfig:
        """The configuration of the run in --out, with --steps as given."""
        from metaleo.training.run import resume_config

        if self.overwrite:
            raise BadInput("--resume keeps a run and --overwrite replaces it; give one of them")
        if self.out is None:
            raise BadInput("--resume needs --out, the run to go on with")
        if (path := self.out / "config.json").is_file():
            own = Train.of(TrainConfig.read(path), out=self.out)
            if dataclasses.replace(self, steps=own.steps, resume=False, json=False) != own:
                raise BadInput("a resumed run keeps its own configuration; only --steps may change")
        return resume_config(self.out, self.steps)

    def run(self) -> None:
        from metaleo._io.run_log import check_run_folder, owned
        from metaleo.data.feature_files import load_data
        from metaleo.tasks.episodes import check_enough
        from metaleo.training.run import TrainingRun, check_data, create_run_folder

        metaset = None
        if self.resume:
            config = self.resumed()
            if config.data not in PROBLEMS:
                metaset = load_data(config.data, config.label, config.ignore)
        elif self.problem is not None:
            for name in ("data", "label", "ignore", "way"):
                if getattr(self, name) != getattr(Train, name):
                    raise BadInput(f"--{name} means nothing to {self.problem}")
            config = self.resolve(1)
        else:
            metaset = load_data(self.data, self.label, self.ignore)
            config = self.resolve(metaset.dim)
            check_enough(metaset, config.way)
        kind = self.problem or ("mixed" if config.mixed else f"{config.way}way-{config.shot}shot")
        folder = self.out or Path(f"runs/{config.structure.learner}-{kind}")
        if metaset is not None:
            check_data(config, metaset)
        if not self.resume:
            check_run_folder(folder, self.overwrite)
        with contextlib.ExitStack() as stack:
            if folder.is_dir():
                stack.enter_context(owned(folder))
            if config.structure.anchored:
                tell("choosing the anchor on validation tasks …")
            run = TrainingRun(config, folder, metaset)  # bad data says so before the folder is touched
            if self.resume:
                run.check_classes()
            else:
                create_run_folder(folder, config, self.overwrite)
            stack.enter_context(owned(folder))
            self.train(run, metaset)

    def train(self, run: "TrainingRun", metaset: "MetaSet | None") -> None:
        """Train to the end, and say how it went."""
        from metaleo._io.run_log import read_metrics
        from metaleo.plotting.figures import plot_curves
        from metaleo.tasks.episodes import advice
        from metaleo.training.run import format_score, train_with_progress

        config, folder = run.config, run.folder
        if metaset is not None:
            tell(f"{config.data}: {metaset.describe()}")
            if told := advice(metaset, config.way):
                tell(told)
        tell(f"{config.title} → {folder}")
        title = config.title if metaset is None else f"{config.title}, {Path(config.data).name}"
        resume = f"go on with:\n  metaleo train --resume --out {folder}"
        state = train_with_progress(run, config.structure.learner, progress, resume)
        run.calibrate(state)
        best = [run.named_score(float(score)) for score in state.best_score]
        what = next(iter(best[0])).replace("_", " ")
        fields = ("best_step", "skipped", "step")
        per_seed = [
            {"seed": seed, **best[i]} | {name: int(getattr(state, name)[i]) for name in fields}
            for i, seed in enumerate(run.seeds)
        ]
        result = {"run": str(folder), "config": config.to_json(), "seeds": per_seed}
        shown: list[Any] = [f"{folder}: best {what} {', '.join(format_score(score) for score in best)}"]
        levels: dict[str, float] = {}
        if run.metaset is not None and config.train_on == "train":
            from metaleo.training.baselines import beside_baselines, validation_levels

            beside, levels = beside_baselines(run, state), validation_levels(run)
            result["beside"] = [dataclasses.asdict(one) for one in beside]
            kinds = [f"{one.way}-way {one.shot}-shot" for one in beside]
            names = {"this model": "model", "nearest centroid": "centroid", "logistic regression": "logistic"}
            rows = [[name, *(f"{100 * getattr(one, field):.1f} %" for one in beside)] for name, field in names.items()]
            shown += [make_table(["validation accuracy", *kinds], rows)] if kinds else []
            result["validation"] = levels
            if behind := [kind for kind, one in zip(kinds, beside, strict=True) if one.behind]:
                tell(f"no better than what needs no training in {' and '.join(behind)} tasks; see `metaleo compare`")
        records = {config.structure.learner: read_metrics(folder / "metrics.jsonl")}
        plot_curves(folder / "curves.png", records, title, levels=levels)
        if run.anchor is not None and not any(one["best_step"] for one in per_seed):
            tell("training did not improve on the anchor, which is what the model is: its classifiers in closed form")
        emit(result, self.json, *shown)
        tell(f"test it with:\n  metaleo evaluate {folder}")
