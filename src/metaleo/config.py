"""What a run is made of: plain frozen records, saved with the run, and the presets they start from."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.errors import BadInput
from metaleo.learners import (
    CL2N,
    LEO,
    MAML,
    Hyper,
    Joint,
    Learner,
    LogisticRegression,
    MatchingNet,
    MetaSGD,
    NearestCentroid,
    PrototypicalNet,
    RelationNetwork,
    Reptile,
    RidgeRegression,
)
from metaleo.learners.joint import Sizes, Tail
from metaleo.model.network import Network, named
from metaleo.tasks.functions import NOISE, SinesAndLines
from metaleo.tasks.task import Tasks

ABLATIONS: dict[str, dict[str, Any]] = {
    "leo": {},
    "leo-no-finetuning": {"finetune_steps": 0},
    "leo-deterministic": {"stochastic": False},
    "leo-random-prior": {"random_prior": True},
    "leo-generator-finetuned": {"latent_steps": 0},
    "leo-generator": {"latent_steps": 0, "finetune_steps": 0},
}
"""LEO and the paper's ablations of it (Table 2): what each switches."""
LEARNERS = (
    *ABLATIONS,
    "maml",
    "fomaml",
    "meta-sgd",
    "reptile",
    "prototypical",
    "matching",
    "relation",
    "ridge",
    "nearest-centroid",
    "cl2n",
    "logistic-regression",
)
GENERAL = (*ABLATIONS, "maml", "fomaml", "meta-sgd", "reptile")
"""Learners of any network's parameters."""
UNTRAINED = ("nearest-centroid", "cl2n", "logistic-regression")
"""Learners with nothing to meta-train."""
PROBLEMS: dict[str, Callable[[int, int], Tasks]] = {"sines-and-lines": SinesAndLines}
"""Tasks that need no data, by shot and query."""
Clip = Literal["global", "per-tensor"]


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a learner is, apart from what it has learned. Static: a change compiles anew."""

    learner: str = "leo"
    dim: int = 640
    """Numbers per feature vector."""
    way: int = 5
    """Classes of a training task; MAML and Meta-SGD keep a row of weights for each."""
    latent: int = 64
    """Size of a code (n_z)."""
    latent_steps: int = 5
    """Gradient steps on the codes."""
    finetune_steps: int = 5
    """Gradient steps on the weights: LEO's last ones, all of MAML's and Meta-SGD's."""
    latent_step_size: float | Float[Array, "*runs"] = 1.0
    """Where the learned step sizes for codes start."""
    finetune_step_size: float | Float[Array, "*runs"] = 0.001
    """Where the learned step sizes for weights start; for MAML the step size itself."""
    official: bool = False
    """LEO's scales and KL estimate exactly as in the authors' code."""
    network: str = "linear"
    """f_θ, what is generated or descended on: linear, mlp or gru."""
    hidden: int = 40
    """Units of each hidden layer of an mlp, or of the state of a gru."""
    layers: int = 3
    """Layers of an mlp."""
    channels: int = 3
    """Numbers that a gru reads at a time."""
    codes: Literal["class", "task"] = "class"
    """A code, and a network, for each class; or one for the task, whose targets the encoder sees too."""
    noise: float | None = None
    """Standard deviation of the noise on real targets; none where targets are classes."""
    width: int = 0
    """Units of the two hidden layers of LEO's encoder and decoder; 0: both are linear."""
    from_start: bool = False
    """LEO adds what it decodes to learned parameters."""
    limit: float | None = None
    """On the length of each inner gradient, where network or decoder are not linear."""
    samples: int = 1
    """Solutions of a training task that LEO samples and is judged on together."""
    tail: Sizes | None = None
    """Of the backbone's last stage where it is learned too: height, width, channels in and out. It takes rows as
    they are; all other learners take them normalised."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Structure":
        tail = values.get("tail")
        return cls(**{**values, "tail": tuple(tail) if tail else None})

    @property
    def normalised(self) -> bool:
        """Whether the learner takes rows at length one."""
        return self.tail is None and self.network != "gru" and self.noise is None

    def generated(self) -> Network:
        """f_θ."""
        if self.noise is not None and self.codes == "class":
            raise BadInput("a code per class needs classes; functions have one code (--codes task)")
        targets = None if self.codes == "class" else self.way if self.noise is None else 1
        return named(self.network, self.dim, hidden=self.hidden, layers=self.layers, channels=self.channels,
                     targets=targets, noise=self.noise)  # fmt: skip

    def init(self, key: PRNGKeyArray) -> Learner:
        """A fresh learner."""
        if self.learner not in GENERAL and (self.network, self.codes) != ("linear", "class"):
            raise BadInput(f"{self.learner} has no network to choose; {', '.join(GENERAL)} do")
        if self.tail is not None:
            tail_key, key = jax.random.split(key)
            inner = dataclasses.replace(self, dim=self.tail[-1], tail=None)
            return Joint(Tail.init(tail_key, self.tail), inner.init(key))
        steps = {"way": self.way, "step_size": self.finetune_step_size, "num_steps": self.finetune_steps,
                 "limit": self.limit}  # fmt: skip
        match self.learner:
            case name if name in ABLATIONS:
                settings = {
                    "latent": self.latent,
                    "latent_steps": self.latent_steps,
                    "finetune_steps": self.finetune_steps,
                    "latent_step_size": self.latent_step_size,
                    "finetune_step_size": self.finetune_step_size,
                    "official": self.official,
                    "widths": (self.width,) * 2 if self.width else (),
                    "from_start": self.from_start,
                    "samples": self.samples,
                    "limit": self.limit,
                }
                return LEO.init(key, self.generated(), **{**settings, **ABLATIONS[name]})
            case "maml":
                return MAML.init(self.generated(), **steps)
            case "fomaml":
                return MAML.init(self.generated(), first_order=True, **steps)
            case "meta-sgd":
                return MetaSGD.init(self.generated(), **steps)
            case "reptile":
                return Reptile.init(self.generated(), **steps)
            case "prototypical":
                return PrototypicalNet.init(key, self.dim)
            case "matching":
                return MatchingNet.init(key, self.dim)
            case "relation":
                return RelationNetwork.init(key, self.dim, hidden=2 * self.latent)  # as in LEO's relation net
            case "ridge":
                return RidgeRegression.init(key, self.dim)
            case "nearest-centroid":
                return NearestCentroid()
            case "cl2n":
                return CL2N.init(key, self.dim)
            case "logistic-regression":
                return LogisticRegression()
        raise BadInput(f"unknown learner {self.learner!r}; known are {', '.join(LEARNERS)}")

    def blank(self) -> Learner:
        """A learner whose leaves are shapes only, to be filled from a file."""
        return jax.eval_shape(self.init, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result of a run."""

    data: str = "sample"
    train_on: str = "train"
    way: int = 5
    shot: int = 1
    query: int = 15
    steps: int = 100_000
    meta_batch: int = 12
    validate_every: int = 1000
    validation_tasks: int = 1000
    patience: int = 20
    clip: Clip = "global"
    decay: bool = False
    """The learning rate falls to zero over all steps, along half a cosine."""
    seed: int = 0
    seeds: int = 1
    joint: str | None = None
    """The network whose last stage is learned too, from where it is."""
    engine: str = "auto"
    """What computes batches of tasks (`metaleo.engines`): to rounding the result is the same."""
    structure: Structure = Structure()
    hyper: Hyper = Hyper()

    @property
    def kind(self) -> str:
        """Of task, in words."""
        return f"{self.shot}-shot {self.data}" if self.data in PROBLEMS else f"{self.way}-way {self.shot}-shot"

    @property
    def title(self) -> str:
        own = "" if self.structure.network == "linear" else f" ({self.structure.network})"
        return f"{self.structure.learner}{own}, {self.kind}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainConfig":
        try:
            return cls(
                **{
                    **values,
                    "structure": Structure.from_json(values["structure"]),
                    "hyper": Hyper(**values["hyper"]),
                }
            )
        except (TypeError, KeyError) as error:
            raise BadInput(f"not the configuration of a run: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "TrainConfig":
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError) as error:
            raise BadInput(f"cannot read {path}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Preset:
    """Hyper-parameters that belong together, and where they come from."""

    origin: str
    shot: int
    hyper: Hyper
    structure: Structure = Structure()
    clip: Clip = "global"
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other fields of a run that belong to it."""


def paper(dataset: str, shot: int, *values: float) -> Preset:
    """A column of the paper's Table 6: η, γ, β, λ₁, λ₂, p_keep."""
    eta, gamma, beta, lambda1, lambda2, keep = values
    hyper = Hyper(eta, kl=beta, encoder_penalty=gamma, l2=lambda1, orthogonality=lambda2, keep=keep)
    return Preset(f"the paper's Table 6, {dataset}, {shot}-shot", shot, hyper)


def official(dataset: str, shot: int, *values: float) -> Preset:
    """A column of the authors' README: learning rate, L2, orthogonality, dropout rate, KL, encoder penalty."""
    rate, l2, orthogonality, dropout, kl, penalty = values
    hyper = Hyper(rate, kl=kl, encoder_penalty=penalty, l2=l2, orthogonality=orthogonality, keep=1 - dropout)
    origin = f"the README of the authors' code, {dataset}, {shot}-shot"
    return Preset(origin, shot, hyper, Structure(official=True), "per-tensor")


SINES = Structure(dim=1, network="mlp", hidden=40, layers=3, codes="task", noise=NOISE)
"""f_θ of Appendix A.2: 1,761 parameters."""
FUNCTION_TRAINING = {"meta_batch": 64, "query": 20, "steps": 20_000, "decay": True, "patience": 1000}
PRESETS: dict[str, Preset] = {
    "paper-mini-1shot": paper(
        "miniImageNet", 1, 0.00043653954, 1.33365371e-09, 0.124171967, 0.000108982953, 303.216647, 0.711524088
    ),
    "paper-mini-5shot": paper(
        "miniImageNet",
        5,
        0.00117573555,
        5.39245830e-06,
        0.0440372182,
        3.75922509e-06,
        0.00844225971,
        0.755402644,
    ),
    "paper-tiered-1shot": paper(
        "tieredImageNet",
        1,
        0.00040645397,
        1.24305386e-08,
        7.10800960e-06,
        3.10725285e-08,
        5180.09554,
        0.644395979,
    ),
    "paper-tiered-5shot": paper(
        "tieredImageNet",
        5,
        0.00073469522,
        3.05077069e-06,
        0.00188644980,
        4.90658551e-08,
        0.0081711619,
        0.628325359,
    ),
    "official-mini-1shot": official(
        "miniImageNet", 1, 2.739071e-4, 3.623413e-10, 0.188103, 0.307651, 0.756143, 5.756821e-6
    ),
    "official-mini-5shot": official(
        "miniImageNet", 5, 4.102361e-4, 8.540338e-9, 1.523998e-3, 0.300299, 0.466387, 2.661608e-7
    ),
    "official-tiered-1shot": official(
        "tieredImageNet", 1, 8.659053e-4, 4.148858e-10, 5.451078e-3, 0.475126, 2.034189e-3, 8.302962e-5
    ),
    "official-tiered-5shot": official(
        "tieredImageNet", 5, 6.110314e-4, 1.690399e-10, 2.481216e-2, 0.415158, 1.622811, 2.672450e-5
    ),
    "metaleo-mini-1shot": Preset(
        "the search of `metaleo reproduce` on this project's miniImageNet features (docs/results.md), 1-shot",
        1,
        Hyper(3.25e-4, kl=2.81e-3, encoder_penalty=4.5e-7, l2=1.39e-4, orthogonality=22.1, keep=0.609),
    ),
    "metaleo-mini-5shot": Preset(
        "the search of `metaleo reproduce` on this project's miniImageNet features (docs/results.md), 5-shot",
        5,
        Hyper(1.5e-3, kl=6.24e-2, encoder_penalty=5.53e-8, l2=1.32e-9, orthogonality=1.49e-3, keep=0.448),
    ),
    "metaleo-best-1shot": Preset(
        "a search of 32 trials on miniImageNet features of `--recipe best` (docs/features.md), 1-shot",
        1,
        Hyper(2.56e-3, kl=1.04e-5, encoder_penalty=9.04e-8, l2=2.02e-6, orthogonality=7.51, keep=0.158),
    ),
    "metaleo-best-5shot": Preset(
        "a search of 32 trials on miniImageNet features of `--recipe best` (docs/features.md), 5-shot",
        5,
        Hyper(2.34e-3, kl=2.2e-3, encoder_penalty=1.11e-9, l2=2.45e-5, orthogonality=1650.0, keep=0.118),
        Structure(finetune_step_size=3.0),
    ),
    "intents-1shot": Preset(
        "by hand, by validation accuracy on sentences of unseen domains (docs/guides/text.md)",
        1,
        Hyper(5e-4, kl=2.2e-3, encoder_penalty=1.11e-9, l2=3e-3, orthogonality=1650.0, keep=0.6),
        Structure(finetune_step_size=3.0),
        training={"steps": 750, "validate_every": 250},
    ),
    "omniglot-1shot": Preset(
        "by hand, by validation accuracy on conv-4 features of the drawings in this package",
        1,
        Hyper(3e-4, kl=0.1, encoder_penalty=1e-6, l2=1e-2, orthogonality=1e-2, keep=0.5),
        Structure(latent_step_size=0.1, finetune_step_size=3.0),
    ),
    "meta-sgd": Preset(
        "the search of `metaleo reproduce` on this project's miniImageNet features (docs/results.md), 1-shot",
        1,
        Hyper(3.04e-3, kl=0.0, encoder_penalty=0.0, l2=7.29e-6, orthogonality=0.0, keep=0.4),
        Structure(learner="meta-sgd", finetune_step_size=1.78),
    ),
    "maml": Preset(
        "by hand, near Meta-SGD's, with one fixed step size",
        1,
        Hyper(2e-3, kl=0.0, encoder_penalty=0.0, l2=5e-5, orthogonality=0.0, keep=0.4),
        Structure(learner="maml", finetune_step_size=2.0),
    ),
    "sines-and-lines": Preset(
        "a prototype's searches (docs/regression.md)",
        5,
        Hyper(1e-3, kl=1.0, encoder_penalty=1e-4, l2=1e-6, orthogonality=1e-3, keep=1.0),
        dataclasses.replace(
            SINES,
            latent=16,
            width=32,
            latent_steps=5,
            finetune_steps=0,
            latent_step_size=5.4e-4,
            finetune_step_size=5.4e-5,
            limit=55.6,
        ),
        training=FUNCTION_TRAINING,
    ),
    "sines-and-lines-meta-sgd": Preset(
        "a prototype's searches (docs/regression.md)",
        5,
        Hyper(3e-4, kl=0.0, encoder_penalty=0.0, l2=0.0, orthogonality=0.0, keep=1.0),
        dataclasses.replace(SINES, learner="meta-sgd", finetune_step_size=1.8e-4, limit=100.0),
        training=FUNCTION_TRAINING,
    ),
    "sines-and-lines-maml": Preset(
        "a prototype's searches (docs/regression.md)",
        5,
        Hyper(1e-2, kl=0.0, encoder_penalty=0.0, l2=0.0, orthogonality=0.0, keep=1.0),
        dataclasses.replace(SINES, learner="maml", finetune_step_size=5.4e-4, limit=556.0),
        training=FUNCTION_TRAINING,
    ),
    "strokes": Preset(
        "by hand, by validation accuracy on the pen strokes in this package (docs/networks.md)",
        1,
        Hyper(1e-3, kl=1e-3, encoder_penalty=1e-6, l2=1e-5, orthogonality=1e-3, keep=1.0),
        Structure(
            network="gru",
            hidden=16,
            channels=6,
            latent=32,
            latent_steps=3,
            finetune_steps=1,
            latent_step_size=0.1,
            finetune_step_size=0.01,
            from_start=True,
            limit=10.0,
        ),
        training={"meta_batch": 32, "steps": 5000, "validate_every": 500, "decay": True},
    ),
    "mlp-head": Preset(
        "metaleo-mini-1shot with another head, by hand (docs/networks.md)",
        1,
        Hyper(3.25e-4, kl=2.81e-3, encoder_penalty=4.5e-7, l2=1.39e-4, orthogonality=22.1, keep=0.609),
        Structure(
            network="mlp",
            hidden=16,
            layers=2,
            latent_step_size=0.3,
            finetune_step_size=0.01,
            from_start=True,
            limit=10.0,
        ),
    ),
    "embedding": Preset(
        "random searches of 32 trials on this project's miniImageNet features (docs/results.md)",
        1,
        Hyper(1e-4, kl=0.0, encoder_penalty=0.0, l2=4e-4, orthogonality=0.0, keep=0.8),
        Structure(learner="ridge"),
    ),
    "relation": Preset(
        "random searches of 32 trials on this project's miniImageNet features (docs/results.md)",
        1,
        Hyper(1.3e-4, kl=0.0, encoder_penalty=0.0, l2=1e-2, orthogonality=0.0, keep=0.5),
        Structure(learner="relation"),
    ),
}


def find_preset(name: str | None, learner: str, shot: int | None, problem: str | None = None) -> Preset:
    """The preset of this name, or in this file; without a name, the one for this learner and shot, or problem."""
    if name is not None and name.endswith(".json"):
        found = TrainConfig.read(Path(name))
        return Preset(name, found.shot, found.hyper, found.structure, found.clip)
    if name is None and problem is not None:
        name = problem if learner in ABLATIONS else f"{problem}-{'meta-sgd' if learner == 'meta-sgd' else 'maml'}"
    if name is None:
        few = "1shot" if (shot or 1) < 5 else "5shot"
        own = {"meta-sgd": "meta-sgd", "maml": "maml", "fomaml": "maml", "reptile": "maml", "relation": "relation"}
        name = f"metaleo-mini-{few}" if learner in ABLATIONS else own.get(learner, "embedding")
    if name not in PRESETS:
        raise BadInput(f"unknown preset {name!r}; known are {', '.join(PRESETS)}, and best.json of a search")
    return PRESETS[name]
