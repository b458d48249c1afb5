"""`metaleo pretrain`."""

import dataclasses
import json
from pathlib import Path

from metaleo.cli.common import Float, Int, Place, Text, YesNo, console, given, list_unreadable, progress_bar
from metaleo.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Pretrain:
    """Train a network on the images of the training classes, for `metaleo embed` to turn images into features.

    Stage 1 of the paper: a WRN-28-10 learns to tell all training classes apart. SOURCE is a folder of class folders
    (train/, val/ and test/ above them split the classes), a CSV of filename,label,split, a file of `metaleo pack`, or
    a known benchmark: miniimagenet:DIR, tieredimagenet:DIR, cifar-fs:DIR, fc100:DIR, omniglot:DIR; omniglot-sample is
    inside this package. The run folder holds the network, the metrics and all that is needed to go on. If there are
    validation classes, each report also says how well a nearest-centroid classifier does on them.

    Try:
      metaleo pretrain --images miniimagenet:images/ --out runs/wrn
      metaleo pretrain --images miniimagenet:images/ --recipe best --out runs/best
      metaleo pretrain --images my-photos/ --network wrn-16-4 --epochs 60
      metaleo pretrain --images omniglot-sample --network conv-4 --recipe omniglot
      metaleo pretrain --resume --out runs/wrn
    """

    images: Text = None
    """Where the images are: SOURCE, see above."""
    network: str = "wrn-28-10"
    """Which backbone: wrn-28-10 (the paper's), wrn-28-10-small-images (32 x 32), wrn-16-4, conv-4."""
    recipe: str = "paper"
    """How it is trained; a wrong name lists all."""
    out: Place = None
    """Run folder (runs/<network>-<recipe>)."""
    resume: bool = False
    """Go on with the run in --out, here or on another machine; --images may be somewhere else now."""
    overwrite: bool = False
    """Replace the run in --out."""
    seed: int = 0
    """Of everything random."""
    json: bool = False
    """Print the last report as JSON on standard output."""

    steps: Int = None
    """Steps of SGD (the recipe's)."""
    epochs: Int = None
    """The same, as passes over the training images."""
    batch: Int = None
    """Images per step (the recipe's)."""
    hold_out: float = 0.05
    """Share of each training class that is held out, to judge the network by."""
    reports: int = 20
    """How often the run is judged and saved."""
    half: YesNo = None
    """Compute in bfloat16 (on accelerators)."""
    depth: Int = None
    """Of a wide residual network (the network's)."""
    width: Int = None
    """Of a wide residual network; channels of a conv-4 (the network's)."""
    side: Int = None
    """Pixels of a side as the network sees it (the network's)."""

    learning_rate: Float = None
    """At its highest (the recipe's)."""
    l2: Float = None
    """Weight of the L2 term (the recipe's)."""
    keep_prob: Float = None
    """Probability that dropout in the blocks keeps a number (the recipe's)."""
    least_area: Float = None
    """Smallest share of an image that a random crop takes (the recipe's)."""
    smoothing: Float = None
    """Label smoothing (the recipe's)."""
    mixup: Float = None
    """α of manifold mixup, 0 for none (the recipe's)."""
    rotation: Float = None
    """Weight of telling by how many quarters an image was turned, 0 for none (the recipe's)."""
    average: Float = None
    """Decay of the running average of the weights, 0 for none (the recipe's)."""

    def resolve(self, source: str, images):
        """The whole configuration: the recipe, then what was given."""
        import jax

        from metaleo.features.pretrain import split_training
        from metaleo.features.pretrain_run import PretrainConfig
        from metaleo.features.recipes import find_architecture, find_recipe, second_of_third_group

        architecture = find_architecture(self.network)
        changes = given(self, type(architecture)) | {"channels": images.channels}
        if self.depth is not None:
            changes["layer"] = second_of_third_group(self.depth)
        architecture = dataclasses.replace(architecture, **changes)
        recipe = find_recipe(self.recipe)
        recipe = dataclasses.replace(recipe, **given(self, type(recipe)))
        if self.epochs is not None:
            if self.steps is not None:
                raise BadInput("--steps and --epochs say the same thing; give one of them")
            split = split_training(images, self.hold_out, self.seed)
            count = int((~split.held_out).sum())
            recipe = dataclasses.replace(recipe, steps=self.epochs * max(count // min(recipe.batch, count), 1))
        half = jax.default_backend() != "cpu" if self.half is None else self.half
        config = PretrainConfig(source, architecture, recipe, self.hold_out, self.reports, self.seed, half)
        check_config(config)
        return config

    def run(self) -> None:
        from metaleo._io.run_log import claim_run_folder
        from metaleo.errors import Interrupted
        from metaleo.features.datasets import open_images
        from metaleo.features.images import check_image_classes
        from metaleo.features.pretrain_run import PretrainConfig, PretrainRun

        if self.resume and self.overwrite:
            raise BadInput("--resume keeps a run and --overwrite replaces it; give one of them")
        if self.resume and self.out is None:
            raise BadInput("--resume needs --out, the run to go on with")
        if not self.resume and self.images is None:
            raise BadInput("--images is needed: where the training images are")
        folder = self.out or Path(f"runs/{self.network}-{self.recipe}")
        known = PretrainConfig.read(folder / "config.json") if self.resume else None
        source = self.images or (known.images if known else "")
        images = open_images(source) if not self.resume else open_images(packed_or(source, folder))
        check_image_classes(images.subset("train"), 2)
        config = known or self.resolve(absolute(source), images)
        PretrainRun(config, folder, images)  # bad data says so before the folder is touched
        if not self.resume:
            claim_run_folder(folder, config.to_json(), self.overwrite)
        console.print(f"{source}: {images.describe()}")
        images = quick(images, folder)
        run = PretrainRun(config, folder, images)
        with progress_bar() as progress:
            bar = progress.add_task(self.network, total=config.recipe.steps, note="compiling …")
            notes = {"rate": "", "last": ""}

            def watch(step: int, rate: float) -> None:
                notes["rate"] = f"{rate:,.0f} images/s"
                progress.update(bar, completed=step, note=f"{notes['rate']}{notes['last']}")

            def report(record: dict) -> None:
                shown = [f"train {100 * record['accuracy']:.1f} %"]
                if record["held_out_accuracy"] is not None:
                    shown.append(f"held out {100 * record['held_out_accuracy']:.1f} %")
                if "centroid_1shot" in record:
                    shown.append(f"val {100 * record['centroid_1shot']:.1f} / {100 * record['centroid_5shot']:.1f} %")
                notes["last"] = " · " + " · ".join(shown)
                progress.update(bar, completed=record["step"], note=f"{notes['rate']}{notes['last']}")

            try:
                run.train(report, watch, make_probe(images))
            except Interrupted:
                progress.stop()
                console.print(f"stopped and saved; go on with:\n  metaleo pretrain --resume --out {folder}")
                raise
        last = last_record(folder)
        console.print(f"{folder}/network.safetensors; features with:\n  metaleo embed {folder} --images {source}")
        if self.json:
            print(json.dumps({"run": str(folder), "config": config.to_json(), "last": last}, indent=2))


def check_config(config) -> None:
    """Numbers that make no sense, in one line each."""
    recipe, architecture = config.recipe, config.architecture
    for name, value in (("steps", recipe.steps), ("batch", recipe.batch), ("reports", config.reports)):
        if value < 1:
            raise BadInput(f"--{name} must be at least 1, not {value}")
    if architecture.width < 1 or architecture.side < 16:
        raise BadInput("--width must be at least 1 and --side at least 16")
    if architecture.kind == "wrn" and (architecture.depth < 10 or (architecture.depth - 4) % 6):
        raise BadInput(f"--depth of a wide residual network is 6n + 4 (10, 16, 22, 28, …), not {architecture.depth}")
    for name, least, most in (
        ("keep_prob", 1 / 256, 1),
        ("smoothing", 0, 1),
        ("average", 0, 1),
        ("least_area", 0.01, 1),
    ):
        if not least <= getattr(recipe, name) <= most:
            shown = name.replace("_", "-")
            raise BadInput(f"--{shown} must be from {least:.3g} to {most}, not {getattr(recipe, name)}")
    for name in ("learning_rate", "l2", "mixup", "rotation"):
        if not 0 <= getattr(recipe, name) < float("inf"):
            raise BadInput(f"--{name.replace('_', '-')} must be a finite number of at least 0")
    if not 0 <= config.hold_out <= 0.9:
        raise BadInput(f"--hold-out is a share from 0 to 0.9, not {config.hold_out}")
    if config.seed < 0:
        raise BadInput(f"--seed cannot be negative, not {config.seed}")


def absolute(source: str) -> str:
    """A source that means the same from any folder."""
    from metaleo.features.datasets import SAMPLE

    if source == SAMPLE:
        return source
    name, colon, place = source.rpartition(":")
    return f"{name}{colon}{Path(place).resolve()}"


def packed_or(source: str, folder: Path) -> str | Path:
    """The images that the run has packed, if it has."""
    packed = folder / "images.safetensors"
    return packed if packed.is_file() else source


def quick(images, folder: Path):
    """The images in a form that can be read in any order at once: packed beside the run, unless they already are."""
    from metaleo.features.images import ArrayImages, PackedImages, pack

    if isinstance(images, PackedImages | ArrayImages):
        return images
    with progress_bar() as progress:
        bar = progress.add_task("packing images", total=len(images), note="")
        packed = pack(images, folder / "images.safetensors", lambda done: progress.update(bar, completed=done))
    list_unreadable(images.unreadable)
    return packed


def make_probe(images):
    """Accuracy of nearest centroids on tasks of the validation classes, at the network's layer; none without them."""
    import jax
    import numpy as np

    from metaleo.data.metaset import MetaSet
    from metaleo.evaluation.evaluate import score_learner
    from metaleo.features.embed import embed_slab
    from metaleo.learners import NearestCentroid
    from metaleo.tasks.episodes import Episodes

    rows = np.flatnonzero(np.array([split == "val" for split in images.splits])[images.labels])
    counts = np.unique(images.labels[rows], return_counts=True)[1]
    if len(counts) < 5 or counts.min() < 6:
        return None

    def probe(file) -> dict[str, float]:
        tap = (file.architecture.layer, "rectified")
        pixels, readable = images.read(rows)
        (features,) = embed_slab(file, pixels, jax.random.key(0), (tap,))
        labels = images.labels[rows][readable]
        metaset = MetaSet.from_labels(features[readable].astype(np.float32), labels, np.full(len(labels), "val"))
        episodes = {shot: Episodes.over(metaset, 5, shot, None) for shot in (1, 5)}
        return {
            f"centroid_{shot}shot": float(score_learner(NearestCentroid(), each, 0, 1000).accuracy.mean())
            for shot, each in episodes.items()
        }

    return probe


def last_record(folder: Path) -> dict:
    from metaleo._io.run_log import read_metrics

    return read_metrics(folder / "metrics.jsonl")[-1]
