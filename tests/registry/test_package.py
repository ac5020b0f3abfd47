"""Encoded bytes in, label and scores out, the model's own; and nothing altered is ever loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.images.decode import decode_batch
from raypipe.images.measure import SEEN
from raypipe.models.outcomes import Outcomes
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import package, packing
from raypipe.registry.package import OUTCOMES, Package, Reference

CFG = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")
FILES = ("package.json", "weights.safetensors", "reference.npz")


def test_it_predicts_what_its_model_predicts(
    built: Package, model: ImageModel, textured: Callable[..., bytes]
) -> None:
    images = [textured(seed, 48) for seed in range(12)] + [textured(99, 80, "JPEG")]
    found = built.predict(images)
    features, scores = model.predict(decode_batch(images, 32))
    np.testing.assert_allclose(found.scores_NC, scores, atol=1e-5)
    np.testing.assert_allclose(found.features_ND, features, atol=1e-4)
    assert (
        found.labels == [built.classes[i] for i in scores.argmax(1)] and len(set(found.labels)) > 1
    )
    np.testing.assert_allclose(found.scores_NC.sum(1), 1, atol=1e-5)


def test_lineage_and_reference_come_back(built: Package) -> None:
    assert built.classes == ("a", "b", "c") and built.side_px == 32
    assert built.info["table"] == {"uri": "/somewhere", "version": 3}
    reference = built.reference()
    assert reference.features_ND.shape == (30, 64) and reference.scores_NC.shape == (30, 3)
    assert reference.ids[7] == "image 7"
    assert reference.looks_NK is None, "as in a package of an older raypipe"


def test_looks_come_back_if_their_columns_are_known(
    model: ImageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = np.arange(3 * len(SEEN), dtype=np.float32).reshape(3, -1)
    looks[1] = np.nan
    reference = Reference(np.zeros((3, 64)), np.full((3, 3), 1 / 3), tuple("xyz"), looks)
    made = Package(packing.build(tmp_path / "p", model, CFG, ("a", "b", "c"), reference, {}))
    np.testing.assert_array_equal(made.reference().looks_NK, looks)
    monkeypatch.setattr("raypipe.registry.package.SEEN", (*SEEN, "hue"))
    assert made.reference().looks_NK is None


def test_a_copy_elsewhere_is_the_same_package(
    built: Package, tmp_path: Path, textured: Callable[..., bytes]
) -> None:
    said = built.predict([textured(1)]).scores_NC
    np.testing.assert_array_equal(
        Package(built.folder.rename(tmp_path / "moved")).predict([textured(1)]).scores_NC, said
    )


@pytest.mark.parametrize("name", FILES)
def test_one_altered_byte_is_refused(built: Package, name: str) -> None:
    path = built.folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(
        DataError, match=rf"does not match its sha256.*{name}.*Nothing altered is loaded"
    ):
        Package(built.folder)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_missing_file_is_refused(built: Package, name: str) -> None:
    (built.folder / name).unlink()
    with pytest.raises(DataError, match=rf"model package is incomplete.*{name}"):
        Package(built.folder)


def test_a_manifest_that_forgets_a_file_is_refused(built: Package) -> None:
    manifest = json.loads((built.folder / "manifest.json").read_text())
    del manifest["weights.safetensors"]
    (built.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"does not match its sha256.*weights\.safetensors"):
        Package(built.folder)


def test_a_broken_image_is_named(built: Package, textured: Callable[..., bytes]) -> None:
    with pytest.raises(DataError, match=r"broken.*image 1 of a batch of 2"):
        built.predict([textured(1), textured(2)[:300]])


def test_a_bad_image_does_not_cost_the_batch(
    built: Package, textured: Callable[..., bytes]
) -> None:
    good = [textured(seed, 48) for seed in range(4)]
    images = [None, good[0], good[1][:300], good[2], b"", b"no image\n\n" * 3, good[3]]
    found = built.attempt(images, threads=2)
    expected = built.predict([good[0], good[2], good[3]])
    assert found.good == (1, 3, 6) and found.predictions.labels == expected.labels
    np.testing.assert_array_equal(found.predictions.scores_NC, expected.scores_NC)
    assert found.pixels_NHWC.shape == (3, 32, 32, 3)
    reasons = {place: text.partition(":")[0] for place, text in found.errors.items()}
    assert reasons == {0: "missing", 2: "broken", 4: "empty", 5: "not_an_image"}
    assert not [text for text in found.errors.values() if "\n" in text or len(text) > 300]


def test_an_attempt_at_nothing_is_empty(built: Package, textured: Callable[..., bytes]) -> None:
    assert built.attempt([]).good == () and built.attempt([]).errors == {}
    assert built.attempt([None]).predictions.scores_NC.shape == (0, 3)
    assert built.attempt([textured(1)]).errors == {}


@pytest.mark.parametrize(
    ("task", "classes", "logits", "says"),
    [
        ("multi_label", ("a", "b", "c"), (3.0, -3.0, 3.0), "a|c"),
        ("multi_label", ("a", "b", "c"), (-3.0, -3.0, -3.0), ""),
        ("probability", ("value",), (0.0,), "0.5"),
        ("regression", ("value",), (2.0,), "5200"),
    ],
)
def test_a_package_speaks_as_its_task_does(
    task: str,
    classes: tuple[str, ...],
    logits: tuple[float, ...],
    says: str,
    tmp_path: Path,
    textured: Callable[..., bytes],
) -> None:
    cfg = validate(
        ModelConfig, {"name": "small_cnn", "pretrained": False, "mode": "finetune", "task": task}
    )
    model = ImageModel(cfg, len(classes)).eval()
    with torch.no_grad():
        model.head.linear.bias.copy_(torch.tensor(logits))
    if model.head.scaled:
        model.head.scale_by(5000.0, 100.0)
    reference = Reference(np.zeros((1, 64)), np.zeros((1, len(classes))), ("0",))
    built = Package(packing.build(tmp_path / "package", model, cfg, classes, reference, {}))
    assert built.predict([textured(1)]).labels == [says]


def swapped(folder: Path) -> None:
    """Other weights with a manifest that matches them, so the package looks consistent."""
    weights = load_file(folder / "weights.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in weights.items()}, folder / "weights.safetensors"
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["weights.safetensors"] = hashlib.sha256(
        (folder / "weights.safetensors").read_bytes()
    ).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_weights_and_manifest_swapped_together_do_not_match_the_seal(built: Package) -> None:
    assert Package(built.folder, built.seal).info == built.info
    swapped(built.folder)
    Package(built.folder)  # it attests itself, which is why the seal is kept elsewhere
    with pytest.raises(
        DataError,
        match=r"not the one that was registered as cells/3.*nothing altered is loaded"
        r".*register again",
    ):
        Package(built.folder, built.seal, "cells/3")


def test_the_bytes_that_were_hashed_are_the_bytes_that_are_loaded(
    built: Package, textured: Callable[..., bytes]
) -> None:
    """An open package does not read its folder again, for weights or for reference arrays."""
    said = Package(built.folder).predict([textured(1)]).scores_NC
    opened = Package(built.folder)
    swapped(built.folder)
    (built.folder / "reference.npz").write_bytes(b"no arrays")
    np.testing.assert_array_equal(opened.predict([textured(1)]).scores_NC, said)
    assert opened.reference().ids[7] == "image 7"


def test_a_package_of_an_unknown_format_is_refused(built: Package) -> None:
    manifest = json.loads((built.folder / "manifest.json").read_text())
    assert manifest["format"] == package.FORMAT
    (built.folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(
        DataError,
        match=r"model package .* format that this raypipe does not know \(got 99\)"
        r".*1 to 3.*newer one",
    ):
        Package(built.folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_that_is_not_numbers_is_not_packaged(bad: float, tmp_path: Path) -> None:
    model = ImageModel(CFG, 3)
    reference = Reference(np.zeros((1, 64)), np.zeros((1, 3)), ("0",))
    with pytest.raises(DataError, match=r"features that are not finite"):
        packing.build(
            tmp_path,
            model,
            CFG,
            ("a", "b", "c"),
            Reference(np.full((1, 64), bad), np.zeros((1, 3)), ("0",)),
            {},
        )
    torch.nn.init.constant_(model.head.linear.bias, bad)
    with pytest.raises(DataError, match=r"head\.linear\.bias holds NaN or infinity"):
        packing.build(tmp_path, model, CFG, ("a", "b", "c"), reference, {})


def test_a_package_says_no_bare_nan(model: ImageModel, tmp_path: Path) -> None:
    reference = Reference(np.zeros((1, 64)), np.zeros((1, 3)), ("0",))
    packing.build(
        tmp_path, model, CFG, ("a", "b", "c"), reference, {"metrics": {"val_loss": float("nan")}}
    )
    assert "NaN" not in (tmp_path / "package.json").read_text()
    assert Package(tmp_path).info["metrics"] == {"val_loss": None}


def test_a_reference_keeps_domains_and_groups_and_an_older_one_has_none(
    built: Package, model: ImageModel, tmp_path: Path
) -> None:
    plain = built.reference()
    assert plain.domains is None and plain.groups is None
    domains, groups = ("ü|'\n", "") * 15, tuple(f"module {i // 4}" for i in range(30))
    for kept in ((domains, groups), (domains, None), ((), None)):
        reference = replace(plain, domains=kept[0], groups=kept[1])
        folder = tmp_path / f"of {len(kept[0])} {kept[1] is None}"
        packing.build(folder, model, CFG, ("a", "b", "c"), reference, {})
        found = Package(folder).reference()
        assert (found.domains, found.groups) == kept


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1.0", "nan", "2.5", "", "nan"], ["1.0", "", "2.5", "", ""]),
        (["nan", "nan", "nan"], ["", "", ""]),
        (["inf", "1e+22", "nan"], ["inf", "1e+22", ""]),
        # A column of texts or of whole numbers has no NaN.
        (["north", "nan", "nan"], ["north", "nan", "nan"]),
        (["1", "nan", "2"], ["1", "nan", "2"]),
        (["1.0", "NaN"], ["1.0", "NaN"]),
    ],
)
def test_nan_of_an_older_package_names_neither_a_group_nor_a_domain(
    names: list[str], expected: list[str], built: Package, model: ImageModel, tmp_path: Path
) -> None:
    """Its images without a group were one large group, and those of a batch stood alone."""
    plain, count = built.reference(), len(names)
    reference = replace(
        plain,
        features_ND=plain.features_ND[:count],
        scores_NC=plain.scores_NC[:count],
        ids=plain.ids[:count],
        looks_NK=None,
        domains=tuple(names),
        groups=tuple(names),
    )
    kept = Outcomes(np.zeros(count), np.ones(count), tuple(names), tuple(names)).to_bytes()
    packing.build(tmp_path / "p", model, CFG, ("a", "b", "c"), reference, {}, {OUTCOMES: kept})
    package = Package(tmp_path / "p")
    outcomes = package.outcomes()
    assert outcomes is not None
    for found in (package.reference(), outcomes):
        assert (found.domains, found.groups) == (tuple(expected), tuple(expected))
