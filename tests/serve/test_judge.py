"""Champion and challenger on the same rows, where rows or models are odd."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from deltalake import write_deltalake
from PIL import Image

from raypipe.errors import DataError
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry.package import Package, Reference
from raypipe.registry.packing import build
from raypipe.serve import evaluate
from raypipe.tables.table import ImageTable
from tests.conftest import encode


def test_slices_have_the_names_of_the_champion_s_sources(
    textured: Any, tmp_path: Path, ray_session: str
) -> None:
    """With a null among them, all sources of a batch were floats: the slice 1.0 beside the slice 1,
    and both of them new to a champion that was trained on 1."""
    count = 12
    sources = [None if n == 5 else n % 2 for n in range(count)]
    labels = [None if n == 3 else n % 3 for n in range(count)]
    columns = {
        "image_id": pa.array([None, *range(1, count)], pa.int64()),
        "image": [textured(seed, side_px=32) for seed in range(count)],
        "label": pa.array(labels, pa.int64()),
        "source": pa.array(sources, pa.int64()),
        "part": pa.array([None, math.nan, *[n // 4 for n in range(2, count)]], pa.float64()),
    }
    write_deltalake(str(tmp_path / "t"), pa.table(columns))
    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    empty = Reference(np.empty((0, 1)), np.empty((0, 1)), ())
    made = build(tmp_path / "p", ImageModel(cfg, 3), cfg, ("0", "1", "2"), empty, {})
    package, table = Package(made), ImageTable(str(tmp_path / "t"))
    both = [package, package]
    judged = evaluate.judge(both, table, table.pin(), {}, belonging="part").to_pylist()

    said = package.predict(columns["image"]).labels
    expected = {
        str(n or ""): (str(sources[n]), said[n] == str(label), said[n] == str(label))
        for n, label in enumerate(labels)
        if label is not None
    }
    found = {row["id"]: (row["group"], row["model_0"], row["model_1"]) for row in judged}
    assert found == expected
    # What the images are copies of, and parts of: a null and NaN are no part.
    digests = [hashlib.sha256(image).hexdigest() for image in columns["image"]]
    parts = ["", "", *[str(n // 4 * 1.0) for n in range(2, count)]]
    alike = {row["id"]: (row["sha256"], row["belongs"]) for row in judged}
    assert alike == {i: (digests[int(i or 0)], parts[int(i or 0)]) for i in expected}
    plain = evaluate.judge(both, table, table.pin(), {})
    assert {*plain["belongs"].to_pylist()} == {""}


def test_a_row_of_a_prepared_table_keeps_the_hash_of_the_source_s_bytes(
    textured: Any, tmp_path: Path, ray_session: str
) -> None:
    """Without it, a row without an id was not known to a champion of the source."""
    images = [textured(seed, side_px=32) for seed in range(4)]
    originals = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(4)]
    columns = {
        "image_id": pa.array(["0", None, "2", None], pa.string()),
        "image": images,
        "label": ["a", "b", None, "b"],
        "sha256": [hashlib.sha256(image).hexdigest() for image in images],
        "original_sha256": originals,
    }
    write_deltalake(str(tmp_path / "t"), pa.table(columns))
    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    empty = Reference(np.empty((0, 1)), np.empty((0, 1)), ())
    package = Package(build(tmp_path / "p", ImageModel(cfg, 2), cfg, ("a", "b"), empty, {}))
    table = ImageTable(str(tmp_path / "t"))
    version = table.pin()
    assert "original_sha256" not in evaluate.judge([package], table, version, {}).column_names
    prepared = replace(version, origin="/source@v0", origin_id="source")
    judged = evaluate.judge([package], table, prepared, {}).to_pylist()
    of_source = {row["stored_sha256"]: row["original_sha256"] for row in judged}
    assert of_source == {columns["sha256"][n]: originals[n] for n in (0, 1, 3)}
    assert [row["id"] for row in judged] == ["", "", "0"]


def test_an_image_that_a_model_has_no_finite_answer_to_is_one_mistake(
    textured: Any, tmp_path: Path, ray_session: str
) -> None:
    """One such image, for the champion too, ended each retrain with an error after its training: no
    challenger could ever replace it."""
    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    empty = Reference(np.empty((0, 1)), np.empty((0, 1)), ())
    torch.manual_seed(1)
    model, odd = ImageModel(cfg, 2).eval(), ImageModel(cfg, 2).eval()
    odd.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.nn.init.normal_(model.head.linear.weight)
        grey_D = odd.embed(torch.full((1, 32, 32, 3), 128, dtype=torch.uint8))[0]
        odd.head.standardise_by(grey_D, torch.full_like(grey_D, 1e-3))
        odd.head.linear.weight.fill_(3e38)
    packages = [
        Package(build(tmp_path / name, one, cfg, ("a", "b"), empty, {}))
        for name, one in (("model", model), ("odd", odd))
    ]
    grey = encode(Image.new("RGB", (32, 32), (128, 128, 128)))
    images = [textured(seed, side_px=32) for seed in range(3)] + [grey]
    answers = packages[0].predict(images).labels
    labels = [*answers[:3], packages[1].predict([grey]).labels[0]]
    with pytest.raises(DataError, match="finite"):
        packages[1].predict(images[:1])
    columns = {"image_id": list("0123"), "image": images, "label": labels}
    write_deltalake(str(tmp_path / "t"), pa.table(columns))
    table = ImageTable(str(tmp_path / "t"))
    judged = evaluate.judge(packages, table, table.pin(), {})
    assert judged["model_1"].to_pylist() == [False, False, False, True]
    assert judged["model_0"].to_pylist()[:3] == [True] * 3
