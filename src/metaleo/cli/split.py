"""`metaleo split`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import Columns, Out, Switch, check_new, default_is, emit, tell
from metaleo.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Split:
    """Make a feature file of a table of your own, and choose which classes to learn from, to choose by and to test on.

    TABLE is as SUPPORT in `metaleo adapt`, vectors only. `metaleo train --data TABLE` does the same by itself, with
    the column `split` (train, val or test; one for each class) if there is one, and else seed 0; this is for other
    columns, seeds and shares, and it reads faster. Tasks of N classes need N classes in each split.

    Try:
      metaleo split sentences.csv --label intent --out features.safetensors
      metaleo split vectors.parquet --by domain-split --out features.safetensors
      metaleo split embedded.safetensors --again --seed 3 --shares 0.6 0.2 0.2 --out features.safetensors
    """

    table: Annotated[Path, tyro.conf.Positional]
    """The examples, with labels."""
    out: Out = Path("features.safetensors")
    """Feature file to write, .safetensors or .npz."""
    label: Annotated[str | None, default_is("label")] = None
    """Column of the labels."""
    by: Annotated[str | None, default_is("split, if there is one")] = None
    """Column that says train, val or test."""
    ignore: Columns = ()
    """Columns of numbers that are no part of the vector."""
    again: Switch = False
    """Split at random, whatever the file says."""
    seed: int = 0
    """Seed of the random split."""
    shares: tuple[float, float, float] = (0.64, 0.16, 0.2)
    """Of the classes, for train, val and test."""
    way: int = 5
    """Classes of the tasks to come: say so if there are too few."""
    overwrite: Switch = False
    """Replace the file in --out."""
    json: Switch = False
    """Print the classes of each split as JSON."""

    def run(self) -> None:
        from metaleo.data.feature_files import read_table, save_data
        from metaleo.data.tables import to_metaset, warn_of_oddities
        from metaleo.tasks.episodes import advice, check_enough

        check_new(self.out, self.overwrite, ".safetensors", ".npz")
        if min(self.shares) < 0 or not abs(sum(self.shares) - 1) <= 1e-6:
            raise BadInput(f"--shares are three parts of one, not {' '.join(map(str, self.shares))}")
        if self.by is not None and self.again:
            raise BadInput("--by takes the split from a column and --again makes a new one; give one of them")
        table = read_table(self.table, self.label, self.ignore)
        if self.by is not None:
            columns = {**table.beside, "split": table.splits}
            if columns.get(self.by) is None:
                raise BadInput(f"{self.table} has no column of text {self.by!r}")
            table = dataclasses.replace(table, splits=columns[self.by])
        elif self.again:
            table = dataclasses.replace(table, splits=None)
        metaset = to_metaset(table, self.seed, self.shares)
        warn_of_oddities(table, self.table)
        save_data(metaset, self.out)
        try:
            check_enough(metaset, self.way)
            told = advice(metaset, self.way)
        except BadInput as error:  # the file is good for other things
            told = str(error)
        classes = {
            split: [name for name, own in zip(metaset.class_names, metaset.splits, strict=True) if own == split]
            for split in ("train", "val", "test")
        }
        result = {"file": str(self.out), "classes": classes, "advice": told}
        emit(result, self.json, f"{self.out}: {metaset.describe()}")
        if told:
            tell(told)
        tell(f"meta-train on it with:\n  metaleo train --data {self.out}")
