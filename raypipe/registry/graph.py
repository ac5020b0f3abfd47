"""The formats that a model is exported to: how each is written, and how it is read and run again.

The graph takes uint8 pixels BHWC, any number of images, and gives scores and features as the
package does: normalisation, views and temperature are inside. What is outside, decoding and
resizing, is described in the file's metadata under `raypipe`, with classes and the package's seal.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from raypipe.models.calibrate import tempered
from raypipe.models.predictor import Predictor
from raypipe.models.zoo import ImageModel, views
from raypipe.registry.package import Package

Format = Literal["onnx", "pt2", "torchscript"]
FORMATS: tuple[Format, ...] = get_args(Format)
INPUT, OUTPUTS = "pixels", ("scores", "features")
KEY = "raypipe"  # of the metadata

# uint8 pixels BHWC -> (scores_BC, features_BD).
Run = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
Export: Any = torch.onnx.export  # these three are not typed
Trace: Any = torch.jit.trace
LoadScript: Any = torch.jit.load


class Graph(nn.Module):
    """uint8 pixels BHWC -> (scores_BC, features_BD), as `predict` computes them.

    All views of an ImageModel go through the backbone as one batch: the graph then holds it once.
    An ensemble's graph holds each member's weights once, and its operations once a view.
    """

    def __init__(self, model: Predictor) -> None:
        super().__init__()
        self.model = model
        self.count: int = model._views if isinstance(model, ImageModel) else 1

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(self.model, ImageModel):
            features, scores = self.model.answers(pixels)
            return scores, features
        seen = pixels
        if self.count > 1:
            seen = torch.cat(list(views(pixels, self.count)))
        features = self.model.embed(seen)
        logits = self.model.head(features)
        scores = self.model.scores(logits).float()

        # Back to one row an image: the mean of its views' scores, the features of the first.
        if self.count > 1:
            scores = scores.view(self.count, -1, scores.shape[1]).mean(0)
            features = features.view(self.count, -1, features.shape[1])[0]
        return tempered(self.model.task, scores, self.model.temperature), features


def description(package: Package) -> dict[str, Any]:
    """The file's metadata: what to do before and after the graph, and where it comes from."""
    side = package.side_px
    return {
        "input": {"name": INPUT, "type": "uint8", "shape": ["batch", side, side, 3]},
        "preprocessing": [
            "decode to RGB, 8 bits; of 16-bit grey the high byte; transparent pixels on white; a "
            "large JPEG at 1/2, 1/4 or 1/8 of its size, if that is not smaller than the side",
            "turn upright by the EXIF orientation",
            f"resize to {side} x {side} pixels: bilinear, antialiased; aspect is not kept",
        ],
        "normalisation": "inside the graph",
        "outputs": {"scores": ["batch", len(package.classes)], "features": ["batch", "features"]},
        "task": package.task.kind,
        "classes": list(package.classes),
        "temperature": package.model.temperature,
        "seal": package.seal,
    }


def write(format: Format, package: Package, path: Path) -> None:
    """Write the package's model to `path`; raises what the exporter raises."""
    about = json.dumps(description(package), ensure_ascii=False)
    _WRITERS[format](Graph(package.model).eval(), package.side_px, path, about)


def read(format: Format, path: Path) -> Run:
    """The model in a file, ready to run on a CPU."""
    return _READERS[format](path)


def _example(side_px: int) -> Tensor:
    # Two images: a batch of one would be taken for a constant.
    return torch.zeros(2, side_px, side_px, 3, dtype=torch.uint8)


def _write_onnx(graph: Graph, side_px: int, path: Path, about: str) -> None:
    import onnx

    Export(
        graph,
        (_example(side_px),),
        str(path),
        input_names=[INPUT],
        output_names=list(OUTPUTS),
        dynamic_shapes={"pixels": {0: torch.export.Dim("batch", min=1)}},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    # Metadata are added to what the exporter wrote.
    model = onnx.load(path)
    onnx.helper.set_model_props(model, {KEY: about})
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def _write_pt2(graph: Graph, side_px: int, path: Path, about: str) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        graph, (_example(side_px),), dynamic_shapes={"pixels": {0: batch}}
    )
    # torch.export.save takes no name without the ending.
    named = path.with_suffix(".pt2")
    torch.export.save(program, named, extra_files={KEY: about})
    named.rename(path)


def _write_torchscript(graph: Graph, side_px: int, path: Path, about: str) -> None:
    with torch.no_grad():
        traced = Trace(graph, (_example(side_px),))
    torch.jit.save(traced, str(path), _extra_files={KEY: about})


def _onnx_reader(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(pixels_BHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores, features = session.run(list(OUTPUTS), {INPUT: pixels_BHWC})
        return scores, features

    return run


def _torch_reader(load: Callable[[Path], Any]) -> Callable[[Path], Run]:
    def read(path: Path) -> Run:
        model = load(path)

        def run(pixels_BHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            # A copy: torch wants an array that it may write to.
            with torch.no_grad():
                scores, features = model(torch.from_numpy(np.array(pixels_BHWC)))
            return scores.numpy(), features.numpy()

        return run

    return read


def _load_pt2(path: Path) -> Any:
    return torch.export.load(io.BytesIO(path.read_bytes())).module()


_WRITERS: dict[Format, Callable[[Graph, int, Path, str], None]] = {
    "onnx": _write_onnx,
    "pt2": _write_pt2,
    "torchscript": _write_torchscript,
}
_READERS: dict[Format, Callable[[Path], Run]] = {
    "onnx": _onnx_reader,
    "pt2": _torch_reader(_load_pt2),
    "torchscript": _torch_reader(lambda path: LoadScript(str(path))),
}
