"""Jointly learned features: the last stage of a small backbone, trained further on the meta-objective."""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.errors import BadInput
from metaleo.features.backbone import Convolution, Moments, Norm, Pass, pool
from metaleo.features.backbone_files import BackboneFile
from metaleo.features.conv4 import Conv4, Stage
from metaleo.learners.base import Adaptation, HyperParams, Learner, Metrics
from metaleo.nn.heads import Head
from metaleo.tasks.task import Batch, Task, normalise

Sizes = tuple[int, int, int, int]
"""Height, width and channels of a tail's input, and its number of output channels."""


class Tail(eqx.Module):
    """The last stage of a conv-4: maps the output of the stage before it to a feature vector of length one.

    Its normalisation uses the fixed moments of the trained network; they are not learned further.
    """

    stage: Stage
    moments: Moments
    shape: tuple[int, int, int] = eqx.field(static=True)

    @classmethod
    def init(cls, key: PRNGKeyArray, sizes: Sizes) -> "Tail":
        height, width, inputs, outputs = sizes
        stage = Stage(Convolution.init(key, inputs, outputs), Norm.init(outputs))
        return cls(stage, Moments.standard(outputs), (height, width, inputs))

    @classmethod
    def of(cls, network: BackboneFile) -> "Tail":
        """The last stage of a trained network."""
        backbone, moments = network.trained
        if not isinstance(backbone, Conv4):
            raise BadInput("only the last stage of a conv-4 can be trained on with `joint=`")
        stage, side = backbone.stages[-1], network.architecture.side // 8
        return cls(stage, moments[-1], (side, side, stage.convolution.weight.shape[2]))

    @property
    def sizes(self) -> Sizes:
        return *self.shape, len(self.stage.norm.scale)

    def __call__(self, inputs: Float[Array, "example flat"]) -> Float[Array, "example dim"]:
        fixed = jax.tree.map(jax.lax.stop_gradient, self.moments)
        return normalise(pool(self.stage(inputs.reshape(-1, *self.shape), Pass([fixed]))))


class TailedHead(Head):
    """A head on the output of a tail."""

    tail: Tail
    head: Head

    def __call__(self, x: Float[Array, " flat"]) -> Float[Array, " way"]:
        return self.head(self.tail(x[None])[0])


class Joint(Learner):
    """Any learner on the output of a tail that is learned with it (the paper's future work, Section 5)."""

    tail: Tail
    learner: Learner

    def seen(self, batch: Batch) -> Batch:
        """The batch with the tail applied to its inputs, for the inner learner."""
        return Batch(self.tail(batch.inputs), batch.targets, batch.mask)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        adaptation = self.learner.adapt(self.seen(support), hyper, key)
        return Adaptation(TailedHead(self.tail, adaptation.head), adaptation.trace)

    def meta_loss(self, task: Task, hyper: HyperParams, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Metrics]:
        return self.learner.meta_loss(Task(self.seen(task.support), self.seen(task.query)), hyper, key)

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return self.learner.regulariser(hyper)
