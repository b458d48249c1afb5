"""Compare many learners on the same data and test tasks; a stopped comparison can be continued.

OUT/compare.json                      the settings
OUT/<shot>shot/<learner>/             a run folder, which also has:
OUT/<shot>shot/<learner>/test.npz     each test task's accuracy, NLL and calibration, with and without temperature
OUT/<shot>shot/<learner>/times.json   duration of training and testing, in seconds
OUT/results.json, compare.md, compare.png
"""

import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import metaleo
from metaleo._io.files import read_json, write_text
from metaleo._io.progress import SILENT, Progress
from metaleo._io.run_log import is_free, owned, read_metrics, remove_results, require_ours
from metaleo._jax.devices import fits_on_device
from metaleo.checkpoints import load_model, save_model
from metaleo.config.presets import default_config, resolve_config
from metaleo.config.schema import TrainConfig
from metaleo.data.feature_files import load_data
from metaleo.data.metaset import SLAB, MetaSet
from metaleo.errors import BadInput, Interrupted, require_at_least, require_seed, unknown_name
from metaleo.evaluation.calibration import calibrate_model
from metaleo.evaluation.evaluate import (
    Evaluation,
    Score,
    load_score,
    paired_difference,
    save_score,
    score_learner,
    summarise,
)
from metaleo.learners.registry import LEARNERS, UNTRAINED, Structure
from metaleo.plotting.figures import plot_comparison, plot_curves
from metaleo.tasks import Episodes
from metaleo.tasks.episodes import check_classes, place_rows
from metaleo.tasks.task import normalise
from metaleo.training.run import TrainingRun, create_run_folder, resume_config, train_with_progress

HOW_TO_RESUME = "run the same command again to go on"
VALIDATIONS = 4
"""Minimum number of validations in a run, however short."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The learners to compare, and the data and tasks to compare them on.

    Attributes:
        data: Feature file, table, or name of data in the package.
        shots: Numbers of labelled examples per class; one table for each.
        learners: Names of learners in `LEARNERS`.
        way: Classes per task.
        steps: Maximum meta-steps of each learner.
        tasks: Test tasks, the same for every learner.
        seed: Seed of all randomness.
        label: For a table, the column of the labels, if that is not `label`.
        ignore: For a table, columns of numbers that are no part of the vector.

    Examples:
        >>> from metaleo import Comparison
        >>> Comparison(learners=("leo", "cl2n")).reference
        'leo'
    """

    data: str = "sample"
    shots: tuple[int, ...] = (1, 5)
    learners: tuple[str, ...] = LEARNERS
    way: int = 5
    steps: int = 100_000
    tasks: int = 10_000
    seed: int = 0
    label: str | None = None
    ignore: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """The learner to which the others are compared."""
        return "leo" if "leo" in self.learners else self.learners[0]

    @property
    def command(self) -> str:
        words = ["metaleo", "compare", "--data", self.data, "--learner", *self.learners]
        words += ["--shot", *map(str, self.shots)]
        for name in ("way", "steps", "tasks", "seed"):
            words += [f"--{name}", str(getattr(self, name))]
        words += [] if self.label is None else ["--label", self.label]
        words += ["--ignore", *self.ignore] if self.ignore else []
        return shlex.join(words)

    def check(self, metaset: MetaSet) -> None:
        """Raise `BadInput` for any mistake before training starts."""
        unknown = [learner for learner in self.learners if learner not in LEARNERS]
        if unknown:
            raise unknown_name("learner", unknown[0], LEARNERS)
        for name, values in (("learner", self.learners), ("shot", self.shots)):
            if not values:
                raise BadInput(f"`{name}=` needs at least one value")
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise BadInput(f"`{name}=` has {twice[0]} twice")
        require_at_least(1, steps=self.steps)
        require_at_least(2, tasks=self.tasks)  # an interval needs two
        require_seed(self.seed)
        for shot in self.shots:
            for split, query in (("train", TrainConfig.query), ("val", None), ("test", None)):
                check_classes(metaset.subset(split), self.way, shot, query)

    def config(self, learner: str, shot: int, dim: int) -> TrainConfig:
        """A learner's configuration: its preset for this shot, or zero steps if it needs no training."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in ("data", "label", "ignore", "way", "seed")}
        if learner in UNTRAINED:
            structure = Structure(learner=learner, dim=dim, way=self.way)
            return TrainConfig(**shared, shot=shot, steps=0, structure=structure)
        usual = default_config(learner, shot)
        steps = min(self.steps, usual.steps)
        every = max(1, min(usual.validate_every, steps // VALIDATIONS))
        return resolve_config(dim, **shared, learner=learner, shot=shot, steps=steps, validate_every=every)


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """A learner's row in a table: its evaluation, and the paired difference of its accuracy to the reference's."""

    learner: str
    evaluation: Evaluation
    difference: float
    difference_interval: float
    best_step: int
    """Meta-steps of the tested model."""
    training_seconds: float | None
    """Includes compilation; None if a killed process left it unknown."""
    testing_seconds: float | None

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        evaluation = fields.pop("evaluation")
        return {"learner": fields.pop("learner"), **evaluation, **fields}


ComparisonRows = dict[int, list[ComparisonRow]]
"""Rows by shot, the most accurate first."""


def compare(
    plan: Comparison,
    out: str | Path,
    overwrite: bool = False,
    progress: Progress = SILENT,
    show: Callable[[int, list[ComparisonRow], str], None] = lambda shot, rows, advice: None,
) -> dict[str, Any]:
    """Meta-train several learners on the same data, test them on the same tasks, and rank them.

    Results that are already in the folder are reused, so a stopped comparison continues.

    Args:
        plan: What is compared.
        out: Folder for the results and the models.
        overwrite: Replace the comparison in `out`.
        progress: Shows messages and progress bars.
        show: Called with a shot, its rows, the most accurate first, and a sentence of advice, once they are known.

    Returns:
        The content of `out/results.json`: settings, machine, and for each shot a row per learner.

    Examples:
        >>> import tempfile
        >>> from metaleo import Comparison, compare
        >>> plan = Comparison(shots=(1,), learners=("cl2n", "nearest-centroid"), tasks=100)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     results = compare(plan, out)
        >>> [row["learner"] for row in results["shots"]["1"]]
        ['cl2n', 'nearest-centroid']
    """
    folder = Path(out)
    if jax.process_count() > 1:
        raise BadInput("compare runs on one host; start it without JAX_COORDINATOR_ADDRESS")
    metaset = load_data(plan.data, plan.label, plan.ignore)
    plan.check(metaset)
    jobs = {
        folder / f"{shot}shot" / learner: plan.config(learner, shot, metaset.dim)
        for shot in plan.shots
        for learner in plan.learners
    }
    claim_folder(folder, dataclasses.asdict(plan) | {"checksum": metaset.checksum()}, overwrite)
    for own, config in jobs.items():
        if (own / "config.json").is_file():  # from another version of Metaleo, or resumed with more steps
            refuse_other(own, resume_config(own, None).to_json(), config.to_json(), set())
    with owned(folder):
        progress.say(f"{plan.data}: {metaset.describe()}")
        return run_jobs(plan, metaset, folder, jobs, progress, show)


def run_jobs(
    plan: Comparison,
    metaset: MetaSet,
    folder: Path,
    jobs: dict[Path, TrainConfig],
    progress: Progress,
    show: Callable[[int, list[ComparisonRow], str], None],
) -> dict[str, Any]:
    """Do all that is not done yet; then write and return the results."""
    rows: ComparisonRows = {}
    scores: dict[int, dict[str, Score]] = {shot: {} for shot in plan.shots}
    advice: dict[int, str] = {}
    try:
        for number, (own, config) in enumerate(jobs.items(), start=1):
            shot = config.shot
            scores[shot][own.name] = train_and_score(plan, metaset, own, config, f"[{number}/{len(jobs)}]", progress)
            if len(scores[shot]) == len(plan.learners):
                rows[shot] = rank(own.parent, shot, scores[shot], plan.reference)
                advice[shot] = advise({name: score.accuracy for name, score in scores[shot].items()})
                show(shot, rows[shot], advice[shot])
    except KeyboardInterrupt as interrupt:  # between runs; a run itself saves and raises `Interrupted`
        progress.say(f"stopped; {HOW_TO_RESUME}")
        raise Interrupted from interrupt
    device = jax.devices()[0]
    results = {
        "settings": dataclasses.asdict(plan),
        "machine": {"device": device.device_kind, "backend": jax.default_backend()},
        "versions": {"metaleo": metaleo.__version__, "jax": jax.__version__},
        "reference": plan.reference,
        "shots": {str(shot): [row.to_json() for row in own] for shot, own in rows.items()},
        "advice": {str(shot): sentence for shot, sentence in advice.items()},
    }
    write_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    write_text(folder / "compare.md", to_markdown(plan, results["machine"], rows, advice))
    panels = {
        f"{plan.way}-way {shot}-shot": {
            row.learner: (row.evaluation.accuracy, row.evaluation.accuracy_interval) for row in own
        }
        for shot, own in rows.items()
    }
    plot_comparison(folder / "compare.png", panels, plan.reference)
    progress.say(f"table: {folder}/compare.md\nfigure: {folder}/compare.png\nmodels: {folder}/<shot>shot/<learner>")
    return results


# The folder


def claim_folder(folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Write the settings; raise `BadInput` if the folder has others. Learners and shots may be added later."""
    path = folder / "compare.json"
    settings = {name: value for name, value in settings.items() if value not in (None, ())}
    settings = json.loads(json.dumps(settings))  # as it will be read
    if overwrite:
        require_ours(folder, path.name)
    elif not is_free(folder):
        before = read_json(path)
        if not {"data", "learners", "checksum"} <= before.keys():
            raise BadInput(f"{folder} exists and is not a comparison; give another `out=`")
        refuse_other(folder, before, settings, {"learners", "shots"})
    with owned(folder):
        if overwrite:
            remove_results(folder, path.name)
        write_text(path, json.dumps(settings, indent=2) + "\n")


def refuse_other(folder: Path, before: dict[str, Any], now: dict[str, Any], free: set[str]) -> None:
    """Raise `BadInput` if settings other than those in `free` differ: their results must not be mixed."""
    for name in {**now, **before}:
        if name not in free and before.get(name) != now.get(name):
            differs = f"{name} {before.get(name)}, not {now.get(name)}"
            what = "the features are not the same" if name == "checksum" else differs
            raise BadInput(
                f"{folder} was made with other settings ({what}); replace the comparison with overwrite=True"
            )


@contextlib.contextmanager
def timed(folder: Path, what: str) -> Iterator[None]:
    """Add the seconds of a block to those of earlier attempts; the file holds None if the process is killed."""
    path = folder / "times.json"
    times = read_json(path)
    before, start = times.get(what, 0.0), time.monotonic()
    write_text(path, json.dumps(times | {what: None}) + "\n")
    try:
        yield
    finally:
        seconds = None if before is None else round(before + time.monotonic() - start, 2)
        write_text(path, json.dumps(times | {what: seconds}) + "\n")


# The work


def train_and_score(
    plan: Comparison, metaset: MetaSet, folder: Path, config: TrainConfig, where: str, progress: Progress
) -> Score:
    """Train and test one learner at one shot, as far as that is not done yet."""
    learner, model = config.structure.learner, folder / "model.safetensors"
    title = f"{where} {learner}, {plan.way}-way {config.shot}-shot"
    if not (folder / "config.json").is_file():
        create_run_folder(folder, config, overwrite=False)
    score = load_score(folder / "test.npz", plan.seed, plan.tasks)
    if score is not None and score.calibrated is not None and model.is_file():
        progress.say(f"{title}: done")
        return score
    progress.say(title)
    with timed(folder, "training"):
        make_untrained(metaset, model, config) if learner in UNTRAINED else meta_train(
            metaset, folder, config, progress
        )
    trained = load_model(model)
    rows = place_rows(metaset, fits_on_device(metaset.features.size), trained.prepare)
    validation, testing = (
        Episodes.over(metaset.subset(split), plan.way, config.shot, None, rows) for split in ("val", "test")
    )
    calibrate_model(model, validation)
    temperature = load_model(model).temperature(config.shot)
    with timed(folder, "testing"), progress.bar("testing", plan.tasks) as bar:
        score = score_learner(trained.learner, testing, plan.seed, plan.tasks, bar, temperature=temperature)
    save_score(folder / "test.npz", score, plan.seed)
    return score


def meta_train(metaset: MetaSet, folder: Path, config: TrainConfig, progress: Progress) -> None:
    """Train a new or interrupted run to its end, and plot its learning curves."""
    train_with_progress(TrainingRun(config, folder, metaset), "training", progress, HOW_TO_RESUME)
    name = config.structure.learner
    title = f"{name}, {config.way}-way {config.shot}-shot, {Path(config.data).name}"
    plot_curves(folder / "curves.png", {name: read_metrics(folder / "metrics.jsonl")}, title)


def make_untrained(metaset: MetaSet, path: Path, config: TrainConfig) -> None:
    """Save a learner that needs no meta-training: it only uses the mean of the training features."""
    train = metaset.subset("train")
    learner = config.structure.init(jax.random.key(config.seed)).with_feature_mean(mean_feature(train))
    header = {"config": config.to_json(), "seed": config.seed, "step": 0, "classes": train.class_names}
    save_model(path, learner, config.structure, header)


def mean_feature(metaset: MetaSet) -> Float[Array, " dim"]:
    """The mean of all feature vectors, each normalised to unit length; read in parts to bound memory."""
    total = np.zeros(metaset.dim)
    for start in range(0, len(metaset.rows), SLAB):
        vectors = normalise(metaset.read(metaset.rows[start : start + SLAB]))
        total += np.asarray(vectors, np.float64).sum(0)
    return jnp.asarray(total / len(metaset.rows), jnp.float32)


# The results


def rank(folder: Path, shot: int, scores: dict[str, Score], reference: str) -> list[ComparisonRow]:
    """One row per learner, compared with the reference, the most accurate first."""
    rows = []
    for learner, score in scores.items():
        difference, interval = paired_difference(score.accuracy, scores[reference].accuracy)
        trained = load_model(folder / learner / "model.safetensors")
        times = read_json(folder / learner / "times.json")
        seconds = times.get("training"), times.get("testing")
        found = summarise(score, trained.temperature(shot))
        rows.append(ComparisonRow(learner, found, difference, interval, trained.header["step"], *seconds))
    return sorted(rows, key=lambda row: -row.evaluation.accuracy)


LEVEL = 0.001
"""A difference in accuracy that does not matter, even if it is known."""


def advise(accuracies: dict[str, Float[Array | np.ndarray, " task"]]) -> str:
    """One sentence on which learner to use, from accuracies on the same tasks.

    That is the best one, unless a learner without training is level with it: not more than `LEVEL`, or than the 95 %
    interval of the difference, behind.
    """
    ordered = sorted(accuracies, key=lambda name: -float(np.mean(accuracies[name])))
    best, simple = ordered[0], [name for name in ordered if name in UNTRAINED]
    if len(ordered) == 1 or not simple:
        return f"{best} is the best; add nearest-centroid and logistic-regression to see whether training pays"
    if best in UNTRAINED:
        return f"use {best}: it needs no training, and nothing here is better"
    ahead, interval = paired_difference(accuracies[best], accuracies[simple[0]])
    told = f"{100 * ahead:+.2f} ± {100 * interval:.2f} points"
    if ahead <= max(LEVEL, interval):
        return f"use {simple[0]}: it needs no training, and {best} is level with it ({told})"
    rivals = [name for name in ordered[1:] if name not in UNTRAINED and is_level(accuracies[best], accuracies[name])]
    also = f"; {' and '.join(rivals[:2])} {'are' if len(rivals) > 1 else 'is'} level with it" if rivals else ""
    return f"use {best}: {told} against {simple[0]}, the best without training{also}"


def is_level(best: Float[Array | np.ndarray, " task"], other: Float[Array | np.ndarray, " task"]) -> bool:
    ahead, interval = paired_difference(best, other)
    return ahead <= max(LEVEL, interval)


def cells(row: ComparisonRow, reference: str) -> list[str]:
    """The cells of a table row, in the order of `columns`."""
    found, seconds = row.evaluation, row.training_seconds
    assert found.calibrated_error is not None  # every model of a comparison has a temperature
    return [
        row.learner,
        f"{100 * found.accuracy:.2f} ± {100 * found.accuracy_interval:.2f}",
        "–" if row.learner == reference
        else f"{100 * row.difference:+.2f} ± {100 * row.difference_interval:.2f}",
        f"{found.calibrated_nll:.3f}",
        f"{100 * found.calibrated_error:.1f}",
        "?" if seconds is None else f"{seconds:,.0f}",
        f"{row.best_step:,}",
    ]  # fmt: skip


def columns(reference: str) -> list[str]:
    return ["learner", "accuracy (%)", f"minus {reference} (%)", "NLL", "ECE (%)", "training (s)", "best step"]


def to_markdown(plan: Comparison, machine: dict[str, str], rows: ComparisonRows, advice: dict[int, str]) -> str:
    """The settings, then a table per shot."""
    lines = [
        f"```sh\n{plan.command}\n```\n",
        f"- data: `{plan.data}`; seed {plan.seed} for training and for the test tasks",
        f"- at most {plan.steps:,} meta-steps, each learner with its preset; the best by validation accuracy is tested",
        f"- {plan.tasks:,} test tasks, the same for every learner; every example outside the support set is a query",
        f"- machine: {machine['device']} ({machine['backend']}); metaleo {metaleo.__version__}, jax {jax.__version__}",
        "- ± is 1.96 standard errors over tasks (95 %); "
        f"“minus {plan.reference}” is the mean difference of accuracy on the same tasks",
        "- NLL and ECE (expected calibration error): with the temperature that a model learned on validation tasks, as "
        "in all its predictions; results.json also has them before it",
        "- training: wall time, compilation included; best step: meta-steps of the tested model",
    ]
    for shot, own in rows.items():
        names = columns(plan.reference)
        lines += [f"\n## {plan.way}-way {shot}-shot\n", "| " + " | ".join(names) + " |", "|---" + "|---:" * 6 + "|"]
        for row in own:
            texts = cells(row, plan.reference)
            if row.learner == plan.reference:
                texts = [f"**{text}**" for text in texts]
            lines.append("| " + " | ".join(texts) + " |")
        lines.append(f"\n{advice[shot][:1].upper()}{advice[shot][1:]}.")
    return "\n".join(lines) + "\n"
