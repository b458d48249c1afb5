"""Wide residual networks (Zagoruyko and Komodakis 2016); the paper uses WRN-28-10 with stride 2 in all three groups.

Layers are counted as in the paper: the first convolution is layer 1, and each block has two layers. In WRN-28-10 the
blocks of the third group end in layers 19, 21, 23 and 25; the paper's features are the 640 channels of layer 21.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.features.backbone import Backbone, Convolution, Norm, Pass, relu


class Block(eqx.Module):
    """A residual block: norm, ReLU, convolution, norm, ReLU, dropout and convolution, added to the input."""

    norm1: Norm
    convolution1: Convolution
    norm2: Norm
    convolution2: Convolution
    shortcut: Convolution | None

    @classmethod
    def init(cls, key: PRNGKeyArray, inputs: int, outputs: int, stride: int) -> "Block":
        keys = jax.random.split(key, 3)
        same = inputs == outputs and stride == 1
        return cls(
            Norm.init(inputs),
            Convolution.init(keys[0], inputs, outputs, stride=stride),
            Norm.init(outputs),
            Convolution.init(keys[1], outputs, outputs),
            None if same else Convolution.init(keys[2], inputs, outputs, size=1, stride=stride),
        )

    def __call__(
        self, raw: Float[Array, "image h w input"], rectified: Float[Array, "image h w input"], through: Pass
    ) -> Float[Array, "image h2 w2 output"]:
        """Apply the block; `rectified` is relu(norm1(raw)), which is also the feature of the previous layer."""
        middle = relu(through.norm(self.norm2, self.convolution1(rectified)))
        change = self.convolution2(through.dropout(middle))
        return change + (raw if self.shortcut is None else self.shortcut(rectified))


class WideResNet(Backbone):
    """WRN-depth-width: a convolution, three groups of (depth - 4) / 6 blocks, and a norm."""

    stem: Convolution
    groups: list[list[Block]]
    norm: Norm

    @classmethod
    def init(
        cls,
        key: PRNGKeyArray,
        depth: int = 28,
        width: int = 10,
        strides: tuple[int, int, int] = (2, 2, 2),
        channels: int = 3,
    ) -> "WideResNet":
        per_group = (depth - 4) // 6
        stem_key, *keys = jax.random.split(key, 1 + 3 * per_group)
        groups, inputs = [], 16
        for group, stride in enumerate(strides):
            outputs, blocks = 16 * width * 2**group, []
            for block in range(per_group):
                block_key = keys[group * per_group + block]
                blocks.append(Block.init(block_key, inputs, outputs, stride if block == 0 else 1))
                inputs = outputs
            groups.append(blocks)
        return cls(Convolution.init(stem_key, channels, 16), groups, Norm.init(inputs))

    @property
    def dim(self) -> int:
        return self.norm.scale.shape[0]

    @property
    def layers(self) -> tuple[int, ...]:
        blocks = sum(len(group) for group in self.groups)
        return tuple(range(1, 2 * blocks + 2, 2))

    def __call__(self, images: Float[Array, "image height width channel"], through: Pass) -> None:
        values, layer = self.stem(images), 1
        for site, group in enumerate(self.groups):
            values = through.mix(site, values)
            for block in group:
                rectified = relu(through.norm(block.norm1, values))
                through.tap(layer, "raw", values)
                through.tap(layer, "rectified", rectified)
                values, layer = block(values, rectified, through), layer + 2
        through.tap(layer, "raw", values)
        through.tap(layer, "rectified", relu(through.norm(self.norm, values)))
