"""A training that starts from a model package: known classes keep what they learned."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from raypipe.config import replace, validate
from raypipe.errors import ConfigError, DataError
from raypipe.models.heads import Head
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import package, packing
from raypipe.registry.package import Reference
from raypipe.tables.table import TableVersion
from raypipe.train import checkpoint, learned, publish, start
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.origin import CalledFor, Start
from raypipe.train.parallel.snapshot import Piece, Snapshot
from raypipe.work import training

CNN = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
PIXELS = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8)
MANY = ("new", "b", "a")


def trained(cfg: ModelConfig, classes: int, seed: int = 3) -> ImageModel:
    """A model whose head is not the zeros that it begins with."""
    torch.manual_seed(seed)
    model = ImageModel(cfg, classes).eval()
    head = model.head
    nn.init.normal_(head.linear.weight)
    nn.init.normal_(head.linear.bias)
    features = head.linear.in_features
    head.standardise_by(torch.randn(features), torch.rand(features) + 0.5)
    if head.scaled:
        head.scale_by(7.0, 3.0)
    return model


def packed(
    folder: Path,
    model: ImageModel,
    cfg: ModelConfig,
    classes: tuple[str, ...],
    extra: dict[str, bytes] | None = None,
) -> Path:
    """Under its seal, as a retrain places it."""
    features = model.head.linear.in_features
    reference = Reference(np.zeros((1, features)), np.full((1, len(classes)), 0.5), ("i",))
    packing.build(folder / "new", model, cfg, classes, reference, {}, extra)
    return (folder / "new").rename(folder / package.Package(folder / "new").seal)


def logits(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(inputs)


def test_a_head_grows_and_known_classes_keep_what_they_say(tmp_path: Path) -> None:
    champion = trained(CNN, 2)
    at = packed(tmp_path, champion, CNN, ("a", "b"))
    model = ImageModel(CNN, 3)
    start.load_into(model, at, CNN, MANY)
    ours, theirs = logits(model, PIXELS), logits(champion, PIXELS)
    assert torch.allclose(ours[:, [2, 1]], theirs, atol=1e-4)
    assert ours[:, 0].abs().max() == 0, "a new class begins at zero"


def test_a_class_that_is_gone_is_left_out(tmp_path: Path) -> None:
    champion = trained(CNN, 3)
    at = packed(tmp_path, champion, CNN, MANY)
    model = ImageModel(CNN, 2)
    start.load_into(model, at, CNN, ("a", "b"))
    assert torch.allclose(logits(model, PIXELS), logits(champion, PIXELS)[:, [2, 1]], atol=1e-4)


@pytest.mark.parametrize("task", ["single_label", "regression"])
def test_a_head_of_frozen_features_is_rewritten_for_other_means_and_spreads(
    tmp_path: Path, task: str
) -> None:
    cfg = ModelConfig.model_validate({"name": "efficientnet_lite0", "task": task, "side_px": 32})
    classes = ("a", "b") if task == "single_label" else ("value",)
    champion = trained(cfg, len(classes))
    at = packed(tmp_path, champion, cfg, classes)
    features = champion.head.linear.in_features
    head = Head(features, len(classes), 0.2, scaled=task == "regression")
    head.standardise_by(torch.randn(features), torch.rand(features) + 0.1)
    if head.scaled:
        head.scale_by(-2.0, 0.5)
    start.load_into(head, at, cfg, classes)
    inputs = torch.randn(5, features)
    assert torch.allclose(logits(head, inputs), logits(champion.head, inputs), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"name": "efficientnet_lite0"}, "backbone small_cnn"),
        ({"task": "multi_label"}, "task single_label"),
        ({"name": "efficientnet_lite0", "mode": "frozen", "pretrained": True}, "backbone"),
    ],
)
def test_another_model_is_one_clear_message(
    tmp_path: Path, other: dict[str, object], said: str
) -> None:
    at = packed(tmp_path, trained(CNN, 2), CNN, ("a", "b"))
    cfg = ModelConfig.model_validate(CNN.model_dump() | other)
    with pytest.raises(ConfigError, match=f"weights of another model.*{said}"):
        start.require(at, cfg)


def test_a_package_that_was_altered_or_exchanged_is_refused(tmp_path: Path) -> None:
    at = packed(tmp_path, trained(CNN, 2), CNN, ("a", "b"))
    other = packed(tmp_path, trained(CNN, 2, seed=4), CNN, ("a", "b"))
    start.require(at, CNN)
    with (at / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(ConfigError, match=r"does not match its sha256"):
        start.require(at, CNN)
    # A whole package of somebody else under this seal's name.
    shutil.rmtree(at)
    shutil.copytree(other, at)
    with pytest.raises(ConfigError, match=r"not the one that was registered"):
        start.require(at, CNN)


@pytest.mark.usefixtures("heard")
def test_what_a_package_has_learned_from_is_handed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`raypipe train train.start_from=PACKAGE` gave a package that knew its own rows alone: its
    parent's could be test rows later, and count."""
    own_N2, before_N2 = np.array([[1, 2], [3, 4]], np.uint64), np.array([[5, 6]], np.uint64)
    extra = learned.files(own_N2, before_N2)
    parent = packed(tmp_path, trained(CNN, 2), CNN, ("a", "b"), extra)
    called = CalledFor("train", "asked").behind(str(parent))
    assert called.start.inherited_N2.tolist() == [[1, 2], [3, 4], [5, 6]]
    other_N2 = np.array([[3, 4], [7, 8]], np.uint64)
    warm = CalledFor("retrain", "drift", start=Start(inherited_N2=other_N2)).behind(str(parent))
    assert warm.start.inherited_N2.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert not caplog.records
    old = packed(tmp_path, trained(CNN, 2, seed=5), CNN, ("a", "b"))
    nothing = (None, str(old), str(tmp_path / "a-checkpoint"))
    for told, folder in enumerate(nothing):
        assert not len(CalledFor("train", "asked").behind(folder).start.inherited_N2)
        assert len(caplog.records) == told
        assert told == 0 or f"weights of {folder} have learned" in caplog.text


def test_a_publication_hands_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = learned.files(np.array([[1, 2]], np.uint64), learned.NONE_N2)
    parent = packed(tmp_path, trained(CNN, 2), CNN, ("a", "b"), extra)
    model = {"name": "small_cnn", "mode": "finetune", "pretrained": False}
    job = validate(TrainJob, {"table": {"uri": "-"}, "model": model})
    job = replace(job, {"train.start_from": str(parent)})
    kept: list[CalledFor] = []
    monkeypatch.setattr(publish.versions, "find", lambda *given: None)
    monkeypatch.setattr(
        publish,
        "_publish",
        lambda *given: kept.extend(o for o in given if isinstance(o, CalledFor)),
    )
    planned = SimpleNamespace(job=job, folder=tmp_path, pinned=SimpleNamespace(version=1))
    store, result = SimpleNamespace(folder=tmp_path), SimpleNamespace(key="k", version=1)
    publish.publish(store, planned, result, "train")  # type: ignore[arg-type]
    assert kept[0].start.inherited_N2.tolist() == [[1, 2]]


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_says_nothing_of_its_rows_and_a_refit_needs_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    """Test images that another training's checkpoint had learned from counted as unseen, without a
    word.
    """
    search = tmp_path / "search" / "k"
    began = (search if own else tmp_path / "train" / "k") / "trials" / "a" / checkpoint.name(1)
    model = {"name": "small_cnn", "mode": "finetune", "pretrained": False}
    job = validate(TrainJob, {"table": {"uri": "-"}, "model": model})
    job = replace(job, {"train.start_from": str(began)})
    monkeypatch.setattr(publish.versions, "find", lambda *given: None)
    monkeypatch.setattr(publish, "_publish", lambda *given: None)
    planned = SimpleNamespace(job=job, folder=tmp_path, pinned=SimpleNamespace(version=1))
    store, result = SimpleNamespace(folder=tmp_path), SimpleNamespace(key="k", version=1)
    publish.publish(store, planned, result, "search", recorded=[search])  # type: ignore[arg-type]
    told = [record.message for record in caplog.records]
    assert len(told) == (0 if own else 1)
    assert own or f"Which rows the weights of {began} have learned from is not" in told[0]


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("is_same", [True, False])
def test_what_an_ensemble_started_from_is_asked_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_same: bool
) -> None:
    """Its job has the search's own train.start_from, which its publication asks, too: the warning
    came twice."""
    began = str(tmp_path / "a-checkpoint")
    job = validate(TrainJob, {"table": {"uri": "-"}, "train": {"start_from": began}})
    plan = SimpleNamespace(job=job if is_same else replace(job, {"train.start_from": None}))
    result = SimpleNamespace(refitted=False, shares=(0.5, 0.5), device_s=1.0, heads=0)
    asked = training._called_for(result, plan, began)  # type: ignore[arg-type]
    assert asked.verb == "tune" and len(caplog.records) == (0 if is_same else 1)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    champion = trained(CNN, 2)
    good = packed(tmp_path, champion, CNN, ("a", "b"))
    with torch.no_grad():
        champion.head.linear.weight[0, 0] = torch.nan
    bad = package.Package(good)
    weights = {name: value.contiguous() for name, value in champion.state_dict().items()}
    bad.files["weights.safetensors"] = save(weights)
    with pytest.raises(DataError, match=r"NaN"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "_opened", lambda folder: bad)
        start.load_into(ImageModel(CNN, 2), good, CNN, ("a", "b"))


def test_a_key_knows_a_package_by_its_seal_and_not_by_its_place(tmp_path: Path) -> None:
    job = validate(TrainJob, {"table": {"uri": "/t"}})
    version = TableVersion("/t", 1)

    def key(path: str | None) -> str:
        return replace(job, {"train.start_from": path}).training_key(version)

    seal = "ab" * 32
    assert key(f"/one/{seal}") == key(f"/two/{seal}") != key(f"/one/{'cd' * 32}")
    assert key("/one/epoch") != key("/two/epoch") and key(None) != key("/one/epoch")


@pytest.mark.parametrize(
    ("name", "changed", "same"),
    [
        ("hf:vit", {"transformers_version": "5.24.1", "_name_or_path": "/elsewhere"}, True),
        ("hf:vit", {"dtype": "float32", "of_a_later_release": 1}, True),
        ("hf:vit", {"hidden_size": 64}, False),
        ("file:mine:net", {"of_a_later_release": 1}, False),
    ],
)
def test_a_champion_is_the_same_model_after_an_update_of_transformers(
    name: str, changed: dict[str, object], same: bool
) -> None:
    """Each retrain started from pretrained weights then, and said that the backbone was another."""
    options = {"hidden_size": 32, "transformers_version": "5.24.0", "dtype": "bfloat16"}
    model = {"name": name, "options": options, "mode": "finetune", "head": "linear"}
    theirs = SimpleNamespace(info={"model": model}, task=SimpleNamespace(kind="single_label"))
    ours = SimpleNamespace(**model | {"options": options | changed}, task="single_label")
    ours.resolved = lambda: ours
    if same:
        start.require_same(theirs, ours, Path("champion"))
        return
    with pytest.raises(ConfigError, match="weights of another model"):
        start.require_same(theirs, ours, Path("champion"))


def test_a_key_knows_weights_by_their_content(tmp_path: Path) -> None:
    """Other weights in the same folder are another training; it read the old result."""
    job = validate(TrainJob, {"table": {"uri": "/t"}})

    def key(path: Path) -> str:
        return replace(job, {"train.start_from": str(path)}).training_key(TableVersion("/t", 1))

    at, elsewhere = tmp_path / "latest", tmp_path / "elsewhere"
    keys = []
    for seed in (1, 2):
        shutil.rmtree(at, ignore_errors=True)
        packed(tmp_path, trained(CNN, 2, seed), CNN, ("a", "b")).rename(at)
        keys.append(key(at))
    shutil.copytree(at, elsewhere)
    assert keys[0] != keys[1] == key(elsewhere) == key(tmp_path / package.Package(at).seal)
    for value in (1.0, 2.0):
        pieces = {"w": Piece.whole(torch.tensor([value]))}
        checkpoint.write(tmp_path / "epoch", Snapshot(pieces), LoopState())
        keys.append(key(tmp_path / "epoch"))
    assert len(set(keys)) == 4


def test_a_key_knows_the_rows_that_are_left_out_and_not_their_file(tmp_path: Path) -> None:
    job = validate(TrainJob, {"table": {"uri": "/t"}})

    def key(path: Path, text: str | None) -> str:
        if text is not None:
            path.write_text(text)
        return replace(job, {"feed.leave_out": str(path)}).training_key(TableVersion("/t", 1))

    mine = tmp_path / "mine.json"
    first, second = key(mine, '["a"]'), key(mine, '["a", "b"]')
    assert first != second == key(tmp_path / "other.json", '["a", "b"]')
    # As a retrain writes it, by the name of its content.
    content = sha256(b'["a"]').hexdigest()
    named = tmp_path / f"{content}.json"
    assert key(named, None) == key(named, '["a"]') == first
