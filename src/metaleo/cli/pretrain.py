"""`metaleo pretrain`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from metaleo.cli.common import Switch, default_is, emit, list_unreadable, progress_bar, records, registry, tell
from metaleo.errors import BadInput
from metaleo.features.recipes import Architecture, Recipe, find_architecture, find_recipe, second_of_third_group

records[Architecture] = ("kind", "strides", "channels")
records[Recipe] = ("about",)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The flags that decide the defaults of all others."""

    backbone: str = "wrn-28-10"
    recipe: str = "paper"
    out: Path | None = None
    resume: Switch = False


@dataclasses.dataclass(frozen=True)
class Pretrain:
    """Train a backbone on the images of the training classes, for `metaleo embed` to turn images into features.

    Stage 1 of the paper: a WRN-28-10 learns to tell all training classes apart. SOURCE is a folder of class folders
    (train/, val/ and test/ above them split the classes), a CSV of filename,label,split, a file of `metaleo pack`, or a
    known benchmark: miniimagenet:DIR, tieredimagenet:DIR, cifar-fs:DIR, fc100:DIR, omniglot:DIR; omniglot-sample comes
    with this package. The run folder holds the backbone, the metrics and all that is needed to resume. With validation
    classes, each report includes the accuracy of nearest centroids on them.

    Try:
      metaleo pretrain --images miniimagenet:images/ --out runs/wrn
      metaleo pretrain --images miniimagenet:images/ --recipe best --out runs/best
      metaleo pretrain --images my-photos/ --backbone wrn-16-4 --epochs 60
      metaleo pretrain --images omniglot-sample --backbone conv-4 --recipe omniglot
      metaleo pretrain --resume --out runs/wrn
    """

    images: Annotated[str | None, default_is("none; with --resume, where they were")] = None
    """Where the images are: SOURCE, see above."""
    backbone: str = Selection.backbone
    """Which network: wrn-28-10 (the paper's), wrn-28-10-small-images (32 x 32), wrn-16-4, conv-4."""
    recipe: str = Selection.recipe
    """How it is trained (`metaleo list recipes`); it decides the defaults below."""
    epochs: Annotated[int | None, default_is("as --steps says")] = None
    """Passes over the training images, instead of --steps."""
    seed: int = 0
    """Seed of all randomness."""
    out: Annotated[Path | None, default_is("runs/BACKBONE-RECIPE", aliases=["-o"])] = None
    """Run folder."""
    resume: Switch = False
    """Continue the run in --out, here or on another machine, which rounds otherwise; --images may be elsewhere now."""
    overwrite: Switch = False
    """Replace the run in --out."""
    json: Switch = False
    """Print the last report as JSON."""
    hold_out: float = 0.05
    """Share of each training class that is held out, to validate the backbone."""
    reports: int = 20
    """How often the run is validated and saved."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """What to compute in; auto is bfloat16 on accelerators."""
    training: Annotated[Recipe, tyro.conf.arg(name="recipe")] = find_recipe(Selection.recipe)
    architecture: Annotated[Architecture, tyro.conf.arg(name="backbone")] = find_architecture(Selection.backbone)

    @classmethod
    def defaults(cls, arguments: list[str]) -> "Pretrain":
        """What holds where nothing else is said: the values of the recipe and the backbone, or of the run to resume."""
        asked = [argument for argument in arguments if argument not in ("-h", "--help")]
        chosen, _ = tyro.cli(
            Selection, prog="metaleo pretrain", args=asked, return_unknown_args=True, registry=registry,
            config=(tyro.conf.DisallowNone,),
        )  # fmt: skip
        if chosen.resume and chosen.out is not None:
            return cls.of(chosen.out)
        return cls(training=find_recipe(chosen.recipe), architecture=find_architecture(chosen.backbone))

    @classmethod
    def of(cls, folder: Path) -> "Pretrain":
        """The flags that mean the run in a folder."""
        from metaleo.features.recipes import PretrainConfig

        config = PretrainConfig.read(folder / "config.json")
        return cls(
            seed=config.seed, out=folder, hold_out=config.hold_out, reports=config.reports,
            training=config.recipe, architecture=config.architecture,
        )  # fmt: skip

    def resolve(self, source: str, images: Any) -> Any:
        """The whole configuration, checked."""
        import jax

        from metaleo.features.pretrain import split_training
        from metaleo.features.recipes import PretrainConfig

        named = find_architecture(self.backbone)
        architecture = dataclasses.replace(self.architecture, channels=images.channels)
        if architecture.depth != named.depth and architecture.layer == named.layer:
            architecture = dataclasses.replace(architecture, layer=second_of_third_group(architecture.depth))
        recipe = self.training
        if self.epochs is not None:
            if recipe.steps != find_recipe(self.recipe).steps:
                raise BadInput("--steps and --epochs say the same thing; give one of them")
            split = split_training(images, self.hold_out, self.seed)
            count = int((~split.held_out).sum())
            recipe = dataclasses.replace(recipe, steps=self.epochs * max(count // min(recipe.batch, count), 1))
        half = self.precision == "bfloat16" or (self.precision == "auto" and jax.default_backend() != "cpu")
        config = PretrainConfig(source, architecture, recipe, self.hold_out, self.reports, self.seed, half)
        config.check()
        return config

    def resumed(self) -> Any:
        """The configuration of the run in --out."""
        from metaleo.features.recipes import PretrainConfig

        if self.overwrite:
            raise BadInput("--resume keeps a run and --overwrite replaces it; give one of them")
        if self.out is None:
            raise BadInput("--resume needs --out, the run to go on with")
        if dataclasses.replace(self, images=None, resume=False, json=False) != Pretrain.of(self.out):
            raise BadInput("a resumed run keeps its own configuration; only --images may change")
        return PretrainConfig.read(self.out / "config.json")

    def run(self) -> None:
        from metaleo._io.run_log import claim_run_folder, owned
        from metaleo.features.datasets import open_images
        from metaleo.features.images import check_image_classes
        from metaleo.features.pretrain_run import PretrainRun

        known = self.resumed() if self.resume else None
        if known is None and self.images is None:
            raise BadInput("--images is needed: where the training images are")
        folder = self.out or Path(f"runs/{self.backbone}-{self.recipe}")
        source = self.images or (known.images if known else "")
        images = open_images(source) if not self.resume else open_images(packed_or(source, folder))
        check_image_classes(images.subset("train"), 2)
        config = known or self.resolve(absolute(source), images)
        PretrainRun(config, folder, images)  # bad data says so before the folder is touched
        if not self.resume:
            claim_run_folder(folder, config.to_json(), self.overwrite)
        with owned(folder):
            self.train(config, folder, source, images)

    def train(self, config: Any, folder: Path, source: str, images: Any) -> None:
        """Train to the end, and say how it went."""
        from metaleo.errors import Interrupted
        from metaleo.features.pretrain_run import PretrainRun

        tell(f"{source}: {images.describe()}")
        images = quick(images, folder)
        run = PretrainRun(config, folder, images)
        with progress_bar() as progress:
            bar = progress.add_task(folder.name, total=config.recipe.steps, note="compiling …")
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
                tell(f"stopped and saved; go on with:\n  metaleo pretrain --resume --out {folder}")
                raise
        last = last_record(folder)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in last.items() if value is not None)
        emit({"run": str(folder), "config": config.to_json(), "last": last}, self.json, f"{folder}: {shown}")
        tell(f"features with:\n  metaleo embed {folder} --images {source}")


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
