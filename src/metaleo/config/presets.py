"""Presets: sets of hyper-parameters, and how to derive a run's configuration from one."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from metaleo.config.schema import Clip, TrainConfig
from metaleo.data.feature_files import BUILTIN
from metaleo.engines import choose_engine
from metaleo.errors import BadInput, unknown_name
from metaleo.features.backbone_files import load_backbone
from metaleo.learners.base import HyperParams
from metaleo.learners.joint import Sizes, Tail
from metaleo.learners.registry import ABLATIONS, ANCHORED, LEARNERS, UNTRAINED, Structure
from metaleo.tasks.sines_and_lines import NOISE


@dataclasses.dataclass(frozen=True)
class Preset:
    """A set of hyper-parameters and its origin."""

    origin: str
    shot: int
    hyper: HyperParams
    structure: Structure = Structure()
    clip: Clip = "global"
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other fields of `TrainConfig` that the preset sets."""


def paper(dataset: str, shot: int, *values: float) -> Preset:
    """A column of the paper's Table 6: η, γ, β, λ₁, λ₂, p_keep."""
    eta, gamma, beta, lambda1, lambda2, keep_prob = values
    hyper = HyperParams(eta, kl=beta, encoder_penalty=gamma, l2=lambda1, orthogonality=lambda2, keep_prob=keep_prob)
    return Preset(f"the paper's Table 6, {dataset}, {shot}-shot", shot, hyper)


def official(dataset: str, shot: int, *values: float) -> Preset:
    """A column of the authors' README: learning rate, L2, orthogonality, dropout rate, KL, encoder penalty."""
    rate, l2, orthogonality, dropout, kl, penalty = values
    hyper = HyperParams(rate, kl=kl, encoder_penalty=penalty, l2=l2, orthogonality=orthogonality, keep_prob=1 - dropout)
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
        HyperParams(3.25e-4, kl=2.81e-3, encoder_penalty=4.5e-7, l2=1.39e-4, orthogonality=22.1, keep_prob=0.609),
    ),
    "metaleo-mini-5shot": Preset(
        "the search of `metaleo reproduce` on this project's miniImageNet features (docs/results.md), 5-shot",
        5,
        HyperParams(1.5e-3, kl=6.24e-2, encoder_penalty=5.53e-8, l2=1.32e-9, orthogonality=1.49e-3, keep_prob=0.448),
    ),
    "metaleo-best-1shot": Preset(
        "a search of 32 trials on miniImageNet features of `--recipe best` (docs/results-features.md), 1-shot",
        1,
        HyperParams(2.56e-3, kl=1.04e-5, encoder_penalty=9.04e-8, l2=2.02e-6, orthogonality=7.51, keep_prob=0.158),
    ),
    "metaleo-best-5shot": Preset(
        "a search of 32 trials on miniImageNet features of `--recipe best` (docs/results-features.md), 5-shot",
        5,
        HyperParams(2.34e-3, kl=2.2e-3, encoder_penalty=1.11e-9, l2=2.45e-5, orthogonality=1650.0, keep_prob=0.118),
        Structure(finetune_step_size=3.0),
    ),
    "intents-1shot": Preset(
        "by hand, by validation accuracy on sentences of unseen domains (docs/results-text.md)",
        1,
        HyperParams(5e-4, kl=2.2e-3, encoder_penalty=1.11e-9, l2=3e-3, orthogonality=1650.0, keep_prob=0.6),
        Structure(finetune_step_size=3.0),
        training={"steps": 750, "validate_every": 250},
    ),
    "omniglot-1shot": Preset(
        "by hand, by validation accuracy on conv-4 features of the drawings in this package",
        1,
        HyperParams(3e-4, kl=0.1, encoder_penalty=1e-6, l2=1e-2, orthogonality=1e-2, keep_prob=0.5),
        Structure(latent_step_size=0.1, finetune_step_size=3.0),
    ),
    "meta-sgd": Preset(
        "the search of `metaleo reproduce` on this project's miniImageNet features (docs/results.md), 1-shot",
        1,
        HyperParams(3.04e-3, kl=0.0, encoder_penalty=0.0, l2=7.29e-6, orthogonality=0.0, keep_prob=0.4),
        Structure(learner="meta-sgd", finetune_step_size=1.78),
    ),
    "maml": Preset(
        "by hand, near Meta-SGD's, with one fixed step size",
        1,
        HyperParams(2e-3, kl=0.0, encoder_penalty=0.0, l2=5e-5, orthogonality=0.0, keep_prob=0.4),
        Structure(learner="maml", finetune_step_size=2.0),
    ),
    "sines-and-lines": Preset(
        "a prototype's searches (docs/results-functions.md)",
        5,
        HyperParams(1e-3, kl=1.0, encoder_penalty=1e-4, l2=1e-6, orthogonality=1e-3, keep_prob=1.0),
        dataclasses.replace(
            SINES,
            latent=16,
            width=32,
            latent_steps=5,
            finetune_steps=0,
            latent_step_size=5.4e-4,
            finetune_step_size=5.4e-5,
            max_grad_norm=55.6,
        ),
        training=FUNCTION_TRAINING,
    ),
    "sines-and-lines-meta-sgd": Preset(
        "a prototype's searches (docs/results-functions.md)",
        5,
        HyperParams(3e-4, kl=0.0, encoder_penalty=0.0, l2=0.0, orthogonality=0.0, keep_prob=1.0),
        dataclasses.replace(SINES, learner="meta-sgd", finetune_step_size=1.8e-4, max_grad_norm=100.0),
        training=FUNCTION_TRAINING,
    ),
    "sines-and-lines-maml": Preset(
        "a prototype's searches (docs/results-functions.md)",
        5,
        HyperParams(1e-2, kl=0.0, encoder_penalty=0.0, l2=0.0, orthogonality=0.0, keep_prob=1.0),
        dataclasses.replace(SINES, learner="maml", finetune_step_size=5.4e-4, max_grad_norm=556.0),
        training=FUNCTION_TRAINING,
    ),
    "strokes": Preset(
        "by hand, by validation accuracy on the pen strokes in this package (docs/results-networks.md)",
        1,
        HyperParams(1e-3, kl=1e-3, encoder_penalty=1e-6, l2=1e-5, orthogonality=1e-3, keep_prob=1.0),
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
            max_grad_norm=10.0,
        ),
        training={"meta_batch": 32, "steps": 5000, "validate_every": 500, "decay": True},
    ),
    "mlp-head": Preset(
        "metaleo-mini-1shot with another head, by hand (docs/results-networks.md)",
        1,
        HyperParams(3.25e-4, kl=2.81e-3, encoder_penalty=4.5e-7, l2=1.39e-4, orthogonality=22.1, keep_prob=0.609),
        Structure(
            network="mlp",
            hidden=16,
            layers=2,
            latent_step_size=0.3,
            finetune_step_size=0.01,
            from_start=True,
            max_grad_norm=10.0,
        ),
    ),
    "anchored": Preset(
        "by hand, by validation accuracy on miniImageNet features and on intents (docs/results-anchored.md)",
        1,
        HyperParams(3e-4, kl=1e-2, encoder_penalty=1e-9, l2=1e-6, orthogonality=0.0, keep_prob=0.6),
        Structure(learner="leo-anchored", latent_steps=3, latent_step_size=0.1, finetune_steps=0),
        training={
            "steps": 200,
            "validate_every": 50,
            "validation_tasks": 300,
            "decay": True,
            "ways": (2, 20),
            "shots": (1, 20),
        },
    ),
    "embedding": Preset(
        "random searches of 32 trials on this project's miniImageNet features (docs/results.md)",
        1,
        HyperParams(1e-4, kl=0.0, encoder_penalty=0.0, l2=4e-4, orthogonality=0.0, keep_prob=0.8),
        Structure(learner="ridge"),
    ),
    "relation": Preset(
        "random searches of 32 trials on this project's miniImageNet features (docs/results.md)",
        1,
        HyperParams(1.3e-4, kl=0.0, encoder_penalty=0.0, l2=1e-2, orthogonality=0.0, keep_prob=0.5),
        Structure(learner="relation"),
    ),
    "metaqda": Preset(
        "by hand, by validation accuracy on the sample in this package after 500 steps, 1-shot",
        1,
        HyperParams(1e-3, kl=0.0, encoder_penalty=0.0, l2=4e-3, orthogonality=0.0, keep_prob=0.8),
        Structure(learner="metaqda"),
    ),
    "protomaml": Preset(
        "by hand, by validation accuracy on the sample in this package after 500 steps, 1-shot; longer inner steps "
        "diverge with more examples",
        1,
        HyperParams(3e-4, kl=0.0, encoder_penalty=0.0, l2=4e-4, orthogonality=0.0, keep_prob=0.8),
        Structure(learner="protomaml", finetune_step_size=1.0),
    ),
}


def find_preset(name: str | None, learner: str, shot: int | None, problem: str | None = None) -> Preset:
    """The preset of this name or JSON file; without a name, the default for this learner and shot, or problem."""
    if name is not None and name.endswith(".json"):
        found = TrainConfig.read(Path(name))
        return Preset(name, found.shot, found.hyper, found.structure, found.clip)
    if name is None and problem is not None:
        name = problem if learner in ABLATIONS else f"{problem}-{'meta-sgd' if learner == 'meta-sgd' else 'maml'}"
    if name is None:
        few = "1shot" if (shot or 1) < 5 else "5shot"
        own = {"fomaml": "maml", "reptile": "maml", ANCHORED: "anchored"}
        own |= {name: name for name in ("meta-sgd", "maml", "relation", "metaqda", "protomaml")}
        name = f"metaleo-mini-{few}" if learner in ABLATIONS else own.get(learner, "embedding")
    if name not in PRESETS:
        raise unknown_name("preset", name, (*PRESETS, "best.json of a search"))
    return PRESETS[name]


def default_config(
    learner: str | None = None, shot: int | None = None, *, preset: str | None = None, problem: str | None = None
) -> TrainConfig:
    """The configuration before anything else is said: defaults, overridden by the preset for this learner and shot.

    Args:
        learner: Name of a learner; by default the preset's, or LEO.
        shot: Labelled examples per class, which may decide the preset; by default the preset's.
        preset: Name of a preset, or a file from a search; by default the preset for the learner and shot.
        problem: Name of a problem in `PROBLEMS`, instead of data.

    Returns:
        A configuration that is neither checked nor fitted to data.
    """
    learner = learner or (find_preset(preset, "leo", None).structure.learner if preset else "leo")
    if learner not in LEARNERS:
        raise unknown_name("learner", learner, LEARNERS)
    if learner in UNTRAINED:
        raise BadInput(f"{learner} has nothing to learn; `metaleo compare --learner {learner}` tests it")
    found = find_preset(preset, learner, shot, problem)
    structure = found.structure
    if (structure.noise is None) != (problem is None):
        fits = "classes" if structure.noise is None else "functions"
        raise BadInput(f"the preset is for tasks of {fits}; leave `preset=` out for the one that fits")
    if structure.learner != learner and problem is None and structure.network == "linear":
        structure = find_preset(None, learner, shot).structure
    values = {"shot": found.shot if shot is None else shot, "clip": found.clip, **found.training}
    values |= {} if problem is None else {"data": problem}
    return TrainConfig(**values, structure=dataclasses.replace(structure, learner=learner), hyper=found.hyper)


def resolve_config(dim: int, *, preset: str | None = None, problem: str | None = None, **given: Any) -> TrainConfig:
    """The complete configuration of a run: that of `default_config`, overridden by `given`.

    Args:
        dim: Numbers per example.
        preset: Name of a preset, or a file from a search; by default the preset for the learner and shot.
        problem: Name of a problem in `PROBLEMS`, instead of data.
        given: Fields of `TrainConfig`, `Structure` or `HyperParams`.

    Returns:
        A checked configuration, with the engine that will compute it.
    """
    config = default_config(given.pop("learner", None), given.get("shot"), preset=preset, problem=problem)
    if problem is not None:
        given["data"] = problem
    elif given.get("data") not in (None, *BUILTIN):
        given["data"] = str(Path(given["data"]).resolve())  # so that a run can be resumed from anywhere
    tail = None
    if given.get("joint") is not None:
        given["joint"] = str(Path(given["joint"]).resolve())
        tail = tail_sizes(given["joint"], dim)

    def fields(kind: type) -> dict[str, Any]:
        return {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}

    unknown = set(given) - {f.name for kind in (TrainConfig, Structure, HyperParams) for f in dataclasses.fields(kind)}
    if unknown:
        raise TypeError(f"a run has no {min(unknown)}")
    config = dataclasses.replace(config, **fields(TrainConfig))
    config = dataclasses.replace(
        config,
        structure=dataclasses.replace(
            config.structure, **{**fields(Structure), "dim": dim, "way": config.way, "tail": tail}
        ),
        hyper=dataclasses.replace(config.hyper, **fields(HyperParams)),
    )
    config.check()
    return dataclasses.replace(config, engine=choose_engine(config.structure.blank(), config.engine).name)


def tail_sizes(backbone: str, dim: int) -> Sizes:
    """The sizes of a backbone's last stage, which is trained jointly."""
    sizes = Tail.of(load_backbone(Path(backbone))).sizes
    if math.prod(sizes[:3]) != dim:
        raise BadInput(
            f"the last stage of {backbone} takes {' x '.join(map(str, sizes[:3]))} numbers, the data have {dim}; "
            f"make them with `metaleo embed {backbone} --layer 3 --flat`"
        )
    return sizes
