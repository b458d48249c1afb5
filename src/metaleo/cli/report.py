"""`metaleo report`."""

import dataclasses
import shlex
from pathlib import Path

from metaleo.cli.common import AsTrained, DataOf, Out, Runs, Switch, check_new, emit, progress, tell
from metaleo.errors import needs_extra, require_at_least


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

    runs_or_models: Runs
    """Run folders, model files or models in this package, of one kind of task."""
    out: Out = Path("report.html")
    """The page."""
    overwrite: Switch = False
    """Replace the page in --out."""
    tasks: int = 1000
    """Tasks that the analyses look at."""
    test_tasks: int = 10_000
    """Tasks of the results; functions have only those of the analyses."""
    data: DataOf = None
    """Data to test on."""
    way: AsTrained = None
    """Classes per task."""
    shot: AsTrained = None
    """Labelled examples per class."""
    seed: int = 0
    """Which tasks; the same as those of `metaleo evaluate` with this seed."""
    json: Switch = False
    """Print where the page is, and what is on it, as JSON."""

    def run(self) -> None:
        from metaleo._io.files import write_text
        from metaleo.checkpoints import load_candidates
        from metaleo.evaluation.evaluate import TaskSuite
        from metaleo.reporting.findings import AnalysisSettings

        with needs_extra("report"):
            from metaleo.reporting.page import sections, write_page

        require_at_least(1, tasks=self.tasks, test_tasks=self.test_tasks)
        check_new(self.out, self.overwrite, ".html", ".htm")
        models = load_candidates(self.runs_or_models)
        candidates = load_candidates(self.runs_or_models, every_seed=False)
        suite = TaskSuite(models, self.data, self.way, self.shot)
        settings = AnalysisSettings(suite, "test", self.seed, self.tasks, progress)
        settings.check(models)
        page = []
        for part in sections(models, candidates, settings, self.test_tasks):
            tell(part.title)
            page.append(part)
        write_text(self.out, write_page(page, models, suite, self.command()))
        emit({"page": str(self.out), "sections": [part.title for part in page]}, self.json, f"page: {self.out}")

    def command(self) -> str:
        """What makes this page again."""
        parts = ["metaleo", "report", *map(str, self.runs_or_models)]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name not in ("json", "overwrite") and value != field.default:
                parts += [f"--{field.name.replace('_', '-')}", str(value)]
        return shlex.join(parts)
