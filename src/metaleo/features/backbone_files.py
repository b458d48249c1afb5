"""Network files: a trained backbone with its architecture and a header of metadata."""

import importlib.resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from metaleo._io.files import damaged, load_tree, read_header, save_tree
from metaleo._io.json_values import from_json
from metaleo.errors import BadInput
from metaleo.features.backbone import Backbone, Moments, Pass
from metaleo.features.recipes import Architecture, PretrainConfig

BUILTIN_BACKBONES = ("omniglot",)
"""Names of the trained networks shipped with the package."""


class TrainedBackbone(NamedTuple):
    """A backbone with the running moments of its norms, ready for inference."""

    backbone: Backbone
    moments: list[Moments]


class BackboneFile(NamedTuple):
    trained: TrainedBackbone
    architecture: Architecture
    header: dict[str, Any]

    @property
    def mirrors(self) -> bool:
        """Whether the network was trained on mirrored images."""
        return self.header.get("config", {}).get("recipe", {}).get("mirrors", True)

    @property
    def drawings(self) -> bool:
        """Whether the network takes drawings, framed as in the module `drawings`."""
        return self.header.get("drawings", False)


def save_backbone(path: Path, trained: TrainedBackbone, architecture: Architecture, header: dict[str, Any]) -> None:
    save_tree(path, trained, {"kind": "network", "architecture": vars(architecture), **header})


def load_backbone(path: Path) -> BackboneFile:
    """Load a network file, the network of a pre-training run's folder, or by name one shipped with the package."""
    if str(path) in BUILTIN_BACKBONES and not path.exists():
        path = Path(str(importlib.resources.files("metaleo") / "assets" / "models" / f"{path}-network.safetensors"))
    path = path / "network.safetensors" if path.is_dir() else path
    header, architecture = read_network_header(path)
    return BackboneFile(load_tree(path, jax.eval_shape(lambda: blank(architecture))), architecture, header)


def read_network_header(path: Path) -> tuple[dict[str, Any], Architecture]:
    """The header of a network file, and the architecture in it."""
    header = read_header(path)
    if header.get("kind") != "network":
        raise BadInput(f"{path} is not a network file; `metaleo pretrain` makes one")
    with damaged(path, "network file"):
        if "config" in header:
            from_json(PretrainConfig, header["config"], "config")
        return header, Architecture.from_json(header.get("architecture"))


def blank(architecture: Architecture) -> TrainedBackbone:
    """Return an untrained backbone with its initial moments."""
    backbone = architecture.init(jax.random.key(0))
    return TrainedBackbone(backbone, blank_moments(backbone, architecture))


def blank_moments(backbone: Backbone, architecture: Architecture) -> list[Moments]:
    """Return the initial moments: mean 0 and variance 1 for each norm."""

    def seen(images: Any) -> list[Moments]:
        through = Pass()
        backbone(images, through)
        return through.seen

    side, channels = architecture.side, architecture.channels
    shapes = jax.eval_shape(seen, jax.ShapeDtypeStruct((2, side, side, channels), jnp.float32))
    return [Moments.standard(len(each.mean)) for each in shapes]
