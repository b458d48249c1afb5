"""A pre-training run and its folder; a run can be monitored, stopped, killed and resumed, also on other hardware.

RUN/config.json           everything that determines the result
RUN/metrics.jsonl         one line per report
RUN/state.safetensors     everything needed to resume, to the same bits on the same hardware
RUN/network.safetensors   the network at the last report
RUN/images.safetensors    the packed images, unless the source is packed already
"""

import dataclasses
import reprlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from metaleo._io.files import damaged, load_tree, read_header, save_tree
from metaleo._io.run_log import MetricsLog, Record, finite_or_none, owned, stop_signals
from metaleo._jax.devices import memory_bytes, rounding, warn_of_other_rounding
from metaleo.errors import BadInput, Interrupted
from metaleo.features.backbone_files import BackboneFile, save_backbone
from metaleo.features.images import Images
from metaleo.features.pretrain import (
    Batches,
    PretrainedNetwork,
    Pretraining,
    PretrainState,
    dials,
    padded,
    split_training,
)
from metaleo.features.recipes import PretrainConfig

LOOK = 25
"""Number of steps between two synchronisations with the device."""

Probe = Callable[[BackboneFile], dict[str, float]]
"""A function that measures a network at each report."""


@dataclasses.dataclass
class Sums:
    """Diagnostics of some steps, added up."""

    steps: int = 0
    sums: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, infos: list[dict[str, Any]]) -> None:
        self.steps += len(infos)
        for info in infos:
            for name, value in info.items():
                self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def means(self) -> dict[str, float | None]:
        return {name: finite_or_none(value / self.steps) for name, value in self.sums.items()}


class PretrainRun:
    """One run on the training classes of images that are packed or otherwise fast to read."""

    def __init__(self, config: PretrainConfig, folder: Path, images: Images):
        self.config, self.folder = config, folder
        names = [name for name, split in zip(images.class_names, images.splits, strict=True) if split == "train"]
        if len(names) < 2:
            raise BadInput(f"{config.images} has {len(names)} training classes; at least 2 are needed")
        if images.channels != config.architecture.channels:
            raise BadInput(
                f"the images have {images.channels} channels, the network takes {config.architecture.channels}"
            )
        self.class_names = tuple(names)
        self.images = images
        split = split_training(images, config.hold_out, config.seed)
        self.rows, self.labels = split.rows[~split.held_out], split.labels[~split.held_out]
        self.held_rows, self.held_labels = split.rows[split.held_out], split.labels[split.held_out]
        self.work = Pretraining.of(config.architecture, config.recipe, len(names), config.half)
        self.init_key, self.key = jax.random.split(jax.random.key(config.seed))

    def batches(self) -> Batches:
        """Return the batches: on the device if the pixels need less than a third of its memory, otherwise from disk."""
        size = len(self.rows) * self.images.side**2 * self.images.channels
        recipe, seed = self.config.recipe, self.config.seed
        return Batches(self.images, self.rows, self.labels, recipe.batch, seed, size < memory_bytes() / 3)

    def start(self) -> PretrainState:
        return jax.jit(self.work.start)(self.init_key)

    def load(self) -> tuple[PretrainState, Sums]:
        """Load the last saved state, or the initial state if there is none."""
        path = self.folder / "state.safetensors"
        if not path.is_file():
            return self.start(), Sums()
        header = read_header(path)
        since = header.get("since_report", {})  # version 0.1 did not save it
        steps, sums = since.get("steps", 0), since.get("sums", {})
        with damaged(path, "file"):
            if type(steps) is not int or not isinstance(sums, dict) or {type(one) for one in sums.values()} - {float}:
                raise BadInput(f"since_report should be a number of steps and sums, not {reprlib.repr(since)}")
        warn_of_other_rounding(path, header)
        return load_tree(path, jax.eval_shape(self.start)), Sums(steps, sums)

    def save(self, state: PretrainState, record: Record, since: Sums) -> None:
        """Save the network, and then the state: what a kill leaves in between is made again from the state before."""
        network = self.file(state.result, record)
        save_backbone(self.folder / "network.safetensors", network.trained, network.architecture, network.header)
        header = {"kind": "pretraining", "since_report": vars(since), **rounding()}
        save_tree(self.folder / "state.safetensors", state, header)

    def file(self, network: PretrainedNetwork, record: Record) -> BackboneFile:
        """Return the network as it is saved: without its heads, and with the run's configuration in the header."""
        header = {"config": self.config.to_json(), "classes": self.class_names, "record": record}
        header["image_side"] = self.images.side
        return BackboneFile(network.trained, self.config.architecture, header)

    def held_out_accuracy(self, network: PretrainedNetwork) -> float | None:
        """Return the accuracy of classifying held-out images among all training classes; `None` without such images."""
        right, batch = 0, 256
        for start in range(0, len(self.held_rows), batch):
            labels = self.held_labels[start : start + batch]
            pixels, _ = self.images.read(self.held_rows[start : start + batch])
            guesses = np.asarray(self.work.logits(network, padded(pixels, batch))).argmax(1)[: len(labels)]
            right += int((guesses == labels).sum())
        return finite_or_none(right / len(self.held_rows)) if len(self.held_rows) else None

    def train(
        self, report: Callable[[Record], None], watch: Callable[[int, float], None], probe: Probe | None = None
    ) -> PretrainState:
        """Train from the last saved state to the end.

        `report` receives the record of every report; `watch`, every few steps, the step and the images per second.
        """
        with owned(self.folder):
            return self.train_alone(report, watch, probe)

    def train_alone(
        self, report: Callable[[Record], None], watch: Callable[[int, float], None], probe: Probe | None
    ) -> PretrainState:
        """`train`, in a folder that no other process writes to."""
        steps = self.config.recipe.steps
        state, since_report = self.load()
        step = int(state.step)
        log = MetricsLog(self.folder / "metrics.jsonl", step)
        batches = self.batches()
        every = max(steps // self.config.reports, 1)
        infos: list[dict[str, Any]] = []
        clock, since = time.monotonic(), step
        with stop_signals() as asked_to_stop:
            for images, labels in batches.start(step, steps):
                state, info = self.work.step(state, images, labels, self.key, dials(self.config.recipe, step))
                infos.append(info)
                step += 1
                due = step % every == 0 or step == steps
                if step % LOOK and not due:
                    continue
                infos = jax.device_get(infos)  # waits for the device
                since_report.add(infos)
                rate = (step - since) * batches.batch / (time.monotonic() - clock)
                watch(step, rate)
                if not np.isfinite(infos[-1]["loss"]):
                    raise BadInput(
                        f"the loss is NaN or Inf by step {step}; lower `learning_rate=`. The last report is saved"
                    )
                if due:
                    record = {"step": step, "epoch": round(step / batches.per_epoch, 2), **since_report.means()}
                    since_report = Sums()
                    record |= self.validate(state, probe) | {"images_per_second": round(rate)}
                    log.write([record])
                    self.save(state, record, since_report)
                    report(record)
                elif asked_to_stop:
                    self.save(state, {}, since_report)
                if asked_to_stop and step < steps:
                    raise Interrupted
                infos, clock, since = [], time.monotonic(), step
        return state

    def validate(self, state: PretrainState, probe: Probe | None) -> Record:
        """Return the learning rate, the held-out accuracy and the results of `probe`."""
        network = state.result
        values = {
            "learning_rate": finite_or_none(dials(self.config.recipe, int(state.step)).learning_rate),
            "held_out_accuracy": self.held_out_accuracy(network),
        }
        found = {} if probe is None else probe(self.file(network, {}))
        return values | {name: finite_or_none(value) for name, value in found.items()}
