"""`metaleo pack`."""

import dataclasses
from typing import Annotated

import tyro

from metaleo.cli.common import Out, Switch, check_new, default_is, emit, list_unreadable, progress_bar, tell


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

    source: Annotated[str, tyro.conf.Positional]
    """Where the images are."""
    out: Out
    """Packed file to write (.safetensors)."""
    side: Annotated[int | None, default_is("84, or the benchmark's own")] = None
    """Pixels of a side."""
    overwrite: Switch = False
    """Replace the file in --out."""
    json: Switch = False
    """Print the result as JSON."""

    def run(self) -> None:
        from metaleo.features.datasets import open_images
        from metaleo.features.images import pack

        check_new(self.out, self.overwrite, ".safetensors")
        images = open_images(self.source, self.side)
        tell(f"{self.source}: {images.describe()}")
        with progress_bar() as progress:
            bar = progress.add_task("pack", total=len(images), note="")
            try:
                packed = pack(images, self.out, lambda done: progress.update(bar, completed=done))
            except KeyboardInterrupt:
                progress.stop()
                tell(f"stopped; {self.out} was not written")
                raise SystemExit(130) from None
        list_unreadable(images.unreadable)
        counts = {split: packed.splits.count(split) for split in ("train", "val", "test")}
        sizes = {"images": len(packed), "classes": counts, "side": packed.side, "channels": packed.channels}
        result = {"file": str(self.out)} | sizes | {"unreadable": images.unreadable}
        emit(result, self.json, f"{self.out}: {packed.describe()}")
