"""What is kept about an image is kept under its bytes and all that made it, never under an id."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from raypipe.config import replace, validate
from raypipe.errors import DataError
from raypipe.feed import feature_tasks, features
from raypipe.feed.dataset import FeedConfig, pin
from raypipe.feed.feed import Feed, Source, fetch
from raypipe.feed.kept_features import FORMAT, KeptFeatures
from raypipe.images.decode import decode_batch
from raypipe.models.fingerprint import _of_code as code_of_process
from raypipe.models.fingerprint import backbone_hash, fingerprint, source
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.train.job import TrainJob

FROZEN = ModelConfig(side_px=32)
ROWS = 16


@pytest.fixture(scope="module")
def images(textured: Any) -> list[bytes]:
    return [textured(seed, side_px=32) for seed in range(2 * ROWS)]


@pytest.fixture(scope="module")
def vectors(images: list[bytes]) -> np.ndarray:
    """Each image's features, without anything kept in between."""
    return ImageModel(FROZEN, 2).for_inference().predict(decode_batch(images, 32))[0]


Write = Callable[..., TableConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(
        name: str,
        images: Sequence[bytes],
        ids: Sequence[str],
        hashed: Sequence[bytes] = (),
        group: int = 8,
    ) -> TableConfig:
        columns: dict[str, Any] = {
            "image_id": list(ids),
            "image": pa.array(images, pa.binary()),
            "label": ["ab"[i % 2] for i in range(len(images))],
            "split": ["val" if i % 4 == 3 else "train" for i in range(len(images))],
        }
        if hashed:
            columns["sha256"] = [hashlib.sha256(image).hexdigest() for image in hashed]
        for start in range(0, len(images), group):
            write_deltalake(
                str(tmp_path / name), pa.table(columns).slice(start, group), mode="append"
            )
        return TableConfig(uri=str(tmp_path / name))

    return written


def made(table: TableConfig, store: Path, **feed: Any) -> dict[str, Source]:
    cfg = FeedConfig(**feed)
    return features.feature_sources(pin(table, cfg), ["train", "val"], FROZEN, cfg, str(store))


def held(sources: dict[str, Source]) -> np.ndarray:
    """The features of all rows, in the table's order."""
    every = np.empty((ROWS, 1280), np.float32)
    val = np.arange(ROWS) % 4 == 3
    every[~val], every[val] = fetch(sources["train"].inputs), fetch(sources["val"].inputs)
    return every


@pytest.mark.parametrize("hashed", [True, False])
def test_several_photographs_under_one_id_have_their_own_features(
    hashed: bool, images: list[bytes], vectors: np.ndarray, write: Write, tmp_path: Path
) -> None:
    """And new photographs under the old ids have new ones, in the same store."""
    products = [f"product {i // 4}" for i in range(ROWS)]
    for n in (0, 1):
        mine = images[n * ROWS : (n + 1) * ROWS]
        table = write(f"t{n}", mine, products, mine if hashed else ())
        sources = made(table, tmp_path / "features")
        np.testing.assert_allclose(
            held(sources), vectors[n * ROWS : (n + 1) * ROWS], rtol=1e-3, atol=1e-3
        )
        assert sum(source.decoded for source in sources.values()) == ROWS
    again = made(write("t2", images[:ROWS], [str(i) for i in range(ROWS)]), tmp_path / "features")
    assert [source.decoded for source in again.values()] == [0, 0]  # old photographs under new ids
    np.testing.assert_allclose(held(again), vectors[:ROWS], rtol=1e-3, atol=1e-3)


def test_frozen_features_are_of_readable_images_or_the_run_stops(
    images: list[bytes],
    vectors: np.ndarray,
    write: Write,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """5 was swapped for another picture, 8 to 11 are a row group that rotted."""
    caplog.set_level(logging.WARNING, logger="raypipe")
    stored = [images[20] if i == 5 else b"rot" if 8 <= i < 12 else images[i] for i in range(ROWS)]
    ids = [str(i) for i in range(ROWS)]
    table = write("t", stored, ids, images[:ROWS], group=4)
    sources = made(table, tmp_path / "features")
    replaced = held(sources)
    train = {5: 6, 8: 12, 9: 12, 10: 12}  # 7 and 11 are of the other split
    expected = [train.get(i, {11: 15}.get(i, i)) for i in range(ROWS)]
    np.testing.assert_allclose(replaced, vectors[expected], rtol=1e-3, atol=1e-3)
    feed = Feed(sources["train"], sources["val"], 3, 0)
    for batch in (*feed.train(0), *feed.val()):
        rows = (
            feed._train_rows
            if len(batch.inputs) == 3 and batch.share.images == 3
            else feed._val_rows
        )
        shown = rows.ids_of(batch.samples_B)
        assert not {"5", "8", "9", "10", "11"} & set(shown)
        assert batch.labels_B.tolist() == [int(i) % 2 for i in shown]
    assert feed.replaced == 5
    assert "Image 5 is broken (its bytes do not match their sha256)" in caplog.text
    with pytest.raises(DataError, match=r"Image \d+ is broken.*on_bad=stop"):
        made(table, tmp_path / "features", on_bad="stop")
    # Without hashes each image is tried, and what was tried in vain was not decoded.
    sources = made(write("plain", stored[:12], ids[:12]), tmp_path / "others")
    assert sum(source.decoded for source in sources.values()) == 8
    # Not verified, a row is what it holds; what its hash says is believed only if that is kept.
    other = write(
        "other", [images[20] if i == 5 else images[i] for i in range(ROWS)], ids, images[:ROWS]
    )
    told = [20 if i == 5 else i for i in range(ROWS)]
    np.testing.assert_allclose(
        held(made(other, tmp_path / "new", verify=False)), vectors[told], rtol=1e-3, atol=1e-3
    )


def test_what_was_kept_under_ids_is_made_again_and_another_format_is_refused(
    images: list[bytes],
    vectors: np.ndarray,
    write: Write,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first table is as ba74455 wrote it, under the name that it gave it."""
    caplog.set_level(logging.INFO, logger="raypipe")
    ids, store = [str(i) for i in range(ROWS)], tmp_path / "features"
    name = f"{FROZEN.slug}-32px-{fingerprint(ImageModel(FROZEN, classes=2).backbone)}"
    wrong = np.zeros(1280, np.float32).tobytes()
    write_deltalake(str(store / name), pa.table({"image_id": ids, "features": [wrong] * ROWS}))
    table = write("t", images[:ROWS], ids)
    np.testing.assert_allclose(held(made(table, store)), vectors[:ROWS], rtol=1e-3, atol=1e-3)
    assert f"are made again: {store / name} may be removed" in caplog.text
    uri = KeptFeatures(str(store), FROZEN).uri
    assert {r["format"] for r in ImageTable(uri).delta().to_pyarrow_table().to_pylist()} == {2}
    later = pa.table(
        {"content": [b"x" * 32], "features": [wrong], "format": pa.array([3], pa.int32())},
    )
    write_deltalake(uri, later, mode="append")
    with pytest.raises(DataError, match=r"kept features are not of format 2.*Remove this folder"):
        made(table, store)
    write_deltalake(
        uri,
        pa.table({"image_id": ids, "features": [wrong] * ROWS}),
        mode="overwrite",
        schema_mode="overwrite",
    )
    with pytest.raises(DataError, match=r"kept features are not of format 2.*Remove this folder"):
        made(table, store)


def test_a_backbones_hash_is_of_all_that_turns_bytes_into_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ba74455 it was of the weights alone: another mean or another pooling got the old
    features.
    """
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "from torch import nn\n"
        "def net(pretrained: bool, **options) -> nn.Module:\n"
        "    return nn.Flatten()\n"
    )
    (tmp_path / "mine_a.py").write_text(code)
    plain = ModelConfig(name="file:mine_a:net", side_px=16, mode="finetune")
    built = ImageModel(FROZEN, classes=2).backbone
    changes: list[dict[str, Any]] = [
        {},
        {"mean": 0.3},
        {"std": [0.1, 0.2, 0.3]},
        {"side_px": 32},
        {"options": {"pool": "max"}},
        {"views": 2},
    ]
    hashes = [backbone_hash(replace(plain, change), built, 2) for change in changes]
    hashes.append(backbone_hash(plain, built, 3))
    next(iter(built.parameters())).data[0] += 1
    hashes.append(backbone_hash(plain, built, 2))
    (tmp_path / "mine_a.py").write_text(code.replace("Flatten", "Identity"))
    code_of_process.cache_clear()
    hashes.append(backbone_hash(plain, built, 2))
    assert len(set(hashes)) == len(hashes)
    assert backbone_hash(replace(plain, {"dropout": 0.9}), built, 2) == hashes[-1]  # of the head


def test_code_and_files_of_the_users_own_are_in_the_hash_and_in_a_trainings_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of modules that the factory's one imports; and of a folder's weights."""
    monkeypatch.syspath_prepend(tmp_path)
    package, folder = tmp_path / "mine_b", tmp_path / "vit"
    package.mkdir()
    folder.mkdir()
    (package / "__init__.py").write_text("from .net import net\n")
    factory = "def net(pretrained: bool) -> nn.Module:\n    return nn.{}()\n"
    job = validate(TrainJob, {"table": {"uri": "unused"}})
    version = TableVersion("unused", 3)

    def said(name: str) -> tuple[str, str]:
        model = job.model.model_copy(update={"name": name})
        key = job.model_copy(update={"model": model}).training_key(version)
        return source(name), key

    seen = set()
    for kind in ("Flatten", "Identity", "Flatten"):
        code_of_process.cache_clear()
        (folder / ".cache").mkdir(exist_ok=True)
        (folder / ".cache" / "downloaded").write_text(str(len(seen)))
        (package / "net.py").write_text("from torch import nn\n" + factory.format(kind))
        (folder / "model.safetensors").write_text(kind)
        seen |= {said("file:mine_b:net"), said(f"hf:{folder}")}
    assert len(seen) == 4 == len({key for _, key in seen})
    for name in ("efficientnet_lite0", "hf:vit", "timm:resnet18"):
        assert source(name) == ""


def test_a_worker_with_another_backbone_is_found_out() -> None:
    cfg = FROZEN.model_dump_json()
    built = ImageModel(FROZEN, classes=2)
    found = feature_tasks._backbone(cfg, backbone_hash(FROZEN, built.backbone, FORMAT))
    assert found.head.features == built.head.features
    with pytest.raises(DataError, match=r"A worker has another backbone"):
        feature_tasks._backbone(cfg, "another")
