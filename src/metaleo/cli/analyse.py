"""`metaleo analyse`."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from metaleo.cli.common import Int, Text, flag, print_finding, say, speakable, watch
from metaleo.errors import BadInput

if TYPE_CHECKING:
    from metaleo.analysis.findings import Finding, Look
    from metaleo.subjects import Subject

Split = Annotated[Literal["train", "val", "test"] | None, flag("{train,val,test}")]
Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, flag("RUN")]


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the analyses share."""

    tasks: int = 1000
    """Tasks to look at."""
    data: Text = None
    """Features to look at (those that the model was trained with)."""
    split: Split = None
    """Classes of the tasks (test)."""
    way: Int = None
    """Classes per task (as in training)."""
    shot: Int = None
    """Labelled examples per class (as in training)."""
    seed: int = 0
    """Which tasks; the same as those of `metaleo evaluate` with this seed."""
    json: bool = False
    """Print the numbers as JSON on standard output."""

    def open(self, places: tuple[Path, ...], out: Path, split: str) -> "tuple[list[Subject], Look]":
        """The first model of each run, and where to look at them."""
        from metaleo.analysis.findings import Look
        from metaleo.figures import check_figure
        from metaleo.subjects import Bench, load_subjects

        check_figure(out)
        if self.tasks < 1:
            raise BadInput(f"--tasks must be at least 1, not {self.tasks}")
        subjects = load_subjects(places, every_seed=False)
        bench = Bench(subjects, self.data, self.way, self.shot)
        if self.split is not None:
            bench.refuse_for_functions("split")
        return subjects, Look(bench, self.split or split, self.seed, self.tasks, watch)

    def tell(self, subjects: "list[Subject]", look: "Look", finding: "Finding", out: Path) -> None:
        """The table, the figure, and what is wanted as JSON."""
        print_finding(finding)
        with say.status("drawing …"):
            finding.draw(out)
        say.print(f"figure: {out}", markup=False, soft_wrap=True)
        if self.json:
            bench = look.bench
            settings = {"data": bench.data, "shot": bench.shot, "tasks": self.tasks, "seed": self.seed}
            if not bench.problem:
                settings |= {"way": bench.way, "split": look.split}
            models = [{"name": one.name, "model": str(one.path), **finding.numbers[one.name]} for one in subjects]
            print(json.dumps(speakable({**settings, "models": models}), indent=2))


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
    split: Split = None
    """Classes of the tasks (val, as in the paper)."""
    highlight: Text = None
    """Class of the third panel (one of middling separation)."""
    out: Path = Path("codes.png")
    """The figure (.png, .pdf or .svg)."""

    def run(self) -> None:
        from metaleo.analysis.findings import look_at_codes

        (subject,), look = self.open((self.run_or_model,), self.out, "val")
        if self.highlight is not None:
            look.bench.refuse_for_functions("highlight")
        self.tell([subject], look, look_at_codes(subject, look, self.highlight), self.out)


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
    out: Path = Path("curvature.png")
    """The figure (.png, .pdf or .svg)."""

    def run(self) -> None:
        from metaleo.analysis.findings import look_at_curvature

        subjects, look = self.open(self.runs_or_models, self.out, "test")
        self.tell(subjects, look, look_at_curvature(subjects, look), self.out)


@dataclasses.dataclass(frozen=True)
class AnalyseCoverage(Analysis):
    """How far adaptation carries: singular values of the decoder, and lengths of steps: the paper's Figures 5(b), 5(c).

    Try:
      metaleo analyse coverage runs/leo runs/generator-finetuned runs/meta-sgd
      metaleo analyse coverage runs/leo --out steps.pdf --json
    """

    runs_or_models: Runs = dataclasses.field(kw_only=True)
    """Run folders or model files, of LEO and its ablations, MAML, Meta-SGD or Reptile."""
    out: Path = Path("coverage.png")
    """The figure (.png, .pdf or .svg)."""

    def run(self) -> None:
        from metaleo.analysis.findings import look_at_coverage

        subjects, look = self.open(self.runs_or_models, self.out, "test")
        self.tell(subjects, look, look_at_coverage(subjects, look), self.out)


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
    samples: Int = None
    """Solutions sampled for each task (32 classifiers, 100 functions)."""
    query: Int = None
    """Query examples per class (all the rest)."""
    out: Path = Path("uncertainty.png")
    """The figure (.png, .pdf or .svg)."""

    def run(self) -> None:
        from metaleo.analysis.findings import look_at_uncertainty

        if self.samples is not None and self.samples < 2:
            raise BadInput(f"--samples must be at least 2, not {self.samples}")
        subjects, look = self.open(self.runs_or_models, self.out, "test")
        if self.query is not None:
            look.bench.refuse_for_functions("query")
        self.tell(subjects, look, look_at_uncertainty(subjects, look, self.samples, self.query), self.out)


@dataclasses.dataclass(frozen=True)
class Analyse:
    """See what a model has learned: its codes, curvature, coverage and certainty (Sections 4.5 and 4.6 of the paper).

    Try:
      metaleo analyse codes runs/leo-5way-1shot
      metaleo analyse curvature runs/leo runs/meta-sgd
    """

    what: tyro.conf.OmitArgPrefixes[
        tyro.conf.OmitSubcommandPrefixes[
            Annotated[AnalyseCodes, tyro.conf.subcommand("codes")]
            | Annotated[AnalyseCurvature, tyro.conf.subcommand("curvature")]
            | Annotated[AnalyseCoverage, tyro.conf.subcommand("coverage")]
            | Annotated[AnalyseUncertainty, tyro.conf.subcommand("uncertainty")]
        ]
    ]

    def run(self) -> None:
        self.what.run()
