"""`metaleo adapt`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from metaleo.cli.common import Text, console, flag
from metaleo.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Adapt:
    """Make a classifier for classes of your own from a few labelled examples of each: a task file.

    MODEL is a model in this package (miniimagenet, omniglot, intents), a run folder or a model file; or one of
    nearest-centroid, cl2n, logistic-regression, which need no training and take vectors of any length. SUPPORT is a
    table with a row per example (.csv, .tsv, .parquet, .npz, .safetensors, or a Hugging Face data set on the disk): a
    column `label`, and the vector in all other columns of numbers or in one column of lists; or a folder of class
    folders of images. Rows without a label are left out. It takes seconds, most of them to compile.

    Try:
      metaleo adapt runs/mine support.csv -o task.safetensors
      metaleo adapt miniimagenet support.npz -o task.safetensors
      metaleo adapt nearest-centroid support.parquet --label intent -o task.safetensors
      metaleo adapt omniglot my-symbols/ -o task.safetensors
      metaleo adapt runs/birds photos/ --network runs/wrn -o task.safetensors
    """

    model: Annotated[Path, tyro.conf.Positional, flag("MODEL")]
    """Which model."""
    support: Annotated[Path, tyro.conf.Positional, flag("SUPPORT")]
    """The labelled examples."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="PATH")] = Path("task.safetensors")
    """Task file to write."""
    label: Text = None
    """Column of the labels (label)."""
    ignore: Annotated[tuple[str, ...], flag("COLUMN")] = ()
    """Columns of numbers that are no part of the vector."""
    network: Text = None
    """For images: the network that makes vectors of them (the one that belongs to the model)."""
    views: Annotated[Literal["centre", "multi"] | None, flag("{centre,multi}")] = None
    """For images: how the model's features were made of them (centre)."""
    json: bool = False
    """Print what was made as JSON on standard output."""

    def run(self) -> None:
        from metaleo._io.files import check_writable, read_header
        from metaleo.estimators.classifier import adapt, find_model
        from metaleo.estimators.examples import read_examples
        from metaleo.features.backbone_files import BUILTIN_BACKBONES
        from metaleo.learners.registry import UNTRAINED

        if self.out.suffix != ".safetensors":
            raise BadInput(f"{self.out}: a task file's name ends in .safetensors")
        if self.out.exists() and read_header(self.out).get("kind") != "task":
            raise BadInput(f"{self.out} exists and is no task file; choose another --out")
        check_writable(self.out)
        untrained = str(self.model) in UNTRAINED
        header = {} if untrained else find_model(self.model).header
        network = self.network or header.get("network")
        views = self.views or header.get("views", "centre")
        table = read_examples(self.support, network, views, self.label, self.ignore).labelled()
        if table.splits is not None and len(set(table.splits)) > 1:
            console.print(f"the rows of all splits are used: {', '.join(sorted(set(table.splits)))}")
        if not table.labels:
            raise BadInput(
                f"{self.support} has no labels; the examples to learn from need a column `label` (or --label)"
            )
        model = find_model(self.model, table.vectors.shape[1])
        if table.vectors.shape[1] != model.structure.dim:
            raise BadInput(
                f"{self.support} has {table.vectors.shape[1]} numbers per example, and {self.model} was trained on "
                f"{model.structure.dim}: train a model of your own (`metaleo train --data`), or take nearest-centroid, "
                "which needs no training"
            )
        found = adapt(model, table.vectors, table.labels)
        about = {"model": str(self.model), "columns": list(table.columns)}
        if network is not None:
            known = network in BUILTIN_BACKBONES and not Path(network).exists()
            about |= {"network": network if known else str(Path(network).resolve()), "views": views}
        found = dataclasses.replace(found, about={**found.about, **about})
        found.save(self.out)
        counts = dict(zip(found.classes, found.about["examples"], strict=True))
        shown = ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:10])
        more = f", and {len(counts) - 10} more" if len(counts) > 10 else ""
        console.print(f"{len(counts)} classes: {shown}{more}", markup=False, soft_wrap=True)
        console.print(f"{self.out}; predict with:\n  metaleo predict {self.out} QUERY", markup=False, soft_wrap=True)
        if self.json:
            made = {"task": str(self.out), "model": str(self.model), "classes": counts}
            print(json.dumps({**made, "temperature": found.temperature}, indent=2))
