"""An ensemble says the weighted mean of what its members say, each at its own side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.errors import ConfigError, DataError
from raypipe.images.decode import decode_batch
from raypipe.models.ensemble import EnsembleModel, Member
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import package, packing
from raypipe.registry.package import Package, Reference
from raypipe.train import ensembles, start
from raypipe.train.ensembles import Part
from raypipe.train.loop import LoopState
from tests.mixed_images import mixed_images

CLASSES = ("a", "b", "c")


def small(**more: Any) -> ModelConfig:
    return ModelConfig(name="small_cnn", pretrained=False, mode="finetune", **more)


def part(name: str, cfg: ModelConfig, weight: float, seed: int, **more: Any) -> Part:
    """A member whose predictions vary, with its weights."""
    torch.manual_seed(seed)
    classes = CLASSES if cfg.task in ("single_label", "multi_label") else ("value",)
    model = ImageModel(cfg, len(classes))
    torch.nn.init.normal_(model.head.linear.weight, std=2)
    if cfg.task == "regression":
        model.head.scale_by(5000.0, 300.0)
    return Part(Member(cfg, weight, name=name, **more), model.state_dict(), classes)


def alone(one: Part) -> ImageModel:
    """The member as a model of its own."""
    model = ImageModel(one.member.model, len(one.classes))
    model.load_state_dict(dict(one.weights))
    model.temperature = one.member.temperature
    return model.eval()


def packed(
    ensemble: EnsembleModel, folder: Path, classes: tuple[str, ...], **facts: Any
) -> Package:
    """A package of the ensemble."""
    reference = Reference(
        np.zeros((2, ensemble.widths[0])), np.full((2, len(classes)), 0.5), ("x", "y")
    )
    first = ensemble.members[0].model
    return Package(packing.build(folder, ensemble, first, classes, reference, facts))


@pytest.mark.parametrize("task", ["single_label", "multi_label", "probability", "regression"])
def test_its_scores_are_the_weighted_mean_of_its_members(task: str) -> None:
    """Members with views and a temperature of their own say what they say alone."""
    parts = [
        part("one", small(task=task, side_px=32, views=2), 3, 1),
        part("two", small(task=task, side_px=32), 1, 2),
    ]
    if task == "single_label":
        parts[1] = replace(parts[1], member=replace(parts[1].member, temperature=1.7))
    pixels_NHWC = decode_batch(mixed_images(20), 32)
    features_ND, scores_NC = ensembles.build(parts).for_inference().predict(pixels_NHWC)
    said = [alone(one).predict(pixels_NHWC) for one in parts]
    # Numbers of thousands are equal to a millionth of them.
    np.testing.assert_allclose(
        scores_NC, 0.75 * said[0][1] + 0.25 * said[1][1], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(features_ND, said[0][0], atol=1e-4)
    assert np.abs(said[0][1] - said[1][1]).max() > 0.05, "the members differ"
    # Its logits mean the same.
    model = ensembles.build(parts)
    logits = model(torch.from_numpy(pixels_NHWC))
    np.testing.assert_allclose(
        model.scores(logits).detach().numpy(), scores_NC, rtol=1e-5, atol=1e-5
    )


def test_a_smaller_member_sees_pixels_as_decoding_squeezes_them() -> None:
    """Of images of the largest side there is no second shrinking: a level apart at most."""
    parts = [part("large", small(side_px=64), 1, 1), part("less", small(side_px=40), 1, 2)]
    from raypipe.images.decode import encode_png
    from raypipe.models.ensemble import shrunk

    model = ensembles.build(parts)
    pixels_NHWC = decode_batch(mixed_images(20), 64)
    matrix_SL = model._shrink[1]
    assert model.side_px == 64 and model._shrink[0] is None and matrix_SL is not None
    found = shrunk(torch.from_numpy(pixels_NHWC), matrix_SL).numpy()
    squeezed = decode_batch([encode_png(one) for one in pixels_NHWC], 40)
    assert np.abs(found - squeezed).max() <= 1
    scores_NC = model.predict(pixels_NHWC)[1]
    said = [alone(parts[0]).predict(pixels_NHWC)[1], alone(parts[1]).predict(squeezed)[1]]
    np.testing.assert_allclose(scores_NC, np.mean(said, 0), atol=0.02)


def test_heads_of_one_frozen_backbone_share_it(tmp_path: Path) -> None:
    """Two heads cost one backbone; a trained one of the same name has its own."""
    frozen, trained = ModelConfig(side_px=32), ModelConfig(side_px=32, mode="finetune")
    kernel = ModelConfig(side_px=32, head="kernel", landmarks=40)
    torch.manual_seed(0)
    # A kernel of fewer landmarks than were asked for, as of a small training set.
    heads = [frozen.head_of(1280, 3), kernel.head_of(1280, 3, 5)]
    for head in heads:
        torch.nn.init.normal_(head.linear.weight)
    parts = [
        Part(Member(cfg, name=cfg.head), head.state_dict(), CLASSES)
        for cfg, head in zip((frozen, kernel), heads, strict=True)
    ]
    parts.append(part("trained", trained, 1, 3))
    model = ensembles.build(parts)
    assert len(model.bodies) == 2 and len(model.heads) == 3 and model.body_of == [0, 0, 1]
    pixels_NHWC = decode_batch(mixed_images(6), 32)
    said = []
    for cfg, head in zip((frozen, kernel), heads, strict=True):
        one = ImageModel(cfg, 3).eval()
        one.head = head.eval()
        said.append(one.predict(pixels_NHWC)[1])
    said.append(alone(parts[2]).predict(pixels_NHWC)[1])
    np.testing.assert_allclose(model.predict(pixels_NHWC)[1], np.mean(said, 0), atol=1e-5)
    made = packed(model, tmp_path / "p", CLASSES)
    np.testing.assert_allclose(
        made.predict_pixels(pixels_NHWC).scores_NC, np.mean(said, 0), atol=1e-4
    )


def test_a_checkpoint_needs_no_folder_of_its_members(tmp_path: Path) -> None:
    parts = [part("one", small(side_px=32), 2, 1), part("two", small(side_px=48), 1, 2)]
    # Chosen twice: one member with the sum of its weights.
    written = ensembles.write(tmp_path / "e", ensembles.build([*parts, parts[1]]), LoopState())
    members = ensembles.read(written)
    assert [(one.name, one.weight) for one in members] == [("one", 2), ("two", 2)]
    assert ensembles.read(tmp_path) == ()
    made = packed(ensembles.build([*parts, parts[1]]), tmp_path / "p", CLASSES)
    assert made.side_px == 48 and made.names == ("small_cnn",)
    images = mixed_images(9)
    said = [alone(one).predict(decode_batch(images, one.member.model.pixels))[1] for one in parts]
    expected = ensembles.build([*parts, parts[1]]).predict(decode_batch(images, 48))[1]
    np.testing.assert_allclose(made.predict(images).scores_NC, expected, atol=1e-5)
    # From bytes alone, as another process has it.
    again = Package.of(made.files, made.seal)
    np.testing.assert_allclose(again.predict(images).scores_NC, expected, atol=1e-5)
    assert np.abs(expected - np.mean(said, 0)).mean() < 0.05


def test_a_calibrated_ensemble_divides_the_mean(tmp_path: Path) -> None:
    """Its temperature is the package's, over the mean of members that may have their own."""
    parts = [part("one", small(side_px=32), 1, 1), part("two", small(side_px=32), 1, 2)]
    parts[0] = replace(parts[0], member=replace(parts[0].member, temperature=0.5))
    made = packed(ensembles.build(parts), tmp_path / "p", CLASSES, temperature=2.0)
    pixels_NHWC = decode_batch(mixed_images(8), 32)
    mean_NC = np.mean([alone(one).predict(pixels_NHWC)[1] for one in parts], 0)
    expected_NC = np.sqrt(mean_NC) / np.sqrt(mean_NC).sum(1, keepdims=True)
    np.testing.assert_allclose(made.predict_pixels(pixels_NHWC).scores_NC, expected_NC, atol=1e-5)


def test_a_training_starts_from_its_first_member(tmp_path: Path) -> None:
    parts = [part("one", small(side_px=32), 1, 1), part("two", small(side_px=48), 1, 2)]
    packed(ensembles.build(parts), tmp_path / "p", CLASSES)
    start.require(tmp_path / "p", small(side_px=32))
    model = ImageModel(small(side_px=32), 3).eval()
    start.load_into(model, tmp_path / "p", small(side_px=32), CLASSES)
    pixels_NHWC = decode_batch(mixed_images(5), 32)
    np.testing.assert_allclose(
        model.predict(pixels_NHWC)[1], alone(parts[0]).predict(pixels_NHWC)[1], atol=1e-5
    )


def test_members_that_do_not_fit_are_refused() -> None:
    one, two = part("one", small(side_px=32), 1, 1), part("two", small(side_px=32), 1, 2)
    with pytest.raises(DataError, match="the same classes in the same order"):
        ensembles.build([one, replace(two, classes=("b", "a", "c"))])
    broken = {name: tensor.clone() for name, tensor in two.weights.items()}
    broken["head.linear.bias"][1] = torch.nan
    with pytest.raises(DataError, match=r"not finite: head\.linear\.bias"):
        ensembles.build([one, replace(two, weights=broken)])
    other = part("two", small(side_px=32, task="multi_label"), 1, 2)
    with pytest.raises(DataError, match="have one task"):
        ensembles.build([one, other])
    with pytest.raises(ConfigError, match="another model's"):
        ensembles.build([one, replace(two, weights={**two.weights, "head.more": torch.ones(1)})])
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="finite number above 0"):
            ensembles.build([one, replace(two, member=replace(two.member, weight=weight))])
    with pytest.raises(DataError, match="no member"):
        ensembles.build([])


def test_a_package_of_a_newer_format_says_so(tmp_path: Path) -> None:
    """An older raypipe reads formats 1 and 2: it names the format, and loads nothing."""
    import json

    parts = [part("one", small(side_px=32), 1, 1), part("two", small(side_px=48), 1, 2)]
    packed(ensembles.build(parts), tmp_path / "p", CLASSES)
    manifest = json.loads((tmp_path / "p" / "manifest.json").read_text())
    assert manifest["format"] == package.OF_ENSEMBLE > package.FORMAT


@pytest.mark.parametrize("format", ["onnx", "pt2", "torchscript"])
def test_an_export_holds_all_of_it(format: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="raypipe[onnx]")
    from raypipe.registry.export import Sample, export

    parts = [part("one", small(side_px=32, views=2), 2, 1), part("two", small(side_px=48), 1, 2)]
    made = packed(ensembles.build(parts), tmp_path / "p", CLASSES)
    pixels_NHWC = decode_batch(mixed_images(12), 48)
    done = export(made, format, tmp_path / "out", Sample(pixels_NHWC, (None,) * 12, "mixed"))
    assert done.apart <= 1e-4
