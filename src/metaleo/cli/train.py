"""`metaleo train`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

from metaleo.cli.common import Float, Int, Place, Text, YesNo, console, flag, progress
from metaleo.config.presets import resolve_config
from metaleo.config.schema import Clip, TrainConfig
from metaleo.errors import BadInput, unknown_name
from metaleo.tasks import PROBLEMS


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
    keep_prob: Float = None
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
    max_grad_norm: Float = None
    """Longest inner gradient, where network or decoder are not linear (none)."""
    samples: Int = None
    """Solutions of a training task that LEO samples and is judged on together (1)."""

    official: YesNo = None
    """LEO's scales and KL estimate exactly as in the authors' code, or not (the preset's; see docs/deviations.md)."""

    def resolve(self, dim: int) -> TrainConfig:
        """The whole configuration: defaults, then the preset, then the flags that were given."""
        flags = {name: value for name, value in vars(self).items() if value is not None}
        for name in ("out", "resume", "overwrite", "json"):
            flags.pop(name, None)
        return resolve_config(dim, **flags)

    def run(self) -> None:
        from metaleo._io.run_log import read_metrics
        from metaleo.data.feature_files import load_data
        from metaleo.plotting.figures import plot_curves
        from metaleo.tasks.episodes import advice, check_enough
        from metaleo.training.run import (
            TrainingRun,
            create_run_folder,
            format_score,
            resume_config,
            train_with_progress,
        )

        if self.resume and self.overwrite:
            raise BadInput("--resume keeps a run and --overwrite replaces it; give one of them")
        metaset = None
        if self.resume:
            if self.out is None:
                raise BadInput("--resume needs --out, the run to go on with")
            folder = self.out
            config = resume_config(folder, self.steps)
            if config.data not in PROBLEMS:
                metaset = load_data(config.data)
        elif self.problem is not None:
            if self.data is not None:
                raise BadInput("--problem needs no --data; give one of them")
            if self.problem not in PROBLEMS:
                raise unknown_name("problem", self.problem, PROBLEMS)
            for name in ("way", "train_on", "joint"):
                if getattr(self, name) is not None:
                    raise BadInput(f"--{name.replace('_', '-')} means nothing to {self.problem}")
            config = self.resolve(1)
            folder = self.out or Path(f"runs/{config.structure.learner}-{self.problem}")
        else:
            metaset = load_data(self.data or "sample")
            config = self.resolve(metaset.dim)
            check_enough(metaset, config.way)
            default = f"runs/{config.structure.learner}-{config.way}way-{config.shot}shot"
            folder = self.out or Path(default)
        run = TrainingRun(config, folder, metaset)  # bad data says so before the folder is touched
        if self.resume:
            run.check_classes()
        else:
            create_run_folder(folder, config, self.overwrite)
        if metaset is not None:
            console.print(f"{config.data}: {metaset.describe()}")
            if told := advice(metaset, config.way):
                console.print(told)
        console.print(f"{config.title} → {folder}")
        title = config.title if metaset is None else f"{config.title}, {Path(config.data).name}"
        resume = f"go on with:\n  metaleo train --resume --out {folder}"
        state = train_with_progress(run, config.structure.learner, progress, resume)
        run.calibrate(state)
        plot_curves(
            folder / "curves.png",
            {config.structure.learner: read_metrics(folder / "metrics.jsonl")},
            title,
        )
        best = [run.named_score(float(score)) for score in state.best_score]
        shown = ", ".join(format_score(score) for score in best)
        what = next(iter(best[0])).replace("_", " ")
        console.print(f"best {what} {shown}; test it with:\n  metaleo evaluate {folder}")
        if self.json:
            fields = ("best_step", "skipped", "step")
            per_seed = [
                {"seed": seed, **best[i]} | {name: int(getattr(state, name)[i]) for name in fields}
                for i, seed in enumerate(run.seeds)
            ]
            print(json.dumps({"run": str(folder), "config": config.to_json(), "seeds": per_seed}, indent=2))
