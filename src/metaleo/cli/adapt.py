"""`metaleo adapt`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from metaleo.cli.common import Columns, Out, Switch, check_new, default_is, emit, tell
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
      metaleo adapt runs/mine support.csv
      metaleo adapt miniimagenet support.npz --out birds.safetensors
      metaleo adapt nearest-centroid support.parquet --label intent
      metaleo adapt omniglot my-symbols/
      metaleo adapt runs/birds photos/ --backbone runs/wrn --overwrite
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Which model."""
    support: Annotated[Path, tyro.conf.Positional]
    """The labelled examples."""
    out: Out = Path("task.safetensors")
    """Task file to write."""
    overwrite: Switch = False
    """Replace the file in --out."""
    label: Annotated[str | None, default_is("label")] = None
    """Column of the labels."""
    ignore: Columns = ()
    """Columns of numbers that are no part of the vector."""
    backbone: Annotated[str | None, default_is("the one that belongs to the model")] = None
    """For images: the network that turns them into vectors."""
    views: Annotated[Literal["centre", "multi"] | None, default_is("as for the model's features")] = None
    """For images: the centre crop, or the average over ten crops."""
    json: Switch = False
    """Print what was made as JSON."""

    def run(self) -> None:
        from metaleo.data.tables import warn_of_oddities
        from metaleo.estimators.classifier import adapt, find_model
        from metaleo.estimators.examples import read_examples
        from metaleo.features.backbone_files import BUILTIN_BACKBONES
        from metaleo.learners.registry import UNTRAINED

        check_new(self.out, self.overwrite, ".safetensors")
        untrained = str(self.model) in UNTRAINED
        header = {} if untrained else find_model(self.model).header
        backbone = self.backbone or header.get("network")
        views = self.views or header.get("views", "centre")
        whole = read_examples(self.support, backbone, views, self.label, self.ignore)
        table = whole.labelled()
        if table.splits is not None and len(set(table.splits)) > 1:
            tell(f"the rows of all splits are used: {', '.join(sorted(set(table.splits)))}")
        if not table.labels:
            raise BadInput(
                f"{self.support} has no labels; the examples to learn from need a column `label` (or --label)"
            )
        warn_of_oddities(whole, self.support)
        model = find_model(self.model, table.vectors.shape[1])
        if table.vectors.shape[1] != model.structure.dim:
            raise BadInput(
                f"{self.support} has {table.vectors.shape[1]} numbers per example, and {self.model} was trained on "
                f"{model.structure.dim}: train a model of your own (`metaleo train --data`), or take nearest-centroid, "
                "which needs no training"
            )
        found = adapt(model, table.vectors, table.labels)
        about = {"model": str(self.model), "columns": list(table.columns)}
        if backbone is not None:
            known = backbone in BUILTIN_BACKBONES and not Path(backbone).exists()
            about |= {"network": backbone if known else str(Path(backbone).resolve()), "views": views}
        found = dataclasses.replace(found, about={**found.about, **about})
        found.save(self.out)
        counts = dict(zip(found.classes, found.about["examples"], strict=True))
        shown = ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:10])
        more = f", and {len(counts) - 10} more" if len(counts) > 10 else ""
        made = {"task": str(self.out), "model": str(self.model), "classes": counts, "temperature": found.temperature}
        emit(made, self.json, f"{self.out}: {len(counts)} classes: {shown}{more}")
        tell(f"predict with:\n  metaleo predict {self.out} QUERY")
