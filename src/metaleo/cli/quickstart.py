"""`metaleo quickstart`."""

import dataclasses
import json
from pathlib import Path

from metaleo.cli.common import say


@dataclasses.dataclass(frozen=True)
class Quickstart:
    """See LEO work, in about two minutes on two cores: nothing to download, nothing to configure.

    Meta-trains LEO and Meta-SGD on the miniImageNet features inside this package (5-way 1-shot), tests both and a
    nearest-centroid classifier on the same tasks of unseen classes, and leaves the models and a figure in a folder.

    Try:
      metaleo quickstart
    """

    steps: int = 3000
    """Meta-steps of each learner."""
    tasks: int = 2000
    """Test tasks, the same for every learner."""
    seed: int = 0
    """Of everything random."""
    out: Path = Path("metaleo-quickstart")
    """Folder for the models and the figure."""
    overwrite: bool = False
    """Replace the folder of an earlier quickstart."""
    json: bool = False
    """Print the results as JSON on standard output."""

    def run(self) -> None:
        from metaleo.quickstart import quickstart

        results = quickstart(self, say)
        if self.json:
            print(json.dumps(results, indent=2))
