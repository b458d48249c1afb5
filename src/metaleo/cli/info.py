"""`metaleo info`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import console, flag


@dataclasses.dataclass(frozen=True)
class Info:
    """What a file of Metaleo's is: the card of a model, a task, a network or a feature file.

    Try:
      metaleo info miniimagenet
      metaleo info runs/leo-5way-1shot
      metaleo info task.safetensors --json
    """

    file: Annotated[Path, tyro.conf.Positional, flag("FILE")]
    """A model in this package by name, a run folder, or a file."""
    json: bool = False
    """Print all that is known as JSON on standard output."""

    def run(self) -> None:
        from metaleo.reporting.cards import describe_files

        cards = describe_files(self.file)
        for card in cards:
            for name, value in card.items():
                if not isinstance(value, dict | list):
                    console.print(f"{name + ':':22}{value}", markup=False, soft_wrap=True)
            if card is not cards[-1]:
                console.print()
        if self.json:
            print(json.dumps(cards, indent=2))
