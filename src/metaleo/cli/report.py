"""`metaleo report`."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import Int, Text, flag, say, watch
from metaleo.errors import BadInput


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
        from metaleo.analysis.findings import Look
        from metaleo.files import check_writable, write_text
        from metaleo.report import sections, write_page
        from metaleo.subjects import Bench, load_subjects

        for name in ("tasks", "test_tasks"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.out.suffix not in (".html", ".htm"):
            raise BadInput(f"--out is a page, its name ends in .html; {self.out.name} does not")
        check_writable(self.out)
        models = load_subjects(self.runs_or_models)
        subjects = load_subjects(self.runs_or_models, every_seed=False)
        bench = Bench(models, self.data, self.way, self.shot)
        look = Look(bench, "test", self.seed, self.tasks, watch)
        look.check(models)
        parts = []
        for part in sections(models, subjects, look, self.test_tasks):
            say.print(part.title, markup=False, soft_wrap=True)
            parts.append(part)
        write_text(self.out, write_page(parts, models, bench, self.command()))
        say.print(f"page: {self.out}", markup=False, soft_wrap=True)
        if self.json:
            print(json.dumps({"page": str(self.out), "sections": [part.title for part in parts]}, indent=2))

    def command(self) -> str:
        """What makes this page again."""
        words = ["metaleo", "report", *map(str, self.runs_or_models)]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name != "json" and value != field.default:
                words += [f"--{field.name.replace('_', '-')}", str(value)]
        return shlex.join(words)
