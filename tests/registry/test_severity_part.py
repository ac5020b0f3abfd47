"""The calibration of severity in a package: hashed as all parts are, and read with suspicion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.errors import DataError
from raypipe.models.severity import Calibration, calibrate
from raypipe.models.zoo import ImageModel
from raypipe.registry import packing
from raypipe.registry.package import SEVERITY, Package, Reference

from .conftest import CFG

IMAGES = 120


@pytest.fixture(scope="module")
def calibration() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    scores, features = rng.dirichlet(np.ones(3), IMAGES), rng.normal(size=(IMAGES, 64))
    made = calibrate(scores, rng.integers(0, 3, IMAGES), features, ["all"] * IMAGES, 0)
    return made.to_json()


def built(
    folder: Path, model: ImageModel, written: bytes | None, facts: dict[str, Any] | None = None
) -> Package:
    rng = np.random.default_rng(1)
    features, scores = rng.normal(size=(30, 64)), rng.dirichlet(np.ones(3), 30)
    reference = Reference(features, scores, tuple(f"image {i}" for i in range(30)))
    extra = {} if written is None else {SEVERITY: written}
    packing.build(folder, model, CFG, ("a", "b", "c"), reference, facts or {}, extra)
    return Package(folder)


def test_it_is_read_as_it_was_written(
    model: ImageModel, calibration: dict[str, Any], tmp_path: Path
) -> None:
    found = built(tmp_path, model, json.dumps(calibration).encode()).severity()
    assert isinstance(found, Calibration) and found.to_json() == calibration


def test_an_altered_one_is_not_loaded(
    model: ImageModel, calibration: dict[str, Any], tmp_path: Path
) -> None:
    built(tmp_path, model, json.dumps(calibration).encode())
    file = tmp_path / SEVERITY
    file.write_bytes(file.read_bytes().replace(b'"format": 1', b'"format":  1'))
    with pytest.raises(DataError, match=r"does not match its sha256.*severity\.json"):
        Package(tmp_path)
    file.unlink()
    with pytest.raises(DataError, match=r"incomplete.*severity\.json"):
        Package(tmp_path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"farthest": float("nan")}, "farthest is not finite"),
        ({"newest": float("inf")}, "newest is not finite"),
        ({"weights_S": [0.1, float("nan"), 0, 0]}, "weights_S is not finite"),
        ({"weights_S": [0.1, None, 0, 0]}, "weights_S holds no numbers"),
        ({"weights_S": [0.1, "2", 0, 0]}, "weights_S holds no numbers"),
        ({"weights_S": [0.1, 0.2]}, r"weights_S has the shape \(2,\)"),
        ({"seen_WS": [[0.1] * 4, [0.2] * 3]}, "seen_WS is no table"),
        ({"seen_WS": []}, "seen_WS has the shape"),
        ({"kind_W": [0]}, "has the shape"),
        ({"accuracy": 1.5}, "not from 0 to 1"),
        ({"accuracy": True}, "accuracy holds no numbers"),
        ({"accuracy": 10**400}, "accuracy holds no numbers"),
        ({"quantile": 0.0}, "below what calibration gives"),
        ({"error_3": [-1, 0, 0]}, "below what calibration gives"),
        ({"spread_S": [0, 0, 0, 0]}, "below what calibration gives"),
        ({"domains": []}, "no domain"),
        ({"domains": ["a", "b"]}, "has the shape"),
        ({"domains": [None]}, "names that are no text"),
        ({"more": 1}, "missing or unknown: more"),
        ({"format": 2}, "format that this raypipe does not know"),
        ({"format": "x"}, "format that this raypipe does not know"),
    ],
)
def test_what_raypipe_has_not_written_is_refused_with_one_message(
    changes: dict[str, Any],
    match: str,
    model: ImageModel,
    calibration: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Somebody sealed it so: its hashes are right."""
    # json.dumps writes NaN as a bare word, and json.loads takes it.
    found = built(tmp_path, model, json.dumps(calibration | changes).encode())
    with pytest.raises(DataError, match=match):
        found.severity()


@pytest.mark.parametrize("written", [b"", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_no_json_is_refused(written: bytes, model: ImageModel, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be used.*no object of JSON"):
        built(tmp_path, model, written).severity()


def test_that_of_another_model_is_refused(
    model: ImageModel, calibration: dict[str, Any], tmp_path: Path
) -> None:
    fewer = [row[:2] for row in calibration["scores_KC"]]
    written = json.dumps(calibration | {"scores_KC": fewer}).encode()
    with pytest.raises(DataError, match="is of another model"):
        built(tmp_path, model, written).severity()


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "made by an older raypipe"),
        ({"severity": {"why_not": "the task is ordinal"}}, "the task is ordinal"),
        ({"severity": {"why_not": ""}}, "made by an older raypipe"),
        ({"severity": "odd"}, "made by an older raypipe"),
    ],
)
def test_a_package_without_it_says_why(
    facts: dict[str, Any], says: str, model: ImageModel, tmp_path: Path
) -> None:
    found = built(tmp_path, model, None, facts).severity()
    assert isinstance(found, str) and says in found
