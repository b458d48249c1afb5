"""Named backbone architectures and training recipes, as plain records."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import PRNGKeyArray

from metaleo._io.json_values import check_bounds, from_json, parse_json
from metaleo.errors import BadInput, require_between, require_seed, unknown_name
from metaleo.features.backbone import Backbone
from metaleo.features.conv4 import Conv4
from metaleo.features.wrn import WideResNet


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The architecture of a backbone and the size of its input images."""

    kind: Literal["wrn", "conv4"] = "wrn"
    depth: int = 28
    """Layers of a wide residual network."""
    width: int = 10
    """Width of a wide residual network; channels of a conv-4."""
    strides: tuple[int, int, int] = (2, 2, 2)
    """Strides of the three groups of a WRN; the paper uses 2 in each."""
    side: int = 80
    """Side of the network's input in pixels."""
    channels: int = 3
    share: float = 80 / 92
    """Side of the centre crop, as a share of the image's side."""
    layer: int = 21
    """The layer whose activations are the features."""

    def init(self, key: PRNGKeyArray) -> Backbone:
        if self.kind == "conv4":
            return Conv4.init(key, self.width, self.channels)
        return WideResNet.init(key, self.depth, self.width, self.strides, self.channels)

    def blank(self) -> Backbone:
        """Return a backbone whose leaves are shapes without values."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def check(self) -> None:
        """Raise `BadInput` for sizes that no network has."""
        check_bounds(vars(self), "Architecture")
        if self.kind == "wrn" and (self.depth < 10 or (self.depth - 4) % 6):
            raise BadInput(f"depth={self.depth} of a wide residual network must be 6n + 4: 10, 16, 22, 28, …")
        layers = self.blank().layers
        if self.layer not in layers:
            raise BadInput(f"layer={self.layer} is none of the network's: {', '.join(map(str, layers))}")

    @classmethod
    def from_json(cls, values: Any) -> "Architecture":
        found = from_json(cls, values, "architecture")
        found.check()
        return found


def second_of_third_group(depth: int) -> int:
    """Return the layer that corresponds to layer 21 of WRN-28: the end of the third group's second, or only, block."""
    blocks = (depth - 4) // 6
    return 1 + 2 * (2 * blocks + min(blocks, 2))


ARCHITECTURES: dict[str, Architecture] = {
    "wrn-28-10": Architecture(),
    "wrn-28-10-small-images": Architecture(strides=(1, 2, 2), side=32, share=1.0),
    "wrn-16-4": Architecture(depth=16, width=4, layer=second_of_third_group(16)),
    "conv-4": Architecture("conv4", 0, 64, side=28, channels=1, share=0.9, layer=4),
}
"""The paper's; the same for 32 x 32 images (CIFAR), with stride 1 in the first group; two for limited hardware."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Hyper-parameters for training a backbone. The defaults are the paper's, for miniImageNet."""

    about: str = "the paper's, for miniImageNet (Section B.2)"
    batch: int = 1024
    """Images per step."""
    steps: int = 10_000
    """Steps of SGD."""
    learning_rate: float = 0.1
    """Learning rate at its highest."""
    drops: tuple[float, ...] = (0.3, 0.5, 0.7, 0.8, 0.9)
    """Shares of the steps after which the learning rate is multiplied by 0.2; if empty, it follows a cosine."""
    l2: float = 5e-4
    """Weight of the L2 term."""
    keep_prob: float = 0.5
    """Keep probability of the dropout inside the blocks."""
    least_area: float = 0.08
    """Smallest area of a random crop, as a share of the image."""
    mirrors: bool = True
    """Mirror half of the images."""
    colours: float = 0.4
    """Strength s of colour changes: brightness, contrast and saturation are multiplied by up to 1 ± s."""
    smoothing: float = 0.0
    """Label smoothing: the share of each target that is spread evenly over all classes."""
    mixup: float = 0.0
    """α of manifold mixup with Beta(α, α) weights; 0 disables it."""
    rotation: float = 0.0
    """Loss weight of predicting by how many quarter turns an image was rotated; 0 disables rotation."""
    average: float = 0.0
    """Decay of the running average of the weights, which becomes the network; with 0 the last weights do."""

    OLD_NAMES: ClassVar = {"keep": "keep_prob"}
    """Names of fields in files of version 0.1."""

    @classmethod
    def from_json(cls, values: Any) -> "Recipe":
        return from_json(cls, values, "recipe")


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """Everything that determines the result of a pre-training run."""

    images: str
    architecture: Architecture = Architecture()
    recipe: Recipe = Recipe()
    hold_out: float = 0.05
    """Share of each training class's images that is held out for validation."""
    reports: int = 20
    """Number of times that the network is validated and the run saved."""
    seed: int = 0
    half: bool = False
    """Whether to compute in bfloat16, with float32 weights."""

    def check(self) -> None:
        """Raise `BadInput` for invalid values."""
        recipe = self.recipe
        check_bounds(vars(self), "PretrainConfig")
        check_bounds(vars(recipe), "Recipe")
        self.architecture.check()
        require_between(0.01, 1, keep_prob=recipe.keep_prob, least_area=recipe.least_area)
        require_between(0, 1, smoothing=recipe.smoothing, average=recipe.average)
        weights = ("learning_rate", "l2", "mixup", "rotation", "colours")
        require_between(0, 1e6, **{name: getattr(recipe, name) for name in weights})
        require_between(0, 0.9, hold_out=self.hold_out)
        require_seed(self.seed)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, path: Path) -> "PretrainConfig":
        try:
            config = from_json(cls, parse_json(path.read_bytes()))
            config.check()
        except (OSError, BadInput) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise BadInput(f"{path} is not the configuration of a pre-training run: {why}") from error
        return config


PAPER = Recipe()
BASE = dataclasses.replace(
    PAPER,
    about="smaller batches, a cosine and no dropout",
    batch=256,
    steps=25_000,
    drops=(),
    keep_prob=1.0,
    least_area=0.2,
)
RECIPES: dict[str, Recipe] = {
    "paper": PAPER,
    "paper-tiered": dataclasses.replace(
        PAPER, about="the paper's, for tieredImageNet", steps=50_000, drops=(0.4, 0.5, 0.6, 0.7, 0.8)
    ),
    "base": BASE,
    "smooth": dataclasses.replace(BASE, about="base, with label smoothing", smoothing=0.1),
    "mixup": dataclasses.replace(BASE, about="base, with manifold mixup", mixup=2.0),
    "rotation": dataclasses.replace(BASE, about="base, and how an image was turned is to be told too", rotation=1.0),
    "omniglot": dataclasses.replace(
        BASE,
        about="small batches of drawings, for a conv-4 on a CPU",
        batch=32,
        steps=6_000,
        least_area=0.5,
        mirrors=False,
        colours=0.0,
    ),
    "best": dataclasses.replace(
        BASE,
        about="rotation, with a larger L2 and learning rate: what the measurements in docs/results-features.md favour",
        steps=18_460,
        learning_rate=0.2,
        l2=1e-3,
        rotation=1.0,
    ),
}


def find_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]


def find_architecture(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise unknown_name("backbone", name, ARCHITECTURES)
    return ARCHITECTURES[name]
