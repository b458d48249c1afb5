"""`metaleo predict`."""

import csv
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from metaleo.cli.common import Columns, Switch, check_new, default_is, emit, tell
from metaleo.data.tables import is_number
from metaleo.errors import BadInput, require_between


@dataclasses.dataclass(frozen=True)
class Predict:
    """Classify examples with a task file that `metaleo adapt` has made.

    QUERY is as SUPPORT there; labels are not needed, and if there are any, the accuracy is told. The result has a row
    for each example: its class, the probability of that, and `unsure` where the probability is low. Probabilities of
    trained models are calibrated on validation tasks of meta-training: of predictions with probability 0.8, about 80 %
    are right, as far as the new classes are like those. The labels and other columns of text come along; in CSV, a text
    that a spreadsheet would take for a formula begins with an apostrophe.

    Try:
      metaleo predict task.safetensors query.csv
      metaleo predict task.safetensors query.csv --out predictions.csv --probabilities
      metaleo predict task.safetensors query.parquet --json --unsure-below 0.8
      metaleo predict task.safetensors photos/
    """

    task: Annotated[Path, tyro.conf.Positional]
    """Task file."""
    query: Annotated[Path, tyro.conf.Positional]
    """The examples to classify."""
    out: Annotated[Path | None, default_is("CSV on standard output", aliases=["-o"])] = None
    """File to write, .csv or .json."""
    overwrite: Switch = False
    """Replace the file in --out."""
    probabilities: Switch = False
    """Also give the probability of every class."""
    unsure_below: float = 0.5
    """Probability under which a prediction is marked unsure."""
    label: Annotated[str | None, default_is("label")] = None
    """Column of the labels, if there are any."""
    ignore: Columns = ()
    """Columns of numbers that are no part of the vector."""
    backbone: Annotated[str | None, default_is("as in `metaleo adapt`")] = None
    """For images: the network that turns them into vectors."""
    views: Annotated[Literal["centre", "multi"] | None, default_is("as in `metaleo adapt`")] = None
    """For images: the centre crop, or the average over ten crops."""
    json: Switch = False
    """Print the predictions as JSON."""

    def run(self) -> None:
        from metaleo._io.files import write_text
        from metaleo.estimators.classifier import load_task, predict
        from metaleo.estimators.examples import read_examples

        require_between(0, 1, unsure_below=self.unsure_below)
        if self.out is not None:
            if self.out.resolve() in (self.query.resolve(), self.task.resolve()):
                raise BadInput(f"{self.out} is what predictions are made of; choose another --out")
            check_new(self.out, self.overwrite, ".csv", ".json")
        task = load_task(self.task)
        backbone = self.backbone or task.about.get("network")
        views = self.views or task.about.get("views", "centre")
        columns = task.about.get("columns", ())
        table = read_examples(self.query, backbone, views, self.label, self.ignore, columns)
        if table.vectors.shape[1] != task.structure.dim:
            raise BadInput(
                f"{self.query} has {table.vectors.shape[1]} numbers per example, and {self.task} takes "
                f"{task.structure.dim}; columns of numbers that are no part of the vector: --ignore"
            )
        beside = dict(table.beside)
        if table.labels and any(table.labels):
            beside[self.label or "label"] = table.labels
        rows: list[dict[str, Any]] = []
        for index, prediction in enumerate(predict(task, table.vectors, self.unsure_below)):
            if not self.probabilities:
                del prediction["probabilities"]
            own = {name: column[index] for name, column in beside.items()}
            taken = {f"{name} (given)" if name in prediction else name: value for name, value in own.items()}
            rows.append({**taken, **prediction})
        result: dict[str, Any] = {"task": str(self.task), "classes": list(task.classes), "predictions": rows}
        result["calibrated"] = bool(task.about.get("calibrated"))
        result |= accuracy_of(rows, table.labels)
        if self.out is not None:
            write_text(self.out, json.dumps(result, indent=2) + "\n" if self.out.suffix == ".json" else as_csv(rows))
        if self.json:
            emit(result, as_json=True)
        elif self.out is None:
            sys.stdout.write(as_csv(rows))
        unsure = sum(row["unsure"] for row in rows)
        tell(f"{len(rows):,} predictions, {unsure:,} unsure")
        if not task.about.get("calibrated"):
            tell("these probabilities are not calibrated: the model has learned no temperature")
        if "accuracy" in result:
            tell(f"{100 * result['accuracy']:.1f} % of the {result['labelled']:,} that have a label are right")


def accuracy_of(rows: list[dict[str, Any]], labels: list[str] | None) -> dict[str, Any]:
    """How many of the rows that have a label are right."""
    pairs = [(row["class"], label) for row, label in zip(rows, labels or [], strict=False) if label]
    right = sum(str(predicted) == label for predicted, label in pairs)
    return {"labelled": len(pairs), "accuracy": right / len(pairs)} if pairs else {}


def as_csv(rows: list[dict[str, Any]]) -> str:
    flat = [
        {as_text(name): as_text(value) for name, value in row.items() if name != "probabilities"}
        | {f"p({name})": value for name, value in row.get("probabilities", {}).items()}
        for row in rows
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def as_text(value: Any) -> Any:
    """The same for a spreadsheet: text that it would compute as a formula gets an apostrophe before it."""
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula and not is_number(value) else value
