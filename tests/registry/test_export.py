"""An exported file says what the package says, for any number of images, or it is not written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.errors import ConfigError, DataError
from raypipe.images.decode import decode_batch
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import export as exporting
from raypipe.registry import graph, packing
from raypipe.registry.export import Sample, export
from raypipe.registry.package import Package, Reference
from raypipe.work.export import _at_most
from tests.mixed_images import mixed_images

pytest.importorskip("onnxruntime", reason="raypipe[onnx]")


def sample(side_px: int, count: int = 24) -> Sample:
    labels = tuple(("a", "b", None)[i % 3] for i in range(count))
    return Sample(decode_batch(mixed_images(count), side_px), labels, "mixed")


def built(folder: Path, task: str, views: int, temperature: float) -> Package:
    cfg = ModelConfig(name="small_cnn", pretrained=False, mode="finetune", task=task, views=views)
    classes = ("value",) if task in ("probability", "regression") else ("a", "b", "c")
    torch.manual_seed(1)
    model = ImageModel(cfg, len(classes)).eval()
    torch.nn.init.normal_(model.head.linear.weight, std=3)
    if task == "regression":
        model.head.scale_by(5000.0, 300.0)
    reference = Reference(np.zeros((2, 64)), np.full((2, len(classes)), 0.5), ("x", "y"))
    facts = {"temperature": temperature}
    return Package(packing.build(folder, model, cfg, classes, reference, facts))


@pytest.mark.parametrize(
    ("task", "views", "temperature", "format"),
    [
        ("single_label", 8, 1.7, "onnx"),
        ("single_label", 8, 1.7, "pt2"),
        ("multi_label", 1, 0.5, "torchscript"),
        ("probability", 1, 1.0, "pt2"),
        ("regression", 2, 1.0, "onnx"),
        ("regression", 2, 1.0, "torchscript"),
    ],
)
def test_a_file_says_what_the_package_says(
    task: str, views: int, temperature: float, format: graph.Format, tmp_path: Path
) -> None:
    made = built(tmp_path / "package", task, views, temperature)
    done = export(made, format, tmp_path / "out" / "model", sample(32))
    assert done.apart <= exporting.MOST_APART and done.size == done.path.stat().st_size
    assert done.relative == (task == "regression")
    assert [path.name for path in done.path.parent.iterdir()] == ["model"]
    run = graph.read(format, done.path)
    for count in (1, 3, 7):
        pixels_BHWC = decode_batch(mixed_images(40)[-count:], 32)
        expected = made.predict_pixels(pixels_BHWC)
        scores_NC, features_ND = run(pixels_BHWC)
        np.testing.assert_allclose(scores_NC, expected.scores_NC, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(features_ND, expected.features_ND, atol=1e-4)


def test_an_onnx_file_describes_what_is_outside_it(tmp_path: Path) -> None:
    import onnxruntime

    made = built(tmp_path / "package", "single_label", 1, 2.0)
    done = export(made, "onnx", tmp_path / "model.onnx", sample(32))
    session = onnxruntime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    (pixels,) = session.get_inputs()
    assert (pixels.name, pixels.type) == ("pixels", "tensor(uint8)")
    assert pixels.shape[1:] == [32, 32, 3] and isinstance(pixels.shape[0], str)
    about = json.loads(session.get_modelmeta().custom_metadata_map["raypipe"])
    assert about["classes"] == ["a", "b", "c"] and about["seal"] == made.seal
    assert about["temperature"] == 2.0 and "32 x 32" in " ".join(about["preprocessing"])


def test_a_file_that_differs_is_refused_and_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(tmp_path / "package", "single_label", 1, 1.0)
    out = tmp_path / "model.onnx"
    out.write_bytes(b"earlier")
    before = graph.Graph.forward

    def wrong(self: graph.Graph, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, features = before(self, pixels)
        return scores + 2e-4, features

    monkeypatch.setattr(graph.Graph, "forward", wrong)
    with pytest.raises(DataError, match=r"other scores than the model.*0\.0002 apart"):
        export(made, "onnx", out, sample(32))

    def fails(self: graph.Graph, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError("no such operator")

    monkeypatch.setattr(graph.Graph, "forward", fails)
    with pytest.raises(DataError, match=r"pt2 cannot hold this model.*no such operator"):
        export(made, "pt2", out, sample(32))
    assert out.read_bytes() == b"earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"package", "model.onnx"}


def test_int8_says_what_it_costs(tmp_path: Path) -> None:
    made = built(tmp_path / "package", "single_label", 1, 1.0)
    images = sample(32)
    done = export(made, "onnx", tmp_path / "model.onnx", images, int8=True)
    assert done.int8 is not None and done.size == done.path.stat().st_size
    # Its figures are those of the file.
    scores_NC, _ = graph.read("onnx", done.path)(images.pixels_NHWC)
    labels = made.task.predictions(scores_NC)
    expected = made.predict_pixels(images.pixels_NHWC)
    same = np.mean([a == b for a, b in zip(labels, expected.labels, strict=True)])
    assert done.int8.agree == pytest.approx(same)
    known = [i for i in range(24) if images.labels[i] is not None]
    right = np.mean([labels[i] == images.labels[i] for i in known])
    assert done.int8.quality == pytest.approx(right)
    # An image's scores depend on its batch, because the scale of activations is the batch's.
    apart = np.abs(scores_NC - expected.scores_NC).max()
    assert 0 < done.int8.apart == pytest.approx(apart, rel=0.5)


def test_what_cannot_be_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(tmp_path / "package", "single_label", 1, 1.0)
    with pytest.raises(ConfigError, match=r"int8 is for ONNX.*got 'pt2'"):
        export(made, "pt2", tmp_path / "model", sample(32), int8=True)
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"ONNX needs onnxscript.*raypipe\[onnx\]"):
        export(made, "onnx", tmp_path / "model", sample(32))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("value", [1.4e-6, 9.6e-7, 0.0, 1e-4, 9.95e-5, 0.099])
def test_at_most_is_never_below(value: float) -> None:
    """1.4e-6 was "at most 1e-06"."""
    for digits in (1, 2):
        said = float(_at_most(value, digits))
        assert value <= said <= value * (1 + 10.0 ** (1 - digits)) + 1e-12


def test_numbers_of_a_small_unit_are_compared_by_their_spread() -> None:
    """Any file passed, also one that always said 0."""
    model = SimpleNamespace(spread=1e-5)
    package: Any = SimpleNamespace(task=SimpleNamespace(kind="regression"), model=model)
    expected: Any = SimpleNamespace(scores_NC=np.array([[5e-5]]))
    assert exporting._apart(package, np.zeros((1, 1)), expected) > exporting.MOST_APART
    model.spread = 0.0
    assert exporting._apart(package, np.array([[5e-5]]), expected) == 0
