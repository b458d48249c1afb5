"""`metaleo quickstart`."""

import dataclasses
import json
from pathlib import Path

from metaleo.cli.common import print_evaluations, progress


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
        import jax

        from metaleo.experiments.quickstart import quickstart

        found = quickstart(self.out, self.steps, self.tasks, self.seed, self.overwrite, progress)
        print_evaluations(
            f"5-way 1-shot, the same {self.tasks:,} tasks of 20 unseen classes ({jax.default_backend()})", found
        )
        progress.say(
            f"models and metrics: {self.out}/leo, {self.out}/meta-sgd\nfigure: {self.out}/learning-curves.png\n\n"
            "next:\n"
            f"  metaleo evaluate {self.out}/leo --way 10 --shot 5   # another kind of task\n"
            "  metaleo train --shot 5                # a 5-shot LEO\n"
            "  metaleo train --data features.npz     # your own features (metaleo train --help)"
        )
        if self.json:
            results = {title: dataclasses.asdict(one) for title, one in found.items()}
            settings = {"tasks": self.tasks, "seed": self.seed, "steps": self.steps}
            print(json.dumps({**settings, "results": results}, indent=2))
