"""Claim: dynamic int8 pays where weights are matrices. Of convolutions it makes a slower file that
says other things.

python -m benchmarks.int8 --json

One row a model and a choice of operators: seconds and bytes of float32 over those of int8, and the
share of 64 images with the same label. Weights of the head are random, so labels are close calls:
`agree` is a hard test. The transformer (hf:vit, random weights) takes part where transformers is
installed. Candidates take turns, and the ratio is the median of the rounds.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from raypipe.errors import ConfigError
from raypipe.images.decode import decode_batch
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import graph, packing
from raypipe.registry.package import Package, Reference
from tests.mixed_images import mixed_images

IMAGES, ROUNDS, CLASSES = 64, 3, 10
VIT = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
MODELS = {
    "efficientnet_lite0": ModelConfig(mode="finetune"),
    "hf:vit": ModelConfig(
        name="hf:vit", pretrained=False, mode="finetune", options=VIT | {"intermediate_size": 1536}
    ),
}
PRODUCTS = ("MatMul", "Gemm")
CHOICES = {"products": PRODUCTS, "products and convolutions": (*PRODUCTS, "Conv")}


def built(folder: Path, cfg: ModelConfig) -> tuple[Package, np.ndarray]:
    """A package whose labels vary over the images, and their pixels_NHWC."""
    torch.manual_seed(0)
    model = ImageModel(cfg, CLASSES).eval()
    pixels_NHWC = decode_batch(mixed_images(IMAGES), cfg.pixels)
    seen_ND = torch.from_numpy(model.predict(pixels_NHWC)[0])
    model.head.standardise_by(seen_ND.mean(0), seen_ND.std(0))
    torch.nn.init.normal_(model.head.linear.weight, std=0.1)
    empty = Reference(np.zeros((1, seen_ND.shape[1])), np.zeros((1, CLASSES)), ("none",))
    classes = tuple(map(str, range(CLASSES)))
    return Package(packing.build(folder, model, cfg, classes, empty, {})), pixels_NHWC


def seconds(run: graph.Run, pixels_NHWC: np.ndarray) -> float:
    began = time.perf_counter()
    for start in range(0, IMAGES, 16):
        run(pixels_NHWC[start : start + 16])
    return time.perf_counter() - began


def measure(folder: Path, cfg: ModelConfig) -> dict[str, Any]:
    made, pixels_NHWC = built(folder / "package", cfg)
    graph.write("onnx", made, folder / "float")
    paths = {}
    for name, operators in CHOICES.items():
        paths[name] = folder / name
        quantize_dynamic(
            folder / "float",
            paths[name],
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=list(operators),
        )
    runs = {name: graph.read("onnx", path) for name, path in paths.items()}
    float_run = graph.read("onnx", folder / "float")
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        float_s = seconds(float_run, pixels_NHWC)
        for name, run in runs.items():
            ratios[name].append(float_s / seconds(run, pixels_NHWC))

    expected = made.predict_pixels(pixels_NHWC).labels
    rows = {}
    for name, run in runs.items():
        labels = made.task.predictions(run(pixels_NHWC)[0])
        rows[name] = {
            "faster": round(statistics.median(ratios[name]), 2),
            "smaller": round((folder / "float").stat().st_size / paths[name].stat().st_size, 2),
            "agree": round(float(np.mean(np.array(labels) == np.array(expected))), 3),
        }
    return rows


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {}
    for name, cfg in MODELS.items():
        try:
            with tempfile.TemporaryDirectory() as folder:
                found[name] = measure(Path(folder), cfg)
        except ConfigError as e:
            found[name] = {"left out": str(e)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
