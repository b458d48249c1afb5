"""Stage 1 of the paper: train a backbone as an ordinary classifier of all training classes at once.

A training step is one compiled function of a state and a batch of pixels; a `Recipe` holds its hyper-parameters.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Int32, PRNGKeyArray, PyTree, UInt8

from metaleo.features.augment import crop, distort, mirror, random_boxes, scaled, turn, view_boxes
from metaleo.features.backbone import Backbone, Dense, Moments, Pass, pool
from metaleo.features.backbone_files import TrainedBackbone, blank_moments
from metaleo.features.images import Images
from metaleo.features.recipes import Architecture, Recipe

OPTIMISER = optax.trace(0.9, nesterov=True)
WARM = 0.05
"""Share of the steps spent on linear warm-up, where the learning rate follows a cosine."""
RUNNING = 0.1
"""Weight of each batch in the running moments."""


class Classifier(eqx.Module):
    """The trained parameters: a backbone, a linear head for classes and an optional one for rotations."""

    backbone: Backbone
    classes: Dense
    turns: Dense | None

    @classmethod
    def init(cls, key: PRNGKeyArray, architecture: Architecture, classes: int, turns: bool) -> "Classifier":
        backbone_key, class_key, turn_key = jax.random.split(key, 3)
        backbone = architecture.init(backbone_key)
        return cls(
            backbone,
            Dense.init(class_key, backbone.dim, classes),
            Dense.init(turn_key, backbone.dim, 4) if turns else None,
        )


class PretrainedNetwork(NamedTuple):
    """A classifier with the running moments of its norms, ready for inference."""

    classifier: Classifier
    moments: list[Moments]

    @property
    def trained(self) -> TrainedBackbone:
        return TrainedBackbone(self.classifier.backbone, self.moments)


class PretrainState(NamedTuple):
    """Everything needed to continue training."""

    step: Int[Array, ""]
    network: PretrainedNetwork
    optimiser: PyTree
    average: PretrainedNetwork | None
    """The running average of the network, if the recipe uses one."""

    @property
    def result(self) -> PretrainedNetwork:
        return self.network if self.average is None else self.average


class Dials(NamedTuple):
    """The numbers of a recipe that can change without recompilation."""

    learning_rate: Float[Array, ""]
    l2: Float[Array, ""]
    least_area: Float[Array, ""]
    colours: Float[Array, ""]
    smoothing: Float[Array, ""]
    mixup: Float[Array, ""]
    rotation: Float[Array, ""]
    average: Float[Array, ""]


def dials(recipe: Recipe, step: int) -> Dials:
    """Return the dials for one step: constant except the learning rate and, early on, the decay of the average."""
    passed = step / recipe.steps
    if recipe.drops:
        share = 0.2 ** sum(passed >= drop for drop in recipe.drops)
    else:
        share = min(passed / WARM, (1 + math.cos(math.pi * (passed - WARM) / (1 - WARM))) / 2)
    values = {name: getattr(recipe, name) for name in Dials._fields}
    values["learning_rate"] *= share
    values["average"] = min(recipe.average, (1 + step) / (10 + step))
    return Dials(**{name: np.float32(value) for name, value in values.items()})  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """The pure functions of a run; recipes that need the same code share one compilation."""

    architecture: Architecture
    classes: int
    half: bool
    """Compute in bfloat16; weights, moments and gradients stay float32."""
    keep_prob: float = 1.0
    mirrors: bool = True
    mixes: bool = False
    turns: bool = False
    averages: bool = False

    @classmethod
    def of(cls, architecture: Architecture, recipe: Recipe, classes: int, half: bool) -> "Pretraining":
        return cls(
            architecture,
            classes,
            half,
            recipe.keep_prob,
            recipe.mirrors,
            mixes=recipe.mixup > 0,
            turns=recipe.rotation > 0,
            averages=recipe.average > 0,
        )

    def start(self, key: PRNGKeyArray) -> PretrainState:
        classifier = Classifier.init(key, self.architecture, self.classes, self.turns)
        network = PretrainedNetwork(classifier, blank_moments(classifier.backbone, self.architecture))
        average = jax.tree.map(jnp.copy, network) if self.averages else None
        return PretrainState(jnp.int32(0), network, OPTIMISER.init(classifier), average)  # type: ignore[arg-type]

    def augmented(
        self, key: PRNGKeyArray, images: UInt8[Array, "image h w channel"], dials: Dials
    ) -> tuple[Float[Array, "image side side channel"], Int[Array, " image"]]:
        """Augment images at random (crop, mirror, colour, rotation); also return the quarter turns of each."""
        box_key, mirror_key, colour_key, turn_key = jax.random.split(key, 4)
        count = len(images)
        boxes = random_boxes(box_key, count, dials.least_area)
        values = crop(scaled(images), boxes, self.architecture.side)
        if self.mirrors:
            values = mirror(values, jax.random.bernoulli(mirror_key, shape=(count,)))
        values = distort(colour_key, values, dials.colours)
        quarters = jnp.zeros(count, jnp.int32)
        if self.turns:
            quarters = jax.random.randint(turn_key, (count,), 0, 4, jnp.int32)
            values = turn(values, quarters)
        return values, quarters

    def prepared(self, values: Float[Array, "image h w channel"]) -> Float[Array, "image h w channel"]:
        """Map pixels from [0, 1] to [-1, 1], in the precision of the run."""
        return (2 * values - 1).astype(jnp.bfloat16 if self.half else jnp.float32)

    def loss(
        self,
        classifier: Classifier,
        values: Float[Array, "image h w channel"],
        labels: Int[Array, " image"],
        quarters: Int[Array, " image"],
        key: PRNGKeyArray,
        dials: Dials,
    ) -> tuple[Float[Array, ""], tuple[list[Moments], dict[str, Array]]]:
        drop_key, mix_key, site_key = jax.random.split(key, 3)
        mixing, weight = None, jnp.float32(1)
        if self.mixes:
            weight = jax.random.beta(mix_key, dials.mixup, dials.mixup, dtype=jnp.float32)
            site = jax.random.randint(site_key, (), 0, Backbone.MIX_SITES)
            mixing = jnp.where(jnp.arange(Backbone.MIX_SITES) == site, weight, 1.0)
        through = Pass(key=drop_key, keep_prob=self.keep_prob, mixing=mixing)
        classifier.backbone(self.prepared(values), through)
        features = pool(through.taps[classifier.backbone.layers[-1], "rectified"])

        def price(head: Dense, targets: Int[Array, " image"], smoothing: Float[Array, ""]) -> tuple[Array, Array]:
            logits = head(features)
            wanted = jax.nn.one_hot(targets, logits.shape[1])
            if mixing is not None:
                wanted = weight * wanted + (1 - weight) * wanted[::-1]
            wanted = (1 - smoothing) * wanted + smoothing / logits.shape[1]
            return -(wanted * jax.nn.log_softmax(logits)).sum(1).mean(), (logits.argmax(1) == targets).mean()

        loss, accuracy = price(classifier.classes, labels, dials.smoothing)
        info = {"loss": loss, "accuracy": accuracy}
        if classifier.turns is not None:
            turn_loss, turn_accuracy = price(classifier.turns, quarters, jnp.float32(0))
            loss, info = loss + dials.rotation * turn_loss, info | {"turn_accuracy": turn_accuracy}
        return loss, (through.seen, info)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(
        self,
        state: PretrainState,
        images: UInt8[Array, "image h w channel"],
        labels: Int[Array, " image"],
        key: PRNGKeyArray,
        dials: Dials,
    ) -> tuple[PretrainState, dict[str, Float[Array, ""]]]:
        """Take one SGD step on a batch of pixels; `key` is the key of the whole run."""
        augment_key, loss_key = jax.random.split(jax.random.fold_in(key, state.step))
        values, quarters = self.augmented(augment_key, images, dials)
        classifier = state.network.classifier
        slope = jax.grad(self.loss, has_aux=True)
        gradient, (seen, info) = slope(classifier, values, labels, quarters, loss_key, dials)
        decayed = jax.tree.map(lambda g, w: g + dials.l2 * w if w.ndim > 1 else g, gradient, classifier)
        updates, optimiser = OPTIMISER.update(decayed, state.optimiser)
        classifier = jax.tree.map(lambda w, u: w - dials.learning_rate * u, classifier, updates)
        moments = jax.tree.map(lambda old, new: old + RUNNING * (new - old), state.network.moments, seen)
        network = PretrainedNetwork(classifier, moments)
        average = state.average
        if average is not None:
            average = jax.tree.map(lambda old, new: new + dials.average * (old - new), average, network)
        return PretrainState(state.step + 1, network, optimiser, average), info

    @functools.partial(jax.jit, static_argnums=0)
    def logits(
        self, network: PretrainedNetwork, images: UInt8[Array, "image h w channel"]
    ) -> Float[Array, "image class"]:
        """Return the class logits of the centre crops, with running moments and without dropout."""
        boxes = jnp.tile(view_boxes(self.architecture.share, multi=False), (len(images), 1))
        values = crop(scaled(images), boxes, self.architecture.side)
        through = Pass(network.moments)
        backbone = network.classifier.backbone
        backbone(self.prepared(values), through)
        return network.classifier.classes(pool(through.taps[backbone.layers[-1], "rectified"]))


class HeldOutSplit(NamedTuple):
    """Row numbers of the images of training classes, with labels that index these classes only."""

    rows: Int[np.ndarray, " image"]
    labels: Int32[np.ndarray, " image"]
    held_out: Bool[np.ndarray, " image"]


def split_training(images: Images, share: float, seed: int) -> HeldOutSplit:
    """Select the images of training classes and hold out a random share of each class from training."""
    is_training = np.array([split == "train" for split in images.splits])
    rows = np.flatnonzero(is_training[images.labels])
    labels = (np.cumsum(is_training) - 1)[images.labels[rows]].astype(np.int32)
    out = np.zeros(len(rows), bool)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        count = min(round(share * len(places)), len(places) - 1)
        out[np.random.default_rng([seed, int(label)]).permutation(places)[:count]] = True
    return HeldOutSplit(rows, labels, out)


def padded(images: UInt8[np.ndarray, "image h w channel"], count: int) -> UInt8[np.ndarray, "{count} h w channel"]:
    """Append black images, so that every batch has `count` images."""
    return np.concatenate([images, np.zeros((count - len(images), *images.shape[1:]), np.uint8)])


class Batches:
    """Batches of pixels and labels on the device, in an order that depends only on the seed and the step.

    Either all pixels are on the device, or a thread prefetches a few batches from disk.
    """

    def __init__(self, images: Images, rows: np.ndarray, labels: np.ndarray, batch: int, seed: int, on_device: bool):
        """Draw batches from these rows of the images; `labels` has one label per row."""
        self.images, self.rows, self.labels, self.seed = images, rows, labels.astype(np.int32), seed
        self.batch = min(batch, len(rows))
        self.per_epoch = len(rows) // self.batch
        self.resident = jax.device_put(images.read(rows)[0]) if on_device else None

    def order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))

    def chosen(self, step: int) -> Iterator[np.ndarray]:
        """Yield the positions in `rows` of each batch, from this step on."""
        while True:
            epoch, first = divmod(step, self.per_epoch)
            order = self.order(epoch)
            for index in range(first, self.per_epoch):
                yield order[index * self.batch : (index + 1) * self.batch]
            step = (epoch + 1) * self.per_epoch

    def start(self, step: int, steps: int) -> Iterator[tuple[Array, Array]]:
        """Yield the batches from step `step` up to `steps`, exclusive."""
        chosen = (each for each, _ in zip(self.chosen(step), range(steps - step), strict=False))
        if self.resident is None:
            yield from ahead(
                jax.device_put((self.images.read(self.rows[each])[0], self.labels[each])) for each in chosen
            )
        else:
            for each in chosen:
                yield take(self.resident, jnp.asarray(each, jnp.int32)), jnp.asarray(self.labels[each])


@jax.jit
def take(images: UInt8[Array, "n h w channel"], rows: Int[Array, " image"]) -> UInt8[Array, "image h w channel"]:
    return images.at[rows].get(mode="promise_in_bounds")


def ahead(items: Iterator[Any], depth: int = 3) -> Iterator[Any]:
    """Yield the same items, prefetched by a thread at most `depth` items ahead."""
    end = object()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        coming = collections.deque(pool.submit(next, items, end) for _ in range(depth))
        while (item := coming.popleft().result()) is not end:
            coming.append(pool.submit(next, items, end))
            yield item
