"""`metaleo embed`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from metaleo.cli.common import Out, Switch, check_new, default_is, emit, list_unreadable, progress_bar, tell
from metaleo.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Embed:
    """Turn images into features with a trained backbone: a file that `metaleo train` reads.

    Each image becomes the activations of one layer, averaged over space, of its centre crop (80/92 of its side), or
    with --views multi of the average over four corners and centre, each also mirrored. SOURCE is as in `metaleo
    pretrain`; a folder of your own needs class folders only. A killed export goes on where it was.

    Try:
      metaleo embed runs/wrn --images miniimagenet:images/ --out features.safetensors
      metaleo embed runs/wrn --images miniimagenet:images/ --views multi --out multi.safetensors
      metaleo embed runs/best --images miniimagenet:images/ --layer 23 25 --together
      metaleo embed network.safetensors --images my-photos/ --layer 21 25
    """

    backbone: Annotated[Path, tyro.conf.Positional]
    """Backbone file, or the folder of a pre-training run."""
    images: Annotated[str | None, default_is("those the backbone was trained on")] = None
    """Where the images are: SOURCE, see above."""
    out: Out = Path("features.safetensors")
    """Feature file, .safetensors; with several layers, -LAYER is put before its suffix."""
    layer: Annotated[tuple[int, ...], default_is("the backbone's: 21 in a WRN-28-10", metavar="INT [INT ...]")] = ()
    """Which layers to tap."""
    together: Switch = False
    """Add the layers into one vector, each scaled to length one first; of one size, as in a group of a WRN."""
    raw: Switch = False
    """Tap before the norm and ReLU instead of after."""
    views: Literal["centre", "multi"] = "centre"
    """The centre crop, or the average over four corners and centre, each also mirrored."""
    flat: Switch = False
    """All numbers of a layer, instead of their average over space."""
    augmented: int = 0
    """Add this many random views of each training image, as if they were images."""
    held_out: Switch = False
    """Of training classes, embed only those images that the backbone has not been trained on."""
    seed: int = 0
    """Seed of the random views."""
    overwrite: Switch = False
    """Replace the file in --out."""
    json: Switch = False
    """Print what was made as JSON."""

    def run(self) -> None:
        from metaleo.cli.pretrain import packed_or
        from metaleo.features.backbone_files import load_backbone
        from metaleo.features.datasets import open_images
        from metaleo.features.embed import Export, embed

        file = load_backbone(self.backbone)
        source = self.images
        if source is None:
            source = packed_or(file.header.get("config", {}).get("images", ""), self.backbone)
            if not source:
                raise BadInput("--images is needed: this backbone does not say what it was trained on")
        out = self.out
        layers = self.layer or (file.architecture.layer,)
        targets = (
            [out] if len(layers) == 1 or self.together else [out.with_stem(f"{out.stem}-{layer}") for layer in layers]
        )
        for target in targets:
            check_new(target, self.overwrite, ".safetensors")
        packed = str(source).endswith(".safetensors")
        side = None if packed else file.header.get("image_side")
        images = open_images(source, side, None if packed else file.architecture.channels)
        if images.channels != file.architecture.channels:
            raise BadInput(
                f"the images have {images.channels} channels, the network takes {file.architecture.channels}"
            )
        tell(f"{source}: {images.describe()}")
        export = Export(
            tuple((layer, "raw" if self.raw else "rectified") for layer in layers),
            self.views,
            self.flat,
            self.augmented,
            "held-out" if self.held_out else "all",
            self.together,
            self.seed,
        )
        total = sum(len(rows) for _, rows in export.passes(images, file))
        with progress_bar() as progress:
            bar = progress.add_task("embedding", total=total, note="compiling …")
            rows = embed(images, file, export, targets, lambda done: progress.update(bar, completed=done, note=""))
        list_unreadable(images.unreadable)
        made = {"files": [str(each) for each in targets], "rows": rows, "unreadable": images.unreadable}
        emit(made, self.json, f"{', '.join(made['files'])}: {rows:,} rows")
        tell(f"meta-train on it with:\n  metaleo train --data {targets[0]}")
