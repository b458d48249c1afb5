"""Which network, and how it is trained: plain records and their names."""

import dataclasses
from typing import Any, Literal

import jax
from jaxtyping import PRNGKeyArray

from metaleo.errors import BadInput
from metaleo.features.backbone import Backbone
from metaleo.features.conv4 import Conv4
from metaleo.features.wrn import WideResNet


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A backbone and the images that it takes."""

    kind: Literal["wrn", "conv4"] = "wrn"
    depth: int = 28
    width: int = 10
    strides: tuple[int, int, int] = (2, 2, 2)
    """Of the three groups of a WRN; three reductions in the paper."""
    side: int = 80
    """Pixels of a side, as the network sees it."""
    channels: int = 3
    share: float = 80 / 92
    """How much of an image's side the centre crop takes."""
    layer: int = 21
    """Whose activations are the features."""

    def init(self, key: PRNGKeyArray) -> Backbone:
        if self.kind == "conv4":
            return Conv4.init(key, self.width, self.channels)
        return WideResNet.init(key, self.depth, self.width, self.strides, self.channels)

    def blank(self) -> Backbone:
        """A backbone whose leaves are shapes only."""
        return jax.eval_shape(self.init, jax.random.key(0))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Architecture":
        return cls(**{**values, "strides": tuple(values["strides"])})


def second_of_third_group(depth: int) -> int:
    """The layer of a WRN of this depth that is layer 21 of the paper's: its third group's second block, or last."""
    blocks = (depth - 4) // 6
    return 1 + 2 * (2 * blocks + min(blocks, 2))


ARCHITECTURES: dict[str, Architecture] = {
    "wrn-28-10": Architecture(),
    "wrn-28-10-small-images": Architecture(strides=(1, 2, 2), side=32, share=1.0),
    "wrn-16-4": Architecture(depth=16, width=4, layer=second_of_third_group(16)),
    "conv-4": Architecture("conv4", 0, 64, side=28, channels=1, share=0.9, layer=4),
}
"""The paper's; the same for images of 32 x 32 (CIFAR), which it does not reduce at once; two for small machines."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a backbone is trained. The defaults are the paper's, for miniImageNet."""

    about: str = "the paper's, for miniImageNet (Section B.2)"
    batch: int = 1024
    steps: int = 10_000
    learning_rate: float = 0.1
    drops: tuple[float, ...] = (0.3, 0.5, 0.7, 0.8, 0.9)
    """After which shares of the steps the learning rate is multiplied with 0.2; none: it falls along a cosine."""
    l2: float = 5e-4
    keep_prob: float = 0.5
    """Probability that dropout inside the blocks keeps a number."""
    least_area: float = 0.08
    """Smallest share of an image that a random crop takes."""
    mirrors: bool = True
    colours: float = 0.4
    """Brightness, contrast and saturation, times 1 ± this."""
    smoothing: float = 0.0
    """Label smoothing: this much of each target goes to all classes alike."""
    mixup: float = 0.0
    """Manifold mixup with Beta(α, α) weights; 0: none."""
    rotation: float = 0.0
    """Weight of the task to tell by how many quarters an image was turned; 0: images are not turned."""
    average: float = 0.0
    """Decay of the running average of the weights that becomes the network; 0: the last weights do."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Recipe":
        """From a file, also of version 0.1, where `keep_prob` was called `keep`."""
        values = {"keep_prob" if name == "keep" else name: value for name, value in values.items()}
        return cls(**{**values, "drops": tuple(values["drops"])})


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
        about="rotation, with a larger L2 and learning rate: what the measurements in docs/features.md favour",
        steps=18_460,
        learning_rate=0.2,
        l2=1e-3,
        rotation=1.0,
    ),
}


def find_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise BadInput(f"unknown recipe {name!r}; known are {', '.join(RECIPES)}")
    return RECIPES[name]


def find_architecture(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise BadInput(f"unknown network {name!r}; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
