"""How fast a backbone trains, with the input pipeline on: images per second, and the share of a matmul's rate.

    python benchmarks/pretrain.py                          # the paper's network and recipe
    python benchmarks/pretrain.py --recipe best --steps 200

Images are noise of the size of miniImageNet's; batches are drawn, cropped, distorted and learned from as in a run.
Operations are those of the convolutions, three times the forward pass. The rate of a large matrix product in the
same precision is measured in the same run.
"""

import argparse
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from metaleo.features.backbone import Pass
from metaleo.features.images import PackedImages
from metaleo.features.pretrain import Batches, Pretraining, dials
from metaleo.features.recipes import find_architecture, find_recipe


def matmul_rate(half: bool, size: int, repeats: int = 20) -> float:
    """Operations per second of a large matrix product of random numbers."""
    dtype = jnp.bfloat16 if half else jnp.float32
    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in (0, 1))
    multiply = jax.jit(lambda a, b: (a @ b) / size)
    b = jax.block_until_ready(multiply(a, b))
    start = time.perf_counter()
    for _ in range(repeats):
        b = multiply(a, b)
    jax.block_until_ready(b)
    return 2 * size**3 * repeats / (time.perf_counter() - start)


def forward_operations(architecture) -> int:
    """Operations of the convolutions in one image's forward pass: two per weight and place."""
    image = jax.ShapeDtypeStruct((1, architecture.side, architecture.side, architecture.channels), jnp.float32)

    def forward(backbone, image):
        through = Pass()
        backbone(image, through)
        return through.taps[backbone.layers[-1], "rectified"]

    equations = jax.make_jaxpr(forward)(architecture.blank(), image).eqns
    convolutions = [each for each in equations if each.primitive.name == "conv_general_dilated"]
    return sum(2 * each.outvars[0].aval.size * int(np.prod(each.invars[1].aval.shape[:3])) for each in convolutions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="wrn-28-10")
    parser.add_argument("--recipe", default="paper")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--classes", type=int, default=64)
    parser.add_argument("--matmul", type=int, help="size of the matrix product (8192, or in float32 2048)")
    parser.add_argument("--streamed", action="store_true", help="read the images from host memory, not from the device")
    parser.add_argument("--float32", action="store_true", help="do not compute in bfloat16")
    parser.add_argument("--keep-prob", type=float)
    parser.add_argument("--mixup", type=float)
    parser.add_argument("--rotation", type=float)
    args = parser.parse_args()
    architecture, recipe = find_architecture(args.network), find_recipe(args.recipe)
    changes = {name: getattr(args, name) for name in ("batch", "keep_prob", "mixup", "rotation")}
    recipe = dataclasses.replace(recipe, **{name: value for name, value in changes.items() if value is not None})
    half = not args.float32 and jax.default_backend() != "cpu"
    side = round(84 * architecture.side / 80)
    random = np.random.default_rng(0)
    labels = (np.arange(args.images) % args.classes).astype(np.int32)
    pixels = random.integers(0, 256, (args.images, side, side, architecture.channels), np.uint8)
    names = tuple(map(str, range(args.classes)))
    images = PackedImages(
        labels=labels,
        class_names=names,
        splits=("train",) * len(names),
        names=[str(i) for i in range(args.images)],
        side=side,
        channels=architecture.channels,
        source="noise",
        pixels=pixels,
    )
    rows = np.arange(args.images)
    batches = Batches(images, rows, labels, recipe.batch, 0, on_device=not args.streamed)
    work = Pretraining.of(architecture, recipe, args.classes, half)
    state = jax.jit(work.start)(jax.random.key(0))
    start, warm = time.perf_counter(), 5
    for step, (batch, wanted) in enumerate(batches.start(0, warm + args.steps)):
        if step == warm:
            jax.block_until_ready(state)
            compiled, start = time.perf_counter() - start, time.perf_counter()
        state, info = work.step(state, batch, wanted, jax.random.key(1), dials(recipe, step))
    jax.block_until_ready((state, info))
    seconds = time.perf_counter() - start
    rate, peak = args.steps * batches.batch / seconds, matmul_rate(half, args.matmul or (8192 if half else 2048))
    operations = 3 * forward_operations(architecture)
    result = {
        "device": jax.devices()[0].device_kind,
        "network": args.network,
        "recipe": args.recipe,
        "batch": batches.batch,
        "precision": "bfloat16" if half else "float32",
        "images": "host" if args.streamed else "device",
        "images_per_second": round(rate, 1),
        "gigaoperations_per_image": round(operations / 1e9, 2),
        "teraoperations_per_second": round(rate * operations / 1e12, 3),
        "matmul_teraoperations_per_second": round(peak / 1e12, 3),
        "share_of_matmul": round(rate * operations / peak, 3),
        "seconds_to_compile_and_warm_up": round(compiled, 1),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
