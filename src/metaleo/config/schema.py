"""The configuration of a run: a frozen dataclass, saved with the run."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from metaleo._io.json_values import check_bounds, from_json, parse_json
from metaleo.errors import BadInput, require_at_least, require_seed
from metaleo.learners.base import HyperParams
from metaleo.learners.registry import Structure
from metaleo.tasks import PROBLEMS

Clip = Literal["global", "per-tensor"]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that determines the result of a run."""

    data: str = "sample"
    """Feature file, table, name of data in this package, or name of a problem."""
    label: str | None = None
    """Of a table, the column of the labels, if that is not `label`."""
    ignore: tuple[str, ...] = ()
    """Of a table, columns of numbers that are no part of the vector."""
    train_on: Literal["train", "train+val"] = "train"
    """Classes to learn from; train+val is the last stage of the paper's protocol."""
    way: int = 5
    """Classes per task."""
    shot: int = 1
    """Labelled examples per class."""
    ways: tuple[int, int] | None = None
    """Fewest and most classes of mixed tasks, instead of `way`, which is then that of tests."""
    shots: tuple[int, int] | None = None
    """Fewest and most labelled examples per class of mixed tasks, instead of `shot`."""
    query: int = 15
    """Query examples per class in training tasks; validation uses all other examples."""
    steps: int = 100_000
    """Meta-steps at most."""
    meta_batch: int = 12
    """Tasks per meta-step."""
    validate_every: int = 1000
    """Meta-steps between validations."""
    validation_tasks: int = 1000
    """Tasks per validation."""
    patience: int = 20
    """Validations without improvement after which the run stops early."""
    clip: Clip = "global"
    """Clip the norm of the whole meta-gradient, as in the paper, or that of each tensor, as in the authors' code."""
    decay: bool = False
    """Let the learning rate fall to zero over all steps, along half a cosine."""
    seed: int = 0
    """Seed of all randomness."""
    seeds: int = 1
    """Train this many seeds side by side, from --seed on."""
    joint: str | None = None
    """A conv-4 whose last stage is trained too, starting from its trained weights; the data are then its activations
    (`metaleo embed --layer 3 --flat`)."""
    engine: str = "auto"
    """What computes batches of tasks: reference (learners as written), closed-form (LEO's derivatives written out), or
    auto, the fastest one that can. Results are the same up to rounding."""
    structure: Structure = Structure()
    hyper: HyperParams = HyperParams()

    def check(self) -> None:
        """Raise `BadInput` for invalid values."""
        structure, hyper = self.structure, self.hyper
        check_bounds(vars(self), "TrainConfig")
        require_at_least(1, steps=self.steps)  # files of learners without training have none
        check_bounds(vars(structure), "Structure")
        require_seed(self.seed, self.seeds)
        for name, span in (("way", self.ways), ("shot", self.shots)):
            if span is not None and span[0] > span[1]:
                raise BadInput(f"{name}={span[0]}..{span[1]} must go from fewest to most: {span[1]}..{span[0]}")
        if self.ways is not None and self.ways[0] < 2:
            shown = "..".join(str(way) for way in dict.fromkeys(self.ways))
            raise BadInput(f"way={shown} must be at least 2")
        if self.joint is not None and structure.anchored:
            raise BadInput(
                "an anchor is measured on rows that stay as they are; --joint changes them: use --learner leo"
            )
        if self.mixed and not structure.anchored:
            raise BadInput(f"{structure.learner} cannot learn from tasks of many ways; leo-anchored can")
        if structure.max_grad_norm is not None and not structure.max_grad_norm > 0:
            raise BadInput(f"max_grad_norm={structure.max_grad_norm} must be above 0")
        for name in ("latent_step_size", "finetune_step_size"):
            if not math.isfinite(getattr(structure, name)):
                raise BadInput(f"{name}={getattr(structure, name)} must be a finite number")
        for name, value in vars(hyper).items():
            if not 0 <= value < float("inf"):
                raise BadInput(f"{name}={value} must be a finite number of at least 0")
        if not 0 < hyper.keep_prob <= 1:
            raise BadInput(f"keep_prob={hyper.keep_prob} must be a probability above 0")
        structure.blank()  # raises if the parts do not fit together

    @property
    def mixed(self) -> bool:
        """Whether training tasks have many ways or shots."""
        return self.ways is not None or self.shots is not None

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Fewest and most ways, and fewest and most shots."""
        return self.ways or (self.way, self.way), self.shots or (self.shot, self.shot)

    @property
    def kind(self) -> str:
        """The kind of task, in words."""
        if self.mixed:
            (ways, shots) = (str(low) if low == high else f"{low}..{high}" for low, high in self.spans)
            return f"{ways}-way {shots}-shot"
        return f"{self.shot}-shot {self.data}" if self.data in PROBLEMS else f"{self.way}-way {self.shot}-shot"

    @property
    def title(self) -> str:
        own = "" if self.structure.network == "linear" else f" ({self.structure.network})"
        return f"{self.structure.learner}{own}, {self.kind}"

    def to_json(self) -> dict[str, Any]:
        """The fields; those that are new since version 0.1 only if they are used, so that runs and studies go on."""
        optional = {"label": self.label, "ignore": list(self.ignore), "ways": self.ways, "shots": self.shots}
        unused = [name for name, value in optional.items() if not value]
        return {name: value for name, value in (dataclasses.asdict(self) | optional).items() if name not in unused}

    @classmethod
    def from_json(cls, values: Any) -> "TrainConfig":
        try:
            return from_json(cls, values)
        except BadInput as error:
            raise BadInput(f"not the configuration of a run: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "TrainConfig":
        try:
            return cls.from_json(parse_json(path.read_bytes()))
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error
        except BadInput as error:
            raise BadInput(f"cannot read {path}: {error}") from error
