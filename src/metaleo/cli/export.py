"""`metaleo export`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import AsTrained, Out, Switch, check_new, emit


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

    model: Annotated[Path, tyro.conf.Positional]
    """Run folder (its first seed) or model file."""
    out: Out
    """ONNX file to write."""
    way: AsTrained = None
    """Classes per task."""
    shot: AsTrained = None
    """Labelled examples per class."""
    overwrite: Switch = False
    """Replace the file in --out."""
    json: Switch = False
    """Print what was made as JSON."""

    def run(self) -> None:
        from metaleo.checkpoints import model_paths
        from metaleo.export import export_onnx

        check_new(self.out, self.overwrite, ".onnx")
        made = export_onnx(model_paths(self.model)[0], self.out, self.way, self.shot)
        kind = f"{made['learner']}, {made['way']}-way {made['shot']}-shot, temperature {made['temperature']:.3g}"
        difference = made["largest_difference"]
        compared = (
            "not compared with JAX: onnxruntime is not installed"
            if difference is None
            else f"largest difference from JAX's probabilities on random rows: {difference:.1e}"
        )
        result = {"model": str(self.model), "out": str(self.out), **made}
        emit(result, self.json, f"{self.out}: {kind}, {made['bytes'] / 1e6:.2f} MB", compared)
