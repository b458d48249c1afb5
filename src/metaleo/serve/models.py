"""The models that are served, loaded once at start-up."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metaleo.checkpoints import BUILTIN_MODELS, TrainedModel, builtin_model_path, load_cached, model_paths
from metaleo.data.feature_files import BUILTIN
from metaleo.errors import BadInput
from metaleo.estimators.examples import embed_images, side_of
from metaleo.features.backbone_files import BUILTIN_BACKBONES, load_backbone
from metaleo.features.drawings import rasterise
from metaleo.features.embed import Views
from metaleo.serve.api import Kind, ModelCard
from metaleo.serve.function_stages import function_model

SAMPLES = {"miniimagenet": "sample", "miniimagenet-leo": "sample", "intents": "intents"}
"""Built-in data with example rows for a model."""
Embed = Callable[[Sequence[Any]], np.ndarray]
EMBEDDED_AT_ONCE = 32
"""Drawings per call of a network; 256, as for export, would take eight times the memory."""
EMBEDDING_BYTES = 96 * 2**20
"""Memory to embed drawings, at most."""


@dataclasses.dataclass(frozen=True, eq=False)
class ServedModel:
    """A model, the kind of examples it takes, and its function to embed drawings, if any."""

    name: str
    kind: Kind
    model: TrainedModel
    embed: Embed | None = None

    @property
    def sample(self) -> str | None:
        """The name of built-in data with example rows for this model, if any."""
        source = SAMPLES.get(self.name) or self.model.header.get("config", {}).get("data")
        return source if self.kind == "vectors" and source in BUILTIN else None

    def card(self) -> ModelCard:
        structure, header = self.model.structure, self.model.header
        return ModelCard(
            name=self.name,
            kind=self.kind,
            learner=structure.learner,
            dim=structure.dim,
            way=None if self.kind == "functions" else structure.way,
            shot=header.get("config", {}).get("shot"),
            classes=len(header.get("classes", [])),
            example=self.sample is not None,
        )

    def check_kind(self, drawings: Sequence[Any] | None) -> None:
        if drawings is not None and self.embed is None:
            raise BadInput(f"{self.name} takes rows of numbers as examples, not drawings")
        if drawings is None and self.embed is not None:
            raise BadInput(f"{self.name} takes drawings, not examples")

    def rows(self, examples: Sequence[Any] | None, drawings: Sequence[Any] | None) -> np.ndarray:
        """The model's input rows, [example, dim], from a request that has one of the two."""
        self.check_kind(drawings)
        if drawings is not None:
            assert self.embed is not None
            return self.embed(drawings)
        assert examples is not None
        dim = self.model.structure.dim
        for index, row in enumerate(examples):
            if len(row) != dim:
                raise BadInput(f"examples.{index} has {len(row)} numbers; {self.name} takes rows of {dim}")
        return np.asarray(examples, np.float32).reshape(-1, dim)


def load_served_models(
    more: Sequence[Path] = (), say: Callable[[str], None] = lambda text: None
) -> dict[str, ServedModel]:
    """The built-in models, and those in run folders or model files, by name; a name that is taken gets a number."""
    models = {name: serve_model(name, builtin_model_path(name)) for name in BUILTIN_MODELS}
    for path in more:
        own = path.absolute().parent if path.name == "model.safetensors" else path.absolute()
        first = own.name.removesuffix(".safetensors")
        numbered = (f"{first}-{number}" for number in itertools.count(2))
        name = next(name for name in itertools.chain([first], numbered) if name not in models)
        models[name] = serve_model(name, path)
        if name != first:
            say(f"{path} is served as {name}: another model is called {first}")
    return models


def serve_model(name: str, path: Path) -> ServedModel:
    file = model_paths(path)[0]
    model = load_cached(file, file.stat().st_mtime_ns)
    if model.structure.noise is not None:
        function_model(model.learner)
        return ServedModel(name, "functions", model)
    network = model.header.get("network")
    if network in BUILTIN_BACKBONES:
        return ServedModel(name, "drawings", model, drawing_embedder(network, model.header.get("views", "centre")))
    return ServedModel(name, "vectors", model)


def drawing_embedder(network: str, views: Views) -> Embed:
    file = load_backbone(Path(network))
    side = side_of(file)

    def embed(drawings: Sequence[Any]) -> np.ndarray:
        starts = range(0, len(drawings), EMBEDDED_AT_ONCE)
        batches = (drawings[start : start + EMBEDDED_AT_ONCE] for start in starts)
        images = (np.stack([rasterise(strokes, side) for strokes in batch]) for batch in batches)
        return np.concatenate([embed_images(some, file, views) for some in images])

    return embed
