"""`metaleo list`."""

import dataclasses
from typing import Annotated, Literal

import tyro

from metaleo.cli.common import Switch, default_is, emit

Kind = Literal["learners", "presets", "models", "data", "problems", "backbones", "recipes", "engines"]


@dataclasses.dataclass(frozen=True)
class ListNames:
    """What the other commands know by name: learners, presets, models, data, problems, backbones, recipes, engines.

    Try:
      metaleo list
      metaleo list presets
      metaleo list learners --json
    """

    kind: Annotated[Kind | None, tyro.conf.Positional, default_is("all")] = None
    """Only names of this kind."""
    json: Switch = False
    """Print the names as JSON."""

    def run(self) -> None:
        names = all_names()
        chosen = names if self.kind is None else {self.kind: names[self.kind]}
        lines = []
        for kind, own in chosen.items():
            width = max(map(len, own))
            lines += [f"{kind}:", *(f"  {name:{width}}  {about}".rstrip() for name, about in own.items())]
        emit(chosen, self.json, "\n".join(lines))


def all_names() -> dict[str, dict[str, str]]:
    """Names of each kind, with a few words on each where there is something to say."""
    from metaleo.checkpoints import BUILTIN_MODELS
    from metaleo.config.presets import PRESETS
    from metaleo.data.feature_files import BUILTIN
    from metaleo.engines import all_engines
    from metaleo.features.recipes import ARCHITECTURES, RECIPES
    from metaleo.learners.registry import LEARNERS, UNTRAINED
    from metaleo.tasks import PROBLEMS

    return {
        "learners": {name: "needs no training" if name in UNTRAINED else "" for name in LEARNERS},
        "presets": {name: f"{preset.shot}-shot; {preset.origin}" for name, preset in PRESETS.items()},
        "models": dict.fromkeys(BUILTIN_MODELS, ""),
        "data": dict.fromkeys(BUILTIN, ""),
        "problems": dict.fromkeys(PROBLEMS, ""),
        "backbones": dict.fromkeys(ARCHITECTURES, ""),
        "recipes": {name: recipe.about for name, recipe in RECIPES.items()},
        "engines": dict.fromkeys(all_engines(), ""),
    }
