"""Learners by name, and the settings that define each.

A new learner needs a case in `Structure.init` and its name in `LEARNERS`.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo._io.json_values import from_json
from metaleo.errors import BadInput, unknown_name
from metaleo.learners.anchor import Anchor
from metaleo.learners.base import Learner
from metaleo.learners.joint import Joint, Sizes, Tail
from metaleo.learners.leo import LEO
from metaleo.learners.linear import LogisticRegression, RidgeRegression
from metaleo.learners.maml import MAML, MetaSGD, ProtoMAML, Reptile
from metaleo.learners.metric import CL2N, FEAT, MatchingNet, NearestCentroid, PrototypicalNet, RelationNetLearner
from metaleo.learners.quadratic import MetaQDA
from metaleo.nn.heads import Network, affine_network, named_network

ABLATIONS: dict[str, dict[str, Any]] = {
    "leo": {},
    "leo-no-finetuning": {"finetune_steps": 0},
    "leo-deterministic": {"stochastic": False},
    "leo-random-prior": {"random_prior": True},
    "leo-generator-finetuned": {"latent_steps": 0},
    "leo-generator": {"latent_steps": 0, "finetune_steps": 0},
}
"""LEO and its ablations in the paper (Table 2), with the options that each changes."""
ANCHORED = "leo-anchored"
"""LEO that starts from a classifier in closed form instead of from nothing."""
LEARNERS = (
    *ABLATIONS,
    ANCHORED,
    "maml",
    "fomaml",
    "meta-sgd",
    "reptile",
    "protomaml",
    "prototypical",
    "matching",
    "relation",
    "feat",
    "ridge",
    "metaqda",
    "nearest-centroid",
    "cl2n",
    "logistic-regression",
)
NETWORK_LEARNERS = (*ABLATIONS, "maml", "fomaml", "meta-sgd", "reptile")
"""Learners that generate or adapt the parameters of any network."""
UNTRAINED = ("nearest-centroid", "cl2n", "logistic-regression")
"""Learners with nothing to meta-train."""
UNTRAINED_TEMPERATURES: dict[str, list[tuple[int, float]]] = {
    "nearest-centroid": [(1, 0.664), (2, 0.454), (5, 0.303), (10, 0.247)],
    "cl2n": [(1, 0.664), (2, 0.409), (5, 0.253), (10, 0.201)],
    "logistic-regression": [(1, 0.127), (2, 0.151), (5, 0.205), (10, 0.258)],
}
"""Their temperatures by shots, on validation tasks of the packaged sample and intents: tools/choose_untrained.py."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """Settings that define a learner, without what it has learned. Static: a change triggers recompilation."""

    learner: str = "leo"
    dim: int = 640
    """Numbers per feature vector."""
    way: int = 5
    """Classes per training task; MAML and Meta-SGD learn a row of weights for each."""
    latent: int = 64
    """Size of a code (n_z)."""
    latent_steps: int = 5
    """Gradient steps on the codes."""
    finetune_steps: int = 5
    """Gradient steps on the weights: LEO's fine-tuning steps, all steps of MAML, Meta-SGD and Proto-MAML."""
    latent_step_size: float | Float[Array, "*runs"] = 1.0
    """Initial value of the learned step sizes for codes."""
    finetune_step_size: float | Float[Array, "*runs"] = 0.001
    """Initial value of the learned step sizes for weights; for MAML, the step size itself."""
    official: bool = False
    """Compute LEO's scales and KL estimate exactly as the authors' code does (docs/deviations.md)."""
    network: Literal["linear", "mlp", "gru"] = "linear"
    """The network f_θ that is generated or adapted: linear, an MLP, or a GRU that reads a row as a sequence."""
    hidden: int = 40
    """Units of each hidden layer of an mlp, or of the state of a gru."""
    layers: int = 3
    """Layers of an mlp."""
    channels: int = 3
    """Numbers that a gru reads per time step."""
    codes: Literal["class", "task"] = "class"
    """One code and one network per class; or one for the whole task, where the encoder also sees the targets."""
    noise: float | None = None
    """Standard deviation of the noise on real-valued targets; None if targets are classes."""
    width: int = 0
    """Units of each of the two hidden layers in LEO's encoder and decoder; 0 makes both linear."""
    from_start: bool = False
    """Let LEO add the decoded parameters to a learned start."""
    max_grad_norm: float | None = None
    """Maximum norm of each inner gradient; useful if network or decoder are not linear."""
    samples: int = 1
    """Solutions that LEO samples per training task and scores jointly."""
    anchor: Literal["centroid", "ridge", "logistic"] | None = None
    """What leo-anchored adds decoded weights to: centroids with a prior, then nothing, one step of regression or forty;
    by default logistic."""
    tail: Sizes | None = None
    """Sizes of the backbone's last stage, if it is learned too: height, width, channels in and out. Its rows are not
    normalised (see `normalised`)."""

    OLD_NAMES: ClassVar = {"limit": "max_grad_norm"}
    """Names of fields in files of version 0.1."""

    @classmethod
    def from_json(cls, values: Any) -> "Structure":
        """From the header of a file."""
        return from_json(cls, values, "structure")

    @property
    def normalised(self) -> bool:
        """Whether the learner takes rows scaled to length one."""
        return self.tail is None and self.network != "gru" and self.noise is None

    @property
    def anchored(self) -> bool:
        """Whether the learner has an anchor. It also gives classes without examples no probability, so that it may be
        trained on tasks of many ways."""
        return self.learner == ANCHORED

    def generated(self) -> Network:
        """The network f_θ."""
        if self.learner == ANCHORED:
            return affine_network(self.dim)
        if self.noise is not None and self.codes == "class":
            raise BadInput("a code per class needs classes; functions have one code (codes=task)")
        targets = None if self.codes == "class" else self.way if self.noise is None else 1
        return named_network(self.network, self.dim, hidden=self.hidden, layers=self.layers, channels=self.channels,
                     targets=targets, noise=self.noise)  # fmt: skip

    def init(self, key: PRNGKeyArray) -> Learner:
        """A new, untrained learner."""
        if self.learner not in NETWORK_LEARNERS and (self.network, self.codes) != ("linear", "class"):
            raise BadInput(f"{self.learner} has no network to choose; {', '.join(NETWORK_LEARNERS)} do")
        if self.anchor is not None and self.learner != ANCHORED:
            raise BadInput(f"{self.learner} has no anchor; {ANCHORED} has")
        if self.tail is not None:
            if self.dim != math.prod(self.tail[:3]):
                raise BadInput(f"rows of {self.dim} numbers are no images of {' x '.join(map(str, self.tail[:3]))}")
            tail_key, key = jax.random.split(key)
            inner = dataclasses.replace(self, dim=self.tail[-1], tail=None)
            return Joint(Tail.init(tail_key, self.tail), inner.init(key))
        steps = {"way": self.way, "step_size": self.finetune_step_size, "num_steps": self.finetune_steps,
                 "max_grad_norm": self.max_grad_norm}  # fmt: skip
        match self.learner:
            case name if name in (*ABLATIONS, ANCHORED):
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
                    "max_grad_norm": self.max_grad_norm,
                }
                if name == ANCHORED:
                    settings["anchor"] = Anchor.blank(self.anchor or "logistic", self.dim)
                return LEO.init(key, self.generated(), **{**settings, **ABLATIONS.get(name, {})})
            case "maml":
                return MAML.init(self.generated(), **steps)
            case "fomaml":
                return MAML.init(self.generated(), first_order=True, **steps)
            case "meta-sgd":
                return MetaSGD.init(self.generated(), **steps)
            case "reptile":
                return Reptile.init(self.generated(), **steps)
            case "protomaml":
                sizes = {name: value for name, value in steps.items() if name != "way"}
                return ProtoMAML.init(key, self.dim, **sizes)
            case "prototypical":
                return PrototypicalNet.init(key, self.dim)
            case "matching":
                return MatchingNet.init(key, self.dim)
            case "relation":
                return RelationNetLearner.init(key, self.dim, hidden=2 * self.latent)  # as in LEO's relation net
            case "feat":
                return FEAT.init(key, self.dim)
            case "ridge":
                return RidgeRegression.init(key, self.dim)
            case "metaqda":
                return MetaQDA.init(key, self.dim)
            case "nearest-centroid":
                return NearestCentroid()
            case "cl2n":
                return CL2N.init(key, self.dim)
            case "logistic-regression":
                return LogisticRegression()
        raise unknown_name("learner", self.learner, LEARNERS)

    def blank(self) -> Learner:
        """A learner with shapes in place of arrays, to be filled from a file."""
        return jax.eval_shape(self.init, jax.random.key(0))
