"""`metaleo info`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import Switch, emit


@dataclasses.dataclass(frozen=True)
class Info:
    """What a file of Metaleo's is: the card of a model, a task, a backbone or a feature file.

    Try:
      metaleo info miniimagenet
      metaleo info runs/leo-5way-1shot
      metaleo info task.safetensors --json
    """

    file: Annotated[Path, tyro.conf.Positional]
    """A model in this package by name, a run folder, or a file."""
    json: Switch = False
    """Print all that is known as JSON."""

    def run(self) -> None:
        from metaleo.reporting.cards import describe_files

        cards = describe_files(self.file)
        shown = [
            "\n".join(f"{name + ':':22}{value}" for name, value in card.items() if not isinstance(value, dict | list))
            for card in cards
        ]
        emit(cards, self.json, "\n\n".join(shown))
