"""`metaleo pack`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import Int, console, list_unreadable, progress_bar
from metaleo.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Pack:
    """Put images into one file, at one size, from which they are read faster than they can be used.

    SOURCE is a folder of class folders (in train/, val/ and test/, or all of them train), a .csv file of
    filename,label,split, a folder with train.csv, val.csv and test.csv, or a known benchmark as NAME:FOLDER:
    miniimagenet, tieredimagenet, cifar-fs, fc100, omniglot (also turned by 90, 180 and 270 degrees), omniglot-lake.
    A benchmark is checked against its published counts. Images that cannot be read are left out, and named. Memory
    stays bounded, whatever their number.

    Try:
      metaleo pack miniimagenet:downloads/mini --out mini.safetensors
      metaleo pack photos/ --out photos.safetensors --side 84
      metaleo pack tieredimagenet:imagenet/train --out tiered.safetensors --json
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Where the images are."""
    out: Path
    """Packed file to write (.safetensors)."""
    side: Int = None
    """Pixels of a side (84, or the benchmark's own)."""
    overwrite: bool = False
    """Replace the file in --out."""
    json: bool = False
    """Print the result as JSON on standard output."""

    def run(self) -> None:
        from metaleo.features.datasets import open_images
        from metaleo.features.images import pack

        if self.out.suffix != ".safetensors":
            raise BadInput(f"{self.out}: a packed file's name ends in .safetensors")
        if self.out.exists() and not self.overwrite:
            raise BadInput(f"{self.out} exists; replace it with --overwrite, or choose another --out")
        images = open_images(self.source, self.side)
        console.print(f"{self.source}: {images.describe()}", markup=False, soft_wrap=True)
        with progress_bar() as progress:
            bar = progress.add_task("pack", total=len(images), note="")
            try:
                packed = pack(images, self.out, lambda done: progress.update(bar, completed=done))
            except KeyboardInterrupt:
                progress.stop()
                console.print(f"stopped; {self.out} was not written", markup=False)
                raise SystemExit(130) from None
        list_unreadable(images.unreadable)
        console.print(f"{self.out}: {packed.describe()}", markup=False, soft_wrap=True)
        if self.json:
            counts = {split: packed.splits.count(split) for split in ("train", "val", "test")}
            sizes = {"images": len(packed), "classes": counts, "side": packed.side, "channels": packed.channels}
            print(json.dumps({"file": str(self.out)} | sizes | {"unreadable": images.unreadable}, indent=2))
