"""`metaleo quickstart`."""

import dataclasses
from pathlib import Path

from metaleo.cli.common import Out, Switch, emit, evaluation_table, progress, tell


@dataclasses.dataclass(frozen=True)
class Quickstart:
    """See LEO work, in about a minute on two cores: nothing to download, nothing to configure.

    Meta-trains LEO, anchored LEO and Meta-SGD on the miniImageNet features inside this package (5-way 1-shot), tests
    them, nearest centroids and logistic regression on the same tasks of unseen classes, and leaves the models and a
    figure in a folder.

    Try:
      metaleo quickstart
    """

    steps: int = 2400
    """Meta-steps of LEO and Meta-SGD; anchored LEO takes a twentieth."""
    tasks: int = 2000
    """Test tasks, the same for every learner."""
    seed: int = 0
    """Seed of all randomness."""
    out: Out = Path("metaleo-quickstart")
    """Folder for the models and the figure."""
    overwrite: Switch = False
    """Replace the folder of an earlier quickstart."""
    json: Switch = False
    """Print the results as JSON."""

    def run(self) -> None:
        import jax

        from metaleo.experiments.quickstart import quickstart

        found = quickstart(self.out, self.steps, self.tasks, self.seed, self.overwrite, progress)
        title = f"5-way 1-shot, the same {self.tasks:,} tasks of 20 unseen classes ({jax.default_backend()})"
        results = {learner: dataclasses.asdict(one) for learner, one in found.items()}
        settings = {"tasks": self.tasks, "seed": self.seed, "steps": self.steps}
        emit({**settings, "results": results}, self.json, title, *evaluation_table(found))
        tell(
            f"models and metrics: {self.out}/leo, {self.out}/leo-anchored, {self.out}/meta-sgd\n"
            f"figure: {self.out}/learning-curves.png\n\n"
            "next:\n"
            f"  metaleo evaluate {self.out}/leo --way 10 --shot 5   # another kind of task\n"
            "  metaleo train --learner leo --shot 5  # a 5-shot LEO\n"
            "  metaleo train --data features.npz     # anchored LEO on your own features (metaleo train --help)"
        )
