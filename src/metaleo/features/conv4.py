"""Conv-4, the four-layer convolutional network of the first few-shot papers: small enough for a CPU."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.features.backbone import Backbone, Convolution, Norm, Pass, relu


class Stage(eqx.Module):
    """Convolution, norm, ReLU and 2 x 2 max pooling."""

    convolution: Convolution
    norm: Norm

    def __call__(self, values: Float[Array, "image h w input"], through: Pass) -> Float[Array, "image h2 w2 output"]:
        values = relu(through.norm(self.norm, self.convolution(values)))
        image, height, width, channel = values.shape
        values = values[:, : height // 2 * 2, : width // 2 * 2].reshape(image, height // 2, 2, width // 2, 2, channel)
        values = jnp.maximum(values[:, :, 0], values[:, :, 1])  # the gradient of `max` divides by a count that may be 0
        return jnp.maximum(values[:, :, :, 0], values[:, :, :, 1])


class Conv4(Backbone):
    """Four stages of `width` channels; layers 1 to 4 are their outputs after pooling."""

    stages: list[Stage]

    @classmethod
    def init(cls, key: PRNGKeyArray, width: int = 64, channels: int = 3) -> "Conv4":
        inputs = (channels, width, width, width)
        keys = jax.random.split(key, 4)
        sizes = zip(keys, inputs, strict=True)
        return cls([Stage(Convolution.init(each, size, width), Norm.init(width)) for each, size in sizes])

    @property
    def dim(self) -> int:
        return self.stages[-1].norm.scale.shape[0]

    @property
    def layers(self) -> tuple[int, ...]:
        return 1, 2, 3, 4

    def __call__(self, images: Float[Array, "image height width channel"], through: Pass) -> None:
        values = images
        for index, stage in enumerate(self.stages):
            values = stage(through.mix(index, values) if index < self.MIX_SITES else values, through)
            through.tap(index + 1, "rectified", values)
