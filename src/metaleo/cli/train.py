"""`metaleo train`."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Literal

from metaleo.cli.common import Float, Int, Place, Text, YesNo, flag, given, say, show_merit, train_with_progress
from metaleo.config import LEARNERS, PROBLEMS, UNTRAINED, Clip, Sizes, TrainConfig, find_preset
from metaleo.data.store import EMBEDDED
from metaleo.engines import choose
from metaleo.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Train:
    """Meta-train a learner and keep the best by validation accuracy, or for functions by validation loss.

    Whatever is not given comes from the preset; without --preset, from the one for this learner and shot. Numbers in
    brackets hold where the preset says nothing else. The run
    folder holds the model, the resolved configuration, the metrics and a figure. Ctrl-C saves and leaves, and
    nothing is lost by a kill: --resume goes on to exactly the result of an uninterrupted run.

    Try:
      metaleo train --shot 5 --out runs/five-shot
      metaleo train --data features.npz --preset paper-mini-1shot --seeds 5
      metaleo train --data my-vectors.csv --shot 5 --out runs/mine
      metaleo train --learner meta-sgd --steps 5000
      metaleo train --problem sines-and-lines
      metaleo train --data strokes --preset strokes
      metaleo train --data flat.safetensors --joint runs/conv-4-omniglot
      metaleo train --resume --out runs/five-shot
    """

    data: Text = None
    """Feature file (.npz, .safetensors), table with a column `label` (.csv, .tsv, .parquet, a Hugging Face folder),
    folder of the authors' pickles, or in this package: sample, strokes, intents."""
    problem: Text = None
    """Tasks that need no data instead: sines-and-lines, 5-shot regression."""
    learner: Text = None
    """What to meta-train (leo); a wrong name lists all."""
    joint: Place = None
    """A conv-4 whose last stage is learned too; --data is then what `metaleo embed --layer 3 --flat` made with it."""
    preset: Text = None
    """Hyper-parameters to start from: a name (a wrong one lists them all), or best.json of a search."""
    way: Int = None
    """Classes per task (5)."""
    shot: Int = None
    """Labelled examples per class (1, or the preset's)."""
    query: Int = None
    """Query examples per class in training tasks (15, or the preset's); validation uses all the rest."""
    steps: Int = None
    """Meta-steps at most (100,000, or the preset's)."""
    seed: Int = None
    """Of everything random (0)."""
    seeds: Int = None
    """Train this many seeds, from --seed on, side by side (1)."""
    out: Place = None
    """Run folder (runs/<learner>-<way>way-<shot>shot, or runs/<learner>-<problem>)."""
    resume: bool = False
    """Go on with the run in --out; its own configuration holds, except for --steps."""
    overwrite: bool = False
    """Replace the run in --out."""
    json: bool = False
    """Print the result as JSON on standard output."""

    train_on: Annotated[Literal["train", "train+val"] | None, flag("{train,train+val}")] = None
    """Classes to learn from; train+val is the paper's last stage (train)."""
    meta_batch: Int = None
    """Tasks per meta-step (12, or the preset's)."""
    validate_every: Int = None
    """Meta-steps between validations (1000)."""
    validation_tasks: Int = None
    """Tasks per validation (1000)."""
    patience: Int = None
    """Validations without a better one before the run stops early (20)."""
    clip: Annotated[Clip | None, flag("{global,per-tensor}")] = None
    """Clip the norm of the whole meta-gradient (global: the paper) or of each tensor (per-tensor: its code)."""
    engine: Text = None
    """What computes: reference (learners as they are written) or closed-form (LEO's derivatives written out), equal to
    rounding; a wrong name lists all that are installed (the fastest that can)."""
    decay: YesNo = None
    """Let the learning rate fall to zero over --steps, along half a cosine (False)."""

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

    network: Annotated[Literal["linear", "mlp", "gru"] | None, flag("{linear,mlp,gru}")] = None
    """What is generated: a linear classifier, an MLP, or a GRU that reads a row as a sequence (linear)."""
    codes: Annotated[Literal["class", "task"] | None, flag("{class,task}")] = None
    """A code and a network for each class, or one for the whole task (class)."""
    hidden: Int = None
    """Units of the MLP's hidden layers, or of the GRU's state (40)."""
    layers: Int = None
    """Layers of the MLP (3)."""
    channels: Int = None
    """Numbers that the GRU reads at a time (3)."""
    width: Int = None
    """Units of two hidden layers in LEO's encoder and in its decoder; 0: both linear (0)."""
    from_start: YesNo = None
    """LEO adds what it decodes to learned parameters that start as an ordinary network's (False)."""
    limit: Float = None
    """Longest inner gradient, where network or decoder are not linear (none)."""
    samples: Int = None
    """Solutions of a training task that LEO samples and is judged on together (1)."""

    official: YesNo = None
    """LEO's scales and KL estimate exactly as in the authors' code, or not (the preset's; see docs/deviations.md)."""

    def resolve(self, dim: int) -> TrainConfig:
        """The whole configuration: defaults, then the preset, then what was given."""
        learner = self.learner or (find_preset(self.preset, "leo", None).structure.learner if self.preset else "leo")
        if learner not in LEARNERS:
            raise BadInput(f"unknown learner {learner!r}; known are {', '.join(LEARNERS)}")
        if learner in UNTRAINED:
            raise BadInput(f"{learner} has nothing to learn; `metaleo compare --learners {learner}` tests it")
        preset = find_preset(self.preset, learner, self.shot, self.problem)
        structure = preset.structure
        if (structure.noise is None) != (self.problem is None):
            fits = "classes" if structure.noise is None else "functions"
            raise BadInput(f"the preset is for tasks of {fits}; leave --preset out for the one that fits")
        if structure.learner != learner and self.problem is None and structure.network == "linear":
            structure = find_preset(None, learner, self.shot).structure
        flags = given(self, TrainConfig)
        if self.problem is not None:
            flags["data"] = self.problem
        elif self.data not in (None, *EMBEDDED):
            flags["data"] = str(Path(str(self.data)).resolve())  # so that a run can be resumed from anywhere
        if self.joint is not None:
            flags["joint"] = str(self.joint.resolve())
        defaults = {"shot": preset.shot, "clip": preset.clip, **preset.training}
        config = TrainConfig(**{**defaults, **flags})  # type: ignore[arg-type]
        changes = {"learner": learner, "dim": dim, "way": config.way, "tail": self.tail(dim)}
        config = dataclasses.replace(
            config,
            structure=dataclasses.replace(structure, **{**given(self, type(structure)), **changes}),  # type: ignore[arg-type]
            hyper=dataclasses.replace(preset.hyper, **given(self, type(preset.hyper))),  # type: ignore[arg-type]
        )
        check_config(config)
        return dataclasses.replace(config, engine=choose(config.structure.blank(), config.engine).name)

    def tail(self, dim: int) -> Sizes | None:
        """The sizes of the last stage that is learned too, if one is."""
        from metaleo.features.networks import load_network
        from metaleo.learners.joint import Tail

        if self.joint is None:
            return None
        sizes = Tail.of(load_network(self.joint)).sizes
        if math.prod(sizes[:3]) != dim:
            raise BadInput(
                f"the last stage of {self.joint} takes {' x '.join(map(str, sizes[:3]))} numbers, the data have {dim}; "
                f"make them with `metaleo embed {self.joint} --layer 3 --flat`"
            )
        return sizes

    def run(self) -> None:
        from metaleo import data, runs
        from metaleo.data.splitting import advice, check_enough
        from metaleo.figures import plot_curves
        from metaleo.journal import read_metrics

        if self.resume and self.overwrite:
            raise BadInput("--resume keeps a run and --overwrite replaces it; give one of them")
        metaset = None
        if self.resume:
            if self.out is None:
                raise BadInput("--resume needs --out, the run to go on with")
            folder = self.out
            config = runs.resume(folder, self.steps)
            if config.data not in PROBLEMS:
                metaset = data.load(config.data)
        elif self.problem is not None:
            if self.data is not None:
                raise BadInput("--problem needs no --data; give one of them")
            if self.problem not in PROBLEMS:
                raise BadInput(f"unknown problem {self.problem!r}; known: {', '.join(PROBLEMS)}")
            for name in ("way", "train_on", "joint"):
                if getattr(self, name) is not None:
                    raise BadInput(f"--{name.replace('_', '-')} means nothing to {self.problem}")
            config = self.resolve(1)
            folder = self.out or Path(f"runs/{config.structure.learner}-{self.problem}")
        else:
            metaset = data.load(self.data or "sample")
            config = self.resolve(metaset.dim)
            check_enough(metaset, config.way)
            default = f"runs/{config.structure.learner}-{config.way}way-{config.shot}shot"
            folder = self.out or Path(default)
        run = runs.Run(config, folder, metaset)  # bad data says so before the folder is touched
        if self.resume:
            run.check_classes()
        else:
            runs.prepare(folder, config, self.overwrite)
        if metaset is not None:
            say.print(f"{config.data}: {metaset.describe()}")
            if told := advice(metaset, config.way):
                say.print(told)
        say.print(f"{config.title} → {folder}")
        title = config.title if metaset is None else f"{config.title}, {Path(config.data).name}"
        state = train_with_progress(run, config.structure.learner)
        run.calibrate(state)
        plot_curves(
            folder / "curves.png",
            {config.structure.learner: read_metrics(folder / "metrics.jsonl")},
            title,
        )
        best = [run.merit(float(merit)) for merit in state.best_merit]
        shown = ", ".join(show_merit(merit) for merit in best)
        what = next(iter(best[0])).replace("_", " ")
        say.print(f"best {what} {shown}; test it with:\n  metaleo evaluate {folder}")
        if self.json:
            fields = ("best_step", "skipped", "step")
            per_seed = [
                {"seed": seed, **best[i]} | {name: int(getattr(state, name)[i]) for name in fields}
                for i, seed in enumerate(run.seeds)
            ]
            print(json.dumps({"run": str(folder), "config": config.to_json(), "seeds": per_seed}, indent=2))


def check_config(config: TrainConfig) -> None:
    """Numbers that make no sense, in one line each."""
    for name in ("steps", "seeds", "meta_batch", "validate_every", "validation_tasks", "patience"):
        if getattr(config, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1, not {getattr(config, name)}")
    for name in ("latent_steps", "finetune_steps"):
        if getattr(config.structure, name) < 0:
            raise BadInput(f"--{name.replace('_', '-')} cannot be negative")
    for name, least in (("latent", 1), ("hidden", 1), ("layers", 1), ("channels", 1), ("samples", 1), ("width", 0)):
        if getattr(config.structure, name) < least:
            raise BadInput(f"--{name} must be at least {least}, not {getattr(config.structure, name)}")
    if config.structure.limit is not None and not config.structure.limit > 0:
        raise BadInput(f"--limit must be above 0, not {config.structure.limit}")
    for name in ("latent_step_size", "finetune_step_size"):
        if not math.isfinite(getattr(config.structure, name)):
            raise BadInput(f"--{name.replace('_', '-')} must be a finite number, not {getattr(config.structure, name)}")
    for name, value in vars(config.hyper).items():
        if not 0 <= value < float("inf"):
            raise BadInput(f"--{name.replace('_', '-')} must be a finite number of at least 0, not {value}")
    if not 0 < config.hyper.keep <= 1:
        raise BadInput(f"--keep is a probability above 0, not {config.hyper.keep}")
    config.structure.blank()  # what does not fit together says so
    if config.seed < 0:
        raise BadInput(f"--seed cannot be negative, not {config.seed}")
