"""`metaleo list`."""

import dataclasses
import json
from typing import Annotated, Literal

import tyro

from metaleo.cli.common import flag

Kind = Literal["learners", "presets", "models", "data", "problems", "networks", "recipes", "engines"]


@dataclasses.dataclass(frozen=True)
class ListNames:
    """What the other commands know by name: learners, presets, models, data, problems, networks, recipes, engines.

    Try:
      metaleo list
      metaleo list presets
      metaleo list learners --json
    """

    kind: Annotated[Kind | None, tyro.conf.Positional, flag("KIND")] = None
    """Only names of this kind (all)."""
    json: bool = False
    """Print the names as JSON on standard output."""

    def run(self) -> None:
        names = all_names()
        chosen = names if self.kind is None else {self.kind: names[self.kind]}
        if self.json:
            print(json.dumps(chosen, indent=2))
            return
        for kind, own in chosen.items():
            print(f"{kind}:")
            width = max(map(len, own))
            for name, about in own.items():
                print(f"  {name:{width}}  {about}".rstrip())


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
        "networks": dict.fromkeys(ARCHITECTURES, ""),
        "recipes": {name: recipe.about for name, recipe in RECIPES.items()},
        "engines": dict.fromkeys(all_engines(), ""),
    }
