"""The four analyses end to end: measure the models, tabulate the numbers, draw the figure."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from metaleo._io.progress import Progress
from metaleo.analysis.codes import (
    NEIGHBOURS,
    check_codes,
    collect_codes,
    describe_codes,
    label_names,
    project,
    typical_class,
)
from metaleo.analysis.coverage import KINDS, describe_coverage, measure_coverage
from metaleo.analysis.curvature import describe_curvature, measure_curvature
from metaleo.analysis.paths import descending
from metaleo.analysis.uncertainty import collect_answers, collect_functions, describe_answers, describe_functions
from metaleo.checkpoints import Candidate
from metaleo.data.class_names import readable_name
from metaleo.errors import BadInput
from metaleo.evaluation.evaluate import TaskSuite
from metaleo.plotting.analyses import (
    plot_codes,
    plot_coverage,
    plot_curvature,
    plot_function_uncertainty,
    plot_uncertainty,
)


@dataclasses.dataclass(frozen=True)
class AnalysisSettings:
    """The tasks on which models are analysed, and the progress display."""

    suite: TaskSuite
    split: str
    seed: int
    tasks: int
    progress: Progress

    @property
    def where(self) -> str:
        classes = "" if self.suite.problem else f" {self.split}"
        data = "" if self.suite.problem else f" of {Path(self.suite.data).name}"
        return f"{self.suite.kind}, {self.tasks:,}{classes} tasks{data}, seed {self.seed}"

    def check(self, candidates: Sequence[Candidate], able: Callable[[Candidate], Any] = lambda candidate: None) -> None:
        """Raise `BadInput` before any work for models or tasks that the analysis cannot handle."""
        for one in candidates:
            able(one)
            self.suite.tasks(one, self.split)

    def measure(self, candidate: Candidate, function: Callable[..., Any]) -> Any:
        with self.progress.bar(candidate.name, self.tasks) as bar:
            return function(candidate, self.suite, self.split, self.seed, self.tasks, bar)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A table, the numbers behind it (by model), and a function that draws the figure."""

    title: str
    where: str
    numbers: dict[str, dict[str, Any]]
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str
    """What the table and the figure show."""
    draw: Callable[[Path], None]


def analyse_codes(candidate: Candidate, settings: AnalysisSettings, highlight: str | None = None) -> Finding:
    settings.check([candidate], lambda one: check_codes(one, settings.tasks))
    names = label_names(settings.suite, settings.split)
    if highlight is not None and readable_name(highlight) not in names:
        raise BadInput(f"no class {highlight!r} to highlight; there are {', '.join(names)}")
    codes = settings.measure(candidate, collect_codes)
    label = typical_class(codes) if highlight is None else names.index(readable_name(highlight))
    if label not in codes.labels:
        raise BadInput(f"none of the {settings.tasks:,} tasks has the class {highlight!r}")
    numbers = describe_codes(codes)
    rows = [
        (point, known(numbers[point]["silhouette"], "{:.3f}"), known(100 * numbers[point]["purity"], "{:.1f} %"),
         f"{numbers[point]['spread']:.3g}")
        for point in ("before", "after")
    ]  # fmt: skip
    moved = numbers["moved"]
    kinds = "families" if settings.suite.problem else "classes"
    note = (
        f"{numbers['codes']:,} codes of {numbers['classes']} {kinds}; purity: share of the {NEIGHBOURS} nearest "
        f"neighbours that are of the same one ({100 * numbers['chance_purity']:.1f} % by chance); spread: root mean "
        f"squared distance to the mean. A code moves by {moved['median']:.3g} (5-95 %: {moved['5 %']:.3g}-"
        f"{moved['95 %']:.3g}); of the neighbours of a code among all codes, before and after, "
        f"{100 * numbers['apart']:.1f} % are on its own side (a half if nothing had changed)."
    )

    def draw(path: Path) -> None:
        plot_codes(path, codes, project(codes, settings.seed), label)

    headings = ("adaptation", "silhouette", "purity", "spread")
    return Finding(f"Codes of {candidate.name}", settings.where, {candidate.name: numbers}, headings, rows, note, draw)


def analyse_curvature(candidates: Sequence[Candidate], settings: AnalysisSettings) -> Finding:
    settings.check(candidates, descending)
    found = {one.name: settings.measure(one, measure_curvature) for one in candidates}
    numbers = {name: describe_curvature(spectra) for name, spectra in found.items()}
    rows = []
    for name, held in numbers.items():
        for space, letter in (("z", "z"), ("theta", "θ")):
            for point in ("before", "after"):
                if f"{space} {point}" in held:
                    own = held[f"{space} {point}"]
                    rows.append((f"{name}, in {letter}", point, between(own["eigenvalues"], "{:.2g}"),
                                 f"{own['largest']['median']:.2g}", f"{own['mean']['median']:.2g}"))  # fmt: skip
    ratios = [
        f"{name}: {own['eigenvalues']:.2g} × by the median eigenvalue, {own['largest']:.2g} × by the largest, "
        f"{own['mean']:.2g} × by the mean over all directions"
        for name, own in ((name, held.get("z over theta before")) for name, held in numbers.items()) if own
    ]  # fmt: skip
    note = (
        "Absolute eigenvalues of the Hessian of the support loss, in nats per squared unit of z or θ: median (5-95 %) "
        "of those not zero by construction; median over tasks of the largest, and of the mean with zeros."
    )
    if ratios:
        note += f" Curvature in z over that in θ, before adaptation: {'; '.join(ratios)}."
    for name, spectra in found.items():
        if "theta" not in spectra.values:
            note += f" θ of {name} has {spectra.sizes['theta']:,} numbers, too many for exact eigenvalues."
        elif len(spectra.values["theta"]["before"]) < settings.tasks:
            note += f" In θ of {name}: the first {len(spectra.values['theta']['before'])} tasks."
    headings = ("", "adaptation", "eigenvalues", "largest", "mean")
    return Finding("Curvature", settings.where, numbers, headings, rows, note, lambda path: plot_curvature(path, found))


def analyse_coverage(candidates: Sequence[Candidate], settings: AnalysisSettings) -> Finding:
    settings.check(candidates, descending)
    found = {one.name: settings.measure(one, measure_coverage) for one in candidates}
    numbers = {name: describe_coverage(coverage) for name, coverage in found.items()}
    rows = []
    for name, held in numbers.items():
        for kind, words in KINDS.items():
            if f"steps {kind}" in held:
                rows.append((name, words, between(held[f"steps {kind}"], "{:.3g}"),
                             between(held[f"from start to end {kind}"], "{:.3g}")))  # fmt: skip
    decoders = [
        f"{name}: {held['singular values']['least']:.2f} to {held['singular values']['greatest']:.2f}, "
        f"median {held['singular values']['median']:.2f}"
        for name, held in numbers.items() if "singular values" in held
    ]  # fmt: skip
    note = "Euclidean lengths over all codes, or all weights, of a task: median (5-95 %)."
    if decoders:
        note += f" Singular values of the decoder, 1 keeping lengths: {'; '.join(decoders)}."
    headings = ("", "", "one step", "from start to end")
    return Finding("Coverage", settings.where, numbers, headings, rows, note, lambda path: plot_coverage(path, found))


def analyse_uncertainty(
    candidates: Sequence[Candidate], settings: AnalysisSettings, samples: int | None = None, query: int | None = None
) -> Finding:
    if settings.suite.problem:
        return analyse_functions(candidates, settings, samples or 100)
    settings.check(candidates, lambda one: settings.suite.tasks(one, settings.split, query))
    samples = samples or 32
    collect = functools.partial(collect_answers, samples=samples, query=query)
    found = {one.name: settings.measure(one, collect) for one in candidates}
    numbers = {name: {way: describe_answers(answers) for way, answers in ways.items()} for name, ways in found.items()}
    rows = []
    for name, ways in numbers.items():
        for way, held in ways.items():
            for doubt in ("entropy", "disagreement"):
                if doubt in held:
                    own = held[doubt]
                    again = doubt == "disagreement"  # second row for the same answers
                    rows.append((
                        "" if again else name + ("" if way == "means" else f", {samples} samples"),
                        "" if again else f"{100 * held['accuracy']:.2f} "
                        + known(100 * held["accuracy_interval"], "± {:.2f} %"),
                        "" if again else f"{100 * held['calibration_error']:.1f} %",
                        doubt,
                        known(own["error_ranking"], "{:.3f}") + known(own["error_ranking_interval"], " ± {:.3f}"),
                        f"{100 * own['accuracy_without_least_certain_tenth']:.2f} %",
                    ))  # fmt: skip
    note = (
        "±: 95 %; calibration error before any temperature. Doubt by the entropy of the answer's probabilities, or by "
        "the share of sampled classifiers that answer otherwise. AUROC: how often a wrong answer is more in doubt than "
        "a right one. Last: accuracy when the tenth of all answers that is most in doubt is left out."
    )
    headings = ("", "accuracy", "calib.\nerror", "doubt by", "AUROC", "without\na tenth")
    return Finding(
        "Certainty", settings.where, numbers, headings, rows, note, lambda path: plot_uncertainty(path, found)
    )


def analyse_functions(candidates: Sequence[Candidate], settings: AnalysisSettings, samples: int) -> Finding:
    collect = functools.partial(collect_functions, samples=samples)
    found = {one.name: settings.measure(one, collect) for one in candidates}
    numbers = {name: describe_functions(functions) for name, functions in found.items()}
    rows = []
    for name, held in numbers.items():
        at = {row["level"]: f"{100 * row['coverage']:.1f} %" for row in held["coverage"]}
        ranked, kept = held["spread_and_error_rank_correlation"], held["mse_without_least_certain_tenth"]
        rows.append((
            name, f"{held['mse']:.3f} ± {held['mse_interval']:.3f}", at[0.5], at[0.9],
            "–" if ranked is None else f"{ranked:.2f}", "–" if kept is None else f"{kept:.3f}",
        ))  # fmt: skip
    note = (
        f"{samples} sampled functions a task, 100 points each. Targets inside the predictive intervals of 50 and 90 %; "
        "rank correlation of the spread of samples with the squared error of their mean, over all points; and the "
        "error when the tenth of all points where samples differ most is left out."
    )
    headings = ("", "MSE (95 %)", "in 50 %", "in 90 %", "rank\ncorr.", "without\na tenth")
    return Finding(
        "Certainty", settings.where, numbers, headings, rows, note,
        lambda path: plot_function_uncertainty(path, found),
    )  # fmt: skip


def known(value: float, style: str) -> str:
    return style.format(value) if math.isfinite(value) else "–"


def between(held: dict[str, float], style: str) -> str:
    low, median, high = (style.format(held[name]) for name in ("5 %", "median", "95 %"))
    return f"{median} ({low}-{high})"
