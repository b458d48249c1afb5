"""A report on some runs: a single self-contained HTML file that needs no network."""

import base64
import dataclasses
import datetime
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jinja2

import metaleo
from metaleo._io.run_log import read_metrics
from metaleo.analysis.paths import Descending, inner_learner, steps_codes
from metaleo.checkpoints import Candidate
from metaleo.errors import BadInput
from metaleo.evaluation.evaluate import BASELINE_TASKS, TaskSuite, mean_and_interval, score_learner, summarise
from metaleo.plotting.figures import plot_curves
from metaleo.plotting.functions import choose_tasks, plot_functions
from metaleo.reporting.findings import (
    AnalysisSettings,
    Finding,
    analyse_codes,
    analyse_coverage,
    analyse_curvature,
    analyse_uncertainty,
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page: a note and, optionally, a table and a figure (PNG)."""

    title: str
    note: str = ""
    where: str = ""
    """Description of the tasks."""
    headings: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    figure: bytes | None = None


def drawn(draw: Callable[[Path], None]) -> bytes:
    """Draw a figure and return it as PNG bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.png"
        draw(path)
        return path.read_bytes()


def of_finding(finding: Finding) -> Section:
    return Section(finding.title, finding.note, finding.where, finding.headings, finding.rows, drawn(finding.draw))


def runs_section(models: Sequence[Candidate], names: dict[Path, str]) -> Section:
    """What was trained, with its validation score: one row per run."""
    rows = []
    for source in dict.fromkeys(one.source for one in models):
        own = [one for one in models if one.source == source]
        config, headers = own[0].config, [one.model.header for one in own]
        score = next((name for name in ("validation_accuracy", "validation_loss") if name in headers[0]), None)
        values = [header[score] for header in headers if score in header] if score else []
        factor, unit = (100, " %") if score == "validation_accuracy" else (1, "")
        steps = sorted(header["step"] for header in headers if "step" in header)
        shown = "–" if not values else f"{factor * statistics.mean(values):.2f}{unit}"
        if len(values) > 1:
            shown = f"{factor * statistics.mean(values):.2f} ± {factor * statistics.stdev(values):.2f}{unit}"
        reached = "–" if not steps else f"{steps[0]:,}" + (f" to {steps[-1]:,}" if steps[-1] > steps[0] else "")
        data = Path(config.data).name
        rows.append((str(source), names[source], config.kind, data, str(len(own)), reached, shown))
    headings = ("run", "called here", "tasks", "data", "seeds", "best step", "validation")
    note = (
        "Validation accuracy, or for functions loss; ± is the standard deviation over seeds. The best step is the one "
        "whose model was kept."
    )
    return Section("Runs", note, "", headings, rows)


def results_section(models: Sequence[Candidate], names: dict[Path, str], settings: AnalysisSettings) -> Section:
    """Test scores of every seed of every run, on the same tasks: with the temperature of a model, and without."""
    rows = []
    both = any(one.model.header.get("temperatures") for one in models)
    for source in dict.fromkeys(one.source for one in models):
        accuracies = []
        for one in (one for one in models if one.source == source):
            episodes: Any = settings.suite.tasks(one, settings.split)
            seed = str(one.model.header.get("seed", "–"))
            name = f"{names[source]}, seed {seed}"
            temperature = one.model.temperature(settings.suite.shot) if one.model.header.get("temperatures") else None
            with settings.progress.bar(name, settings.tasks) as bar:
                scores = score_learner(
                    one.learner, episodes, settings.seed, settings.tasks, bar, temperature=temperature
                )
            found = summarise(scores, temperature)
            accuracies.append(100 * found.accuracy)
            shown = [f"{found.nll:.3f} ± {found.nll_interval:.3f}", f"{100 * found.calibration_error:.1f} %"]
            if found.calibrated_error is not None:
                used = f"{found.calibrated_nll:.3f} ± {found.calibrated_nll_interval:.3f}"
                shown = [used, f"{100 * found.calibrated_error:.1f} %", *shown]
            rows.append((
                names[source], seed,
                f"{100 * found.accuracy:.2f} ± {100 * found.accuracy_interval:.2f} %",
                *shown, *["–"] * (4 * both - len(shown)),
            ))  # fmt: skip
        if len(accuracies) > 1:
            mean, deviation = statistics.mean(accuracies), statistics.stdev(accuracies)
            rows.append((names[source], f"all {len(accuracies)}", f"{mean:.2f} ± {deviation:.2f} %"))
            rows[-1] += ("",) * (4 if both else 2)
    count = min(settings.tasks, BASELINE_TASKS)
    for one in settings.suite.baselines():
        episodes = settings.suite.tasks(one, settings.split)
        with settings.progress.bar(one.name, count) as bar:
            accuracy, interval = mean_and_interval(
                score_learner(one.learner, episodes, settings.seed, count, bar).accuracy
            )
        shown = f"{100 * accuracy:.2f} ± {100 * interval:.2f} %"
        rows.append((one.name, "–", shown, *["–"] * (4 if both else 2)))
    note = "± is the 95 % interval over tasks; in rows of all seeds, the standard deviation over seeds. "
    note += f"Nearest centroids and logistic regression need no training; they saw {count:,} of the same tasks."
    headings = ("run", "seed", "accuracy", "negative log-likelihood", "calibration error")
    if both:
        note += " Likelihood and calibration error are those of the probabilities that are used, with the temperature "
        note += "that a model has learned; those before the temperature stand behind them."
        headings += ("likelihood before temperature", "error before temperature")
    return Section("Results", note, settings.where, headings, rows)


def curves_section(candidates: Sequence[Candidate]) -> Section | None:
    """Learning curves, of runs whose folder still has its metrics."""
    metrics = {one.name: read_metrics(one.source / "metrics.jsonl") for one in candidates if one.source.is_dir()}
    metrics = {name: records for name, records in metrics.items() if records}
    if not metrics:
        return None
    fields = ("query_accuracy", "validation_accuracy") if len(metrics) == 1 else ("validation_accuracy",)
    return Section(
        "Learning curves", "Every seed is a curve.",
        figure=drawn(lambda path: plot_curves(path, metrics, "", fields)),
    )  # fmt: skip


def functions_section(candidate: Candidate, settings: AnalysisSettings) -> Section:
    shown = choose_tasks(candidate.model, settings.suite.shot, settings.seed, 8, 12)
    return Section(
        f"What {candidate.name} makes of {settings.suite.shot} points",
        "Four ordinary tasks, and four that a sine and a line both explain.",
        figure=drawn(lambda path: plot_functions(path, shown)),
    )


def sections(
    models: Sequence[Candidate], candidates: Sequence[Candidate], settings: AnalysisSettings, test_tasks: int
) -> Iterator[Section]:
    """All sections that apply: `models` are all seeds of the runs, `candidates` one model of each run."""
    functions = settings.suite.problem is not None
    names = {one.source: one.source.name for one in models} | {one.source: one.name for one in candidates}
    stepping = [one for one in candidates if isinstance(inner_learner(one.learner), Descending)]
    yield runs_section(models, names)
    curves = curves_section(candidates)
    if curves:
        yield curves
    wanted: list[tuple[str, Callable[[], Section]]] = []
    if functions:
        wanted += [
            (f"What {one.name} makes of its points", lambda one=one: functions_section(one, settings))
            for one in candidates
        ]
    else:
        testing = dataclasses.replace(settings, tasks=test_tasks)
        wanted.append(("Results", lambda: results_section(models, names, testing)))
    wanted.append(("Certainty", lambda: of_finding(analyse_uncertainty(candidates, settings))))
    validating = settings if functions else dataclasses.replace(settings, split="val")
    for one in candidates:
        if steps_codes(one.learner):
            wanted.append((f"Codes of {one.name}", lambda one=one: of_finding(analyse_codes(one, validating))))
    if stepping:
        wanted.append(("Curvature", lambda: of_finding(analyse_curvature(stepping, settings))))
        wanted.append(("Coverage", lambda: of_finding(analyse_coverage(stepping, settings))))
    for title, make in wanted:
        try:
            yield make()
        except BadInput as error:
            yield Section(title, f"Left out: {error}.")


def write_page(sections: Sequence[Section], models: Sequence[Candidate], suite: TaskSuite, command: str) -> str:
    """The whole page as HTML."""
    runs = list(dict.fromkeys(one.source for one in models))
    made = (
        f"Made on {datetime.date.today().isoformat()} by Metaleo {metaleo.__version__} (JAX {jax.__version__}, "
        f"{jax.default_backend()}) with"
    )
    return template().render(
        title=f"{', '.join(place.name for place in runs)}: {suite.kind}",
        made=made,
        command=command,
        sections=sections,
        configs={str(one.source): json.dumps(one.config.to_json(), indent=2) for one in models},
    )


def template() -> jinja2.Template:
    """The page without its contents; all that is put in is escaped."""
    loader = jinja2.PackageLoader("metaleo", "reporting")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template("page.html.jinja")
