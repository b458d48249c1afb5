"""`metaleo analyse`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from metaleo.cli.common import (
    AsTrained,
    DataOf,
    Out,
    Runs,
    Switch,
    check_new,
    console,
    default_is,
    emit,
    finding_table,
    progress,
    tell,
)
from metaleo.errors import require_at_least

if TYPE_CHECKING:
    from metaleo.checkpoints import Candidate
    from metaleo.reporting.findings import AnalysisSettings, Finding

Split = Literal["train", "val", "test"]


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the analyses share."""

    tasks: int = 1000
    """Tasks to look at."""
    data: DataOf = None
    """Data to look at."""
    split: Split = "test"
    """Classes of the tasks."""
    way: AsTrained = None
    """Classes per task."""
    shot: AsTrained = None
    """Labelled examples per class."""
    seed: int = 0
    """Which tasks; the same as those of `metaleo evaluate` with this seed."""
    overwrite: Switch = False
    """Replace the figure in --out."""
    json: Switch = False
    """Print the numbers as JSON."""

    def open(self, sources: tuple[Path, ...], out: Path) -> "tuple[list[Candidate], AnalysisSettings]":
        """The first model of each run, and where to look at them."""
        from metaleo.checkpoints import load_candidates
        from metaleo.evaluation.evaluate import TaskSuite
        from metaleo.plotting.figures import check_figure
        from metaleo.reporting.findings import AnalysisSettings

        check_figure(out)
        check_new(out, self.overwrite)
        require_at_least(1, tasks=self.tasks)
        candidates = load_candidates(sources, every_seed=False)
        suite = TaskSuite(candidates, self.data, self.way, self.shot)
        if self.split != type(self).split:
            suite.refuse_for_problem("split")
        return candidates, AnalysisSettings(suite, self.split, self.seed, self.tasks, progress)

    def show(self, candidates: "list[Candidate]", settings: "AnalysisSettings", finding: "Finding", out: Path) -> None:
        """The table, the figure, and what is wanted as JSON."""
        with console.status("drawing …"):
            finding.draw(out)
        suite = settings.suite
        shown = {"data": suite.data, "shot": suite.shot, "tasks": self.tasks, "seed": self.seed}
        if not suite.problem:
            shown |= {"way": suite.way, "split": settings.split}
        models = [{"name": one.name, "model": str(one.path), **finding.numbers[one.name]} for one in candidates]
        emit({**shown, "models": models}, self.json, *finding_table(finding))
        tell(f"figure: {out}")


@dataclasses.dataclass(frozen=True)
class AnalyseCodes(Analysis):
    """Codes before and after adaptation: the paper's Figure 4, and how well they stand apart by class.

    Numbers are of the latent space itself: the silhouette; the purity, that is the share of a code's ten nearest
    neighbours that are of its class (codes made of an example in common do not count as neighbours); and the distance
    moved. Of a run with several seeds the first is looked at; give a model file for another. Codes of sines and lines
    are told apart by family, and the figure shows their way in latent space.

    Try:
      metaleo analyse codes runs/leo-5way-1shot
      metaleo analyse codes runs/leo-5way-1shot/model-3.safetensors --highlight n02174001 --out figure-4.pdf
      metaleo analyse codes sines-and-lines
    """

    run_or_model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = dataclasses.field(kw_only=True)
    """Run folder, a model file, or a model in this package (sines-and-lines)."""
    split: Split = "val"
    """Classes of the tasks; validation classes are the paper's choice."""
    highlight: Annotated[str | None, default_is("one of middling separation")] = None
    """Class of the third panel."""
    out: Out = Path("codes.png")
    """The figure (.png, .pdf or .svg)."""

    def run(self) -> None:
        from metaleo.reporting.findings import analyse_codes

        (candidate,), settings = self.open((self.run_or_model,), self.out)
        if self.highlight is not None:
            settings.suite.refuse_for_problem("highlight")
        self.show([candidate], settings, analyse_codes(candidate, settings, self.highlight), self.out)


@dataclasses.dataclass(frozen=True)
class AnalyseCurvature(Analysis):
    """Eigenvalues of the Hessian of a task's loss in z and in θ, before and after adaptation: the paper's Figure 5(a).

    Exact. The loss is that of the support set. Of a linear classifier only eigenvalues that can differ from zero are
    told: examples × (ways - 1) of them, in z and in θ alike (fewer in z with more examples than a code has numbers).

    Try:
      metaleo analyse curvature runs/leo runs/generator-finetuned runs/meta-sgd
      metaleo analyse curvature runs/leo --tasks 200 --json
    """

    runs_or_models: Runs = dataclasses.field(kw_only=True)
    """Run folders or model files, of LEO and its ablations, MAML, Meta-SGD or Reptile."""
    out: Out = Path("curvature.png")
    """The figure (.png, .pdf or .svg)."""

    def run(self) -> None:
        from metaleo.reporting.findings import analyse_curvature

        candidates, settings = self.open(self.runs_or_models, self.out)
        self.show(candidates, settings, analyse_curvature(candidates, settings), self.out)


@dataclasses.dataclass(frozen=True)
class AnalyseCoverage(Analysis):
    """How far adaptation carries: singular values of the decoder, and lengths of steps: the paper's Figures 5(b), 5(c).

    Try:
      metaleo analyse coverage runs/leo runs/generator-finetuned runs/meta-sgd
      metaleo analyse coverage runs/leo --out steps.pdf --json
    """

    runs_or_models: Runs = dataclasses.field(kw_only=True)
    """Run folders or model files, of LEO and its ablations, MAML, Meta-SGD or Reptile."""
    out: Out = Path("coverage.png")
    """The figure (.png, .pdf or .svg)."""

    def run(self) -> None:
        from metaleo.reporting.findings import analyse_coverage

        candidates, settings = self.open(self.runs_or_models, self.out)
        self.show(candidates, settings, analyse_coverage(candidates, settings), self.out)


@dataclasses.dataclass(frozen=True)
class AnalyseUncertainty(Analysis):
    """Does a model know when it is wrong? Entropy and disagreement against errors, reliability, leaving answers out.

    A stochastic LEO is asked twice: with its means, and by classifiers sampled from its Gaussians, whose probabilities
    are averaged and which may disagree. Other learners have one classifier. Models of sines and lines are asked for the
    coverage of their intervals at every level, and for their error where sampled functions differ.

    Try:
      metaleo analyse uncertainty runs/leo runs/leo-deterministic
      metaleo analyse uncertainty runs/leo --samples 64 --out figure.pdf
      metaleo analyse uncertainty sines-and-lines
    """

    runs_or_models: Runs = dataclasses.field(kw_only=True)
    """Run folders or model files, of any learner."""
    samples: Annotated[int | None, default_is("32 classifiers, 100 functions")] = None
    """Solutions sampled for each task."""
    query: Annotated[int | None, default_is("all others")] = None
    """Query examples per class."""
    out: Out = Path("uncertainty.png")
    """The figure (.png, .pdf or .svg)."""

    def run(self) -> None:
        from metaleo.reporting.findings import analyse_uncertainty

        require_at_least(2, samples=2 if self.samples is None else self.samples)
        candidates, settings = self.open(self.runs_or_models, self.out)
        if self.query is not None:
            settings.suite.refuse_for_problem("query")
        self.show(candidates, settings, analyse_uncertainty(candidates, settings, self.samples, self.query), self.out)


Codes = Annotated[AnalyseCodes, tyro.conf.subcommand("codes")]
Curvature = Annotated[AnalyseCurvature, tyro.conf.subcommand("curvature")]
Coverage = Annotated[AnalyseCoverage, tyro.conf.subcommand("coverage")]
Uncertainty = Annotated[AnalyseUncertainty, tyro.conf.subcommand("uncertainty")]


@dataclasses.dataclass(frozen=True)
class Analyse:
    """See what a model has learned: its codes, curvature, coverage and certainty (Sections 4.5 and 4.6 of the paper).

    Try:
      metaleo analyse codes runs/leo-5way-1shot
      metaleo analyse curvature runs/leo runs/meta-sgd
    """

    what: Codes | Curvature | Coverage | Uncertainty

    def run(self) -> None:
        self.what.run()
