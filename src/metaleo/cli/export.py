"""`metaleo export`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import Int, console
from metaleo.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a trained model to an ONNX file that adapts and predicts without Python or JAX.

    The graph takes `support` (the few labelled examples, class by class) and `query` (any number of examples), raw
    feature vectors both, and gives `probabilities`: adaptation happens inside. It is for one number of classes and of
    examples per class. The file is run once and compared with JAX before it is left in place (docs/guides/export.md).

    Try:
      metaleo export runs/leo-5way-1shot --out leo.onnx
      metaleo export model.safetensors --way 10 --shot 5 --out leo.onnx --json
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Run folder (its first seed) or model file."""
    out: Path
    """ONNX file to write."""
    way: Int = None
    """Classes per task (as in training)."""
    shot: Int = None
    """Labelled examples per class (as in training)."""
    overwrite: bool = False
    """Replace the file in --out."""
    json: bool = False
    """Print what was made as JSON on standard output."""

    def run(self) -> None:
        from metaleo._io.files import check_writable
        from metaleo.checkpoints import model_paths
        from metaleo.export import export_onnx

        if self.out.suffix != ".onnx":
            raise BadInput(f"{self.out}: the file's name has to end in .onnx")
        if self.out.exists() and not self.overwrite:
            raise BadInput(f"{self.out} exists; replace it with --overwrite, or choose another --out")
        check_writable(self.out)
        made = export_onnx(model_paths(self.model)[0], self.out, self.way, self.shot)
        kind = f"{made['learner']}, {made['way']}-way {made['shot']}-shot, temperature {made['temperature']:.3g}"
        console.print(f"{self.out}: {kind}, {made['bytes'] / 1e6:.2f} MB", markup=False, soft_wrap=True)
        difference = made["largest_difference"]
        if difference is None:
            console.print("not compared with JAX: onnxruntime is not installed")
        else:
            console.print(f"largest difference from JAX's probabilities on random rows: {difference:.1e}")
        if self.json:
            print(json.dumps({"model": str(self.model), "out": str(self.out), **made}, indent=2))
