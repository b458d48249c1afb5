"""`metaleo report`."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import Int, Text, console, flag, progress
from metaleo.config.schema import require_at_least
from metaleo.errors import BadInput, needs_extra


@dataclasses.dataclass(frozen=True)
class Report:
    """Put all there is to say about some runs on one page: configuration, curves, results with intervals, figures.

    The page is one HTML file without scripts that needs no network: send it to a colleague. Results are of every seed;
    the analyses (see `metaleo analyse`), and all there is about functions, look at the first seed of each run.

    Try:
      metaleo report runs/leo-5way-1shot
      metaleo report runs/leo runs/generator-finetuned runs/meta-sgd --out comparison.html
      metaleo report runs/leo-sines-and-lines --tasks 200
    """

    runs_or_models: Annotated[tuple[Path, ...], tyro.conf.Positional, flag("RUN")]
    """Run folders, model files or models in this package, of one kind of task."""
    out: Path = Path("report.html")
    """The page."""
    tasks: int = 1000
    """Tasks that the analyses look at."""
    test_tasks: int = 10_000
    """Tasks of the results; functions have only those of the analyses."""
    data: Text = None
    """Features to test on (those that the models were trained with)."""
    way: Int = None
    """Classes per task (as in training)."""
    shot: Int = None
    """Labelled examples per class (as in training)."""
    seed: int = 0
    """Which tasks; the same as those of `metaleo evaluate` with this seed."""
    json: bool = False
    """Print where the page is, and what is on it, as JSON on standard output."""

    def run(self) -> None:
        from metaleo._io.files import check_writable, write_text
        from metaleo.checkpoints import load_candidates
        from metaleo.evaluation.evaluate import TaskSuite
        from metaleo.reporting.findings import AnalysisSettings

        with needs_extra("report"):
            from metaleo.reporting.page import sections, write_page

        require_at_least(1, tasks=self.tasks, test_tasks=self.test_tasks)
        if self.out.suffix not in (".html", ".htm"):
            raise BadInput(f"--out is a page, its name ends in .html; {self.out.name} does not")
        check_writable(self.out)
        models = load_candidates(self.runs_or_models)
        candidates = load_candidates(self.runs_or_models, every_seed=False)
        suite = TaskSuite(models, self.data, self.way, self.shot)
        settings = AnalysisSettings(suite, "test", self.seed, self.tasks, progress)
        settings.check(models)
        page = []
        for part in sections(models, candidates, settings, self.test_tasks):
            console.print(part.title, markup=False, soft_wrap=True)
            page.append(part)
        write_text(self.out, write_page(page, models, suite, self.command()))
        console.print(f"page: {self.out}", markup=False, soft_wrap=True)
        if self.json:
            print(json.dumps({"page": str(self.out), "sections": [part.title for part in page]}, indent=2))

    def command(self) -> str:
        """What makes this page again."""
        parts = ["metaleo", "report", *map(str, self.runs_or_models)]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name != "json" and value != field.default:
                parts += [f"--{field.name.replace('_', '-')}", str(value)]
        return shlex.join(parts)
