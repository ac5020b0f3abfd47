"""A window that slides over a night: its statistic is Alibi Detect's, and its p-value holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from raypipe.cluster import sidecar
from raypipe.config import validate
from raypipe.errors import ConfigError, DataError
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.watch import by_image, check, engine, power
from raypipe.watch.detect import DriftConfig, DriftReport, detect
from raypipe.watch.online import Scan, scan
from raypipe.watch.predicted import Batch
from raypipe.watch.projection import median_width
from raypipe.watch.sides import Seen

from .test_mmd import by_definition

ONLINE = DriftConfig(detectors=("online",))


def rows(rng: np.random.Generator, count: int, move: float = 0.0) -> np.ndarray:
    return (rng.normal(size=(count, 6)) + move).astype(np.float32)


def scanned(reference: np.ndarray, night: np.ndarray, window: int = 20, draws: int = 99) -> Scan:
    width = median_width(np.concatenate([reference, night]), 0)
    return scan(reference, night, width, window, draws, 3)


def test_each_place_is_the_definition() -> None:
    rng = np.random.default_rng(0)
    reference, night = rows(rng, 30), rows(rng, 25)
    width = median_width(np.concatenate([reference, night]), 0)
    found = scanned(reference, night, window=7)
    assert found.squared_T.shape == (19,) and found.window == 7
    for place, squared in enumerate(found.squared_T):
        pooled = np.concatenate([reference, night[place : place + 7]])
        expected = by_definition(pooled, np.arange(37) >= 30, width)
        assert squared == pytest.approx(expected, abs=1e-6)
    assert found.statistic == found.squared_T.max()
    assert scanned(reference, night[:9]).window == 4, "at most half of the night"


@pytest.mark.slow
def test_the_statistic_is_that_of_alibi_s_online_test() -> None:
    """It takes its own part of the reference; with the same part, each image has its statistic."""
    import subprocess
    import tempfile

    rng = np.random.default_rng(1)
    reference, night = rows(rng, 120), np.concatenate([rows(rng, 30), rows(rng, 40, 0.8)])
    width = median_width(reference, 0)
    code = """
import sys, numpy as np, torch
from raypipe.watch.alibi_sidecar import alibi
given = np.load(sys.argv[1] + "/given.npz")
torch.manual_seed(0)
detector = alibi().MMDDriftOnline(given["reference"], ert=50, window_size=20, backend="pytorch",
    sigma=given["width"], n_bootstraps=300, device="cpu", verbose=False)
inner = detector._detector
scores = [inner.score(row) for row in given["night"]]
np.savez(sys.argv[1] + "/found.npz", kept=inner.ref_inds.numpy(), scores=scores)
"""
    with tempfile.TemporaryDirectory() as folder:
        given = {"reference": reference, "night": night, "width": np.array([width], np.float32)}
        np.savez(f"{folder}/given.npz", allow_pickle=False, **given)  # type: ignore[arg-type]
        python = str(sidecar.ensure("alibi"))
        subprocess.run(
            [python, "-c", code, folder], check=True, cwd=Path(check.__file__).parents[2]
        )
        with np.load(f"{folder}/found.npz") as found:
            kept, scores = found["kept"], found["scores"]
    ours = scan(reference[kept], night, width, 20, 20, 0).squared_T
    assert ours == pytest.approx(scores[19:], abs=1e-5)


def test_p_is_uniform_without_drift() -> None:
    rng = np.random.default_rng(2)
    p_values = [scanned(rows(rng, 40), rows(rng, 30), 8).p_value for _ in range(200)]
    # Kolmogorov's distance that 200 uniform draws exceed once in 1,000.
    assert np.abs(np.sort(p_values) - np.arange(1, 201) / 200).max() < 0.138


def test_the_end_of_a_night_is_found_that_the_night_hides() -> None:
    found = both = 0
    for seed in range(1, 21):
        rng = np.random.default_rng(seed)
        reference = rows(rng, 200)
        night = np.concatenate([rows(rng, 240), rows(rng, 30, 0.6)])
        one = scanned(reference, night, 30, 199)
        alarm = one.alarm_after(0.01)
        assert (alarm is not None) == (one.p_value <= 0.01)
        if alarm is not None:
            found += 1
            assert 241 < alarm <= 270 and one.farthest[1] > 250
        cfg = DriftConfig(detectors=("mmd",), permutations=199)
        scores = np.full((470, 2), 0.5)
        both += detect(reference, night, scores[:200], scores[200:], cfg, seed).is_drift
    assert found >= 18 and both <= found - 10, (found, both)


def test_equal_images_and_hostile_sizes() -> None:
    assert scanned(np.ones((30, 3)), np.ones((20, 3))).p_value == 1
    for reference, night, window in ((1, 20, 5), (20, 3, 5), (20, 20, 1), (5000, 20, 5)):
        with pytest.raises(DataError, match="No window can slide over so many rows"):
            scan(np.ones((reference, 2)), np.ones((night, 2)), 1.0, window, 20, 0)


def checked(seen: dict[str, Any], cfg: DriftConfig = ONLINE, **of: Any) -> DriftReport:
    rng = np.random.default_rng(5)
    reference, night = rows(rng, 150), np.concatenate([rows(rng, 90), rows(rng, 40, 1.0)])
    scores = rng.dirichlet([2, 2, 2], 280)
    return detect(reference, night, scores[:150], scores[150:], cfg, 0, Seen(**of), Seen(**seen))


def test_as_a_detector_it_needs_an_order_and_says_where_the_night_changed() -> None:
    order = [float(n) for n in range(130)]
    found = checked({"arrived_N": order})
    assert [(e.detector, e.on, e.engine) for e in found.evidence] == [
        ("online", "arrival", "exact")
    ]
    assert found.is_drift and "of 130 as they came" in found.evidence[0].detail
    assert int(found.evidence[0].detail.split(" to ")[1].split()[0]) > 115
    assert checked({"arrived_N": order}) == found, "a repeated check is the same evidence"

    mixed = np.random.default_rng(0).permutation(130)
    spread = checked({"arrived_N": mixed.astype(float).tolist()})
    assert spread.evidence[0].statistic < found.evidence[0].statistic / 2
    # Rows without a time are left out, here those that have drifted.
    unknown = checked({"arrived_N": [*order[:90], *[np.nan] * 40]})
    assert not unknown.is_drift and "of 90 as they came" in unknown.evidence[0].detail

    two = DriftConfig(detectors=("online", "ks"))
    for seen, of, why in (
        ({}, {}, "name their column in watch.arrived"),
        ({"arrived_N": [np.nan] * 130}, {}, "only 0 images of the batch say when they came"),
        ({"arrived_N": order, "groups": ["g"] * 130}, {"groups": ["h"] * 150}, "come in groups"),
    ):
        with pytest.raises(DataError, match=why):
            checked(seen, **of)
        left = checked(seen, two, **of)
        assert {e.detector for e in left.evidence} == {"ks"} and why in left.notes[-1]
    with pytest.raises(DataError, match="batch_arrived"):
        checked({"arrived_N": order[:-1]})


def test_of_a_sampled_night_it_names_places_of_the_whole_night() -> None:
    """The last 100 of 1,200 images were called "images 151 to 200 of 200 as they came"."""
    rng = np.random.default_rng(11)
    reference, night = rows(rng, 150), np.concatenate([rows(rng, 1_000), rows(rng, 200, 1.0)])
    scores = np.full((1_350, 2), 0.5)
    order = rng.permutation(1_200)  # of the rows in the table
    seen = Seen(arrived_N=order.astype(float).tolist())
    cfg = DriftConfig(detectors=("online",), max_rows=200, window=20)
    batch = (scores[:150], scores[150:], cfg, 0, Seen(), seen)
    found = detect(reference, night[order], *batch)
    detail = found.evidence[0].detail
    first, last = [int(word) for word in detail.split() if word.isdecimal()][:2]
    assert found.is_drift and 950 < first < last <= 1_200, detail
    assert detail.endswith("of 1200 as they came (200 of them were compared)")


def test_it_is_computed_here_whatever_the_engine_is() -> None:
    for name in ("auto", "exact", "alibi"):
        chosen = engine.choose(name, ["online"])  # type: ignore[arg-type]
        assert chosen.name == "exact" and "Alibi Detect gives no p-value for it" in chosen.why
    both = engine.choose("alibi", ["online", "mmd"])
    assert both.engine_by_detector == {"online": "exact", "mmd": "alibi"}
    with pytest.raises(ConfigError, match="permutations must be at least 1000"):
        validate(DriftConfig, {"detectors": ["online"], "alpha": 0.001})


def test_its_power_is_measured_on_the_reference() -> None:
    rng = np.random.default_rng(7)
    features = rng.normal(size=(100, 6))
    known = power.Known(features, np.full((100, 2), 0.5), Seen())
    cfg = DriftConfig(detectors=("online",), permutations=60, alpha=0.05)
    found = power.measure(known, cfg, 40, 0, draws=30, tries=5)
    assert found.holds and found.move is not None


@pytest.mark.parametrize(
    ("came", "order"),
    [
        (pa.array([3, 1, None, 1]), [2.0, 1.0, np.nan, 1.0]),
        (pa.array([0.5, np.nan, -1.0, None]), [2.0, np.nan, 1.0, np.nan]),
        (pa.array([10**18 + 1, 10**18, 5, 6], pa.timestamp("us", "UTC")), [4.0, 3.0, 1.0, 2.0]),
        (pa.array(["10", "9", None, "2"]), [3.0, 2.0, np.nan, 1.0]),
        (pa.array(["2026-11-02", "", "2026-11-01", " "]), [2.0, np.nan, 1.0, np.nan]),
        (pa.array(["2026-11-02", None, "2026-11-01T23:00:00", "2026-11-03"]), [2.0, np.nan, 1, 3]),
    ],
)
def test_the_order_is_read_from_the_batch_s_table(
    tmp_path: Path, came: pa.Array, order: list[float]
) -> None:
    uri = str(tmp_path / "night")
    images = [b"1", b"2", b"3", b"4"]
    write_deltalake(uri, pa.table({"image_id": list("abcd"), "image": images, "t,'": came}))
    source = TableConfig(uri=uri)
    empty = np.zeros((4, 1))
    version = ImageTable.open(source).pin()
    mine = Batch(version, ["d", "c", "b", "a"], [""] * 4, empty, empty)
    found = by_image.arrived("t,'", source, mine)
    assert found is not None and np.array_equal(found, order[::-1], equal_nan=True)
    unknown = Batch(version, [None, "z"], [""] * 2, empty[:2], empty[:2])
    assert np.isnan(by_image.arrived("t,'", source, unknown)).all()  # type: ignore[arg-type]
    assert by_image.arrived("gone", source, mine) is None
    assert by_image.arrived(None, source, mine) is None
