"""Named slices, latency and size: they refuse with their reason, and never promote."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raypipe.config import key_of, to_json, validate
from raypipe.errors import ConfigError, DataError
from raypipe.feed.dataset import pin
from raypipe.models.spread import Spread
from raypipe.serve import latency
from raypipe.tables.table import append
from raypipe.train import learned
from raypipe.train.job import TrainJob
from raypipe.watch import decisions, limited
from raypipe.watch.comparison import compare
from raypipe.watch.decide import Decision, GateConfig, gate, key_part
from raypipe.watch.limits import Measured, Named
from tests.conftest import encode, texture
from tests.watch.test_decide import judged

BETTER = judged("poly", won=80, lost=5)
NIGHT = {"name": "night", "where": {"shift": "night"}, "tolerance": 0.1}


def cfg(**given: object) -> GateConfig:
    return validate(GateConfig, given)


def decide(
    cfg: GateConfig, named: tuple[Named, ...] = (), measured: Measured | None = None
) -> Decision:
    return gate([BETTER], BETTER, cfg, named, measured)


def on_night(won: int, lost: int, images: int = 400) -> tuple[Named, ...]:
    return (Named("night", judged("night", won, lost, images)),)


def took(ms: float, ratio: float = 1.0, spread: float = 0.0, **sizes: int) -> Measured:
    around = lambda value: Spread(value, value - spread, value + spread)  # noqa: E731
    given = {"champion_bytes": 10_000_000, "challenger_bytes": 10_000_000} | sizes
    of = {"batch": 1, "rounds": 21, "machine": "a CPU, 1 thread of 2 CPUs"}
    return Measured(
        champion_ms=around(ms / ratio), challenger_ms=around(ms), ratio=around(ratio), **of, **given
    )


def test_two_slices_of_one_name_are_refused_where_they_are_read() -> None:
    day = {**NIGHT, "where": {"shift": "day"}}
    with pytest.raises(ConfigError, match="night: two slices have one name"):
        cfg(slices=[NIGHT, day])
    assert len(cfg(slices=[NIGHT, {**day, "name": "day"}]).slices) == 2


def test_without_limits_nothing_changes() -> None:
    assert decide(cfg()) == gate([BETTER], BETTER, cfg())
    # Keys of decisions and retrains that an earlier raypipe made are found again.
    before = {"alpha": 0.05, "tolerance": 0.05, "safety_alpha": 0.05, "least_rows": 50}
    assert key_of(key_part(cfg())) == key_of(before)
    assert key_part(cfg(latency_batch=8)) == before, "of no latency"
    assert key_of(key_part(cfg(size_mb=3))) != key_of(before)


def test_a_named_slice_that_loses_refuses_a_challenger_that_is_better() -> None:
    with_night = cfg(slices=[NIGHT])
    kept = decide(with_night, on_night(won=5, lost=5))
    assert kept.act and "slice night: +0.0 points on night (400 images)" in kept.reason
    lost = decide(with_night, on_night(won=0, lost=60))
    assert not lost.act
    assert lost.reason.startswith("Refused: slice night: -15.0 points on night (400 images)")
    assert "-10.0 points is tolerated" in lost.reason and "It is better: " in lost.reason
    refused = gate([judged("a", 1, 1)], judged("a", 1, 1), with_night, on_night(0, 60))
    assert "no gain" in refused.reason and "slice night" in refused.reason, "both reasons are said"


def test_a_small_or_missing_slice_is_said_and_refuses_unless_it_may_pass() -> None:
    for few in (on_night(0, 0, images=12), (Named("night", None),), ()):
        refused = decide(cfg(slices=[NIGHT]), few)
        assert not refused.act and "slice night is not judged" in refused.reason
        passed = decide(cfg(slices=[NIGHT | {"few": "pass"}]), few)
        assert passed.act and "slice night is not judged" in passed.reason
    assert (
        "no labelled test image that neither model has learned from, 30 are"
        in decide(cfg(slices=[NIGHT])).reason
    )
    said = decide(cfg(slices=[NIGHT]), on_night(0, 0, images=12)).reason
    assert "12 labelled test images (one of each group, and of copies) that neither" in said
    wide = decide(cfg(slices=[NIGHT | {"tolerance": 0.01}]), on_night(won=4, lost=4, images=40))
    assert not wide.act and "images would clear an equal challenger" in wide.reason


def test_a_slice_that_lost_the_tolerance_seldom_passes() -> None:
    """The level holds on the boundary."""
    rng = np.random.default_rng(0)
    draws, passed = 600, 0
    for _ in range(draws):
        champion_N = rng.random(200) < 0.8
        # Of the rows that the champion has right, so many are lost that 10 points go.
        challenger_N = champion_N & (rng.random(200) >= 0.125)
        night = compare("night", champion_N.tolist(), challenger_N.tolist(), False)
        passed += decide(cfg(slices=[NIGHT]), (Named("night", night),)).act
    assert passed <= 50, "5 % are 30; more than 50 have a probability below 1e-3"


def test_numbers_that_are_not_finite_refuse() -> None:
    errors = compare("night", [1.0] * 50, [math.nan] * 50, False, unit=1.0)
    assert "not a finite number" in decide(cfg(slices=[NIGHT]), (Named("night", errors),)).reason
    broken = Spread.of([1.0, math.nan] * 30)
    measured = Measured(1, 1, broken, broken, broken, 1, 60, "here")
    assert not decide(cfg(latency_ms=1e9), (), measured).act


@pytest.mark.parametrize(
    ("limit", "measured", "says"),
    [
        ({"latency_ms": 10}, took(9), ""),
        ({"latency_ms": 10}, took(11), "latency 11 ms (11 to 11) for 1 image, median of 21 rounds"),
        ({"latency_ms": 10}, took(9.9, spread=0.5), "too near to tell on this machine"),
        ({"latency_ratio": 1.1}, took(50, 1.05), ""),
        ({"latency_ratio": 1.1}, took(50, 1.3), "latency 1.3 times the champion's"),
        ({"latency_ratio": 1.1}, None, "were not measured"),
        ({"latency_ratio": 1.1}, Measured(1, 1), "latency was not measured"),
        ({"size_mb": 10}, took(1), ""),
        ({"size_mb": 9.9}, took(1), "size 10 MB, 9.9 MB is allowed"),
        ({"size_ratio": 1.5}, took(1, challenger_bytes=16_000_000), "size 1.6 times"),
        ({"size_ratio": 2}, took(1, champion_bytes=0, challenger_bytes=1), ""),
    ],
)
def test_latency_and_size(limit: dict[str, float], measured: Measured | None, says: str) -> None:
    decision = decide(cfg(**limit), (), measured)
    assert decision.act == (not says) and says in decision.reason
    if "latency" in decision.reason and measured and measured.machine:
        assert "on a CPU, 1 thread of 2 CPUs" in decision.reason


def test_the_lists_of_learned_rows_are_no_size_of_a_model() -> None:
    assert limited.size_of({"weights": b"12345", learned.OWN: b"1", learned.INHERITED: b"2"}) == 5


def test_the_interval_of_a_median_holds_it() -> None:
    rng = np.random.default_rng(0)
    held, draws = 0, 2000
    for _ in range(draws):
        found = Spread.of(rng.lognormal(0, 1, 21))
        held += found.low <= 1.0 <= found.high
    assert held / draws > 0.94
    assert Spread.of([3.0] * 5) == Spread(3.0, -math.inf, math.inf), "five say nothing"
    six = Spread.of([1.0, 2, 3, 4, 5, 6])
    assert (six.low, six.high) == (1.0, 6.0)


def test_a_row_keeps_what_was_measured() -> None:
    named = (*on_night(3, 1), Named("gone", None))
    measured = took(5, spread=math.inf)
    decision = decide(cfg(latency_ms=10), (), measured)
    parts = ("m/1", "m/2", "t@v0")
    [row] = decisions.as_row("k", parts, (BETTER,), BETTER, decision, named, measured).to_pylist()
    assert decisions.decided(row) == ((BETTER,), BETTER, decision)
    kept = decisions.limited(row)
    assert kept["named"] == named and kept["measured"].challenger_ms.high == math.inf
    [plain] = decisions.as_row("k", parts, (BETTER,), BETTER, decision).to_pylist()
    assert set(json.loads(plain["slices"])) == {"slices", "union"}, "as it always was"
    assert decisions.limited(plain) == {"named": (), "measured": None}
    assert to_json(measured.as_json())


def test_rows_of_named_slices_are_found_by_id() -> None:
    rows = pa.table(
        {
            "id": ["a", "b", "c", "d"],
            "group": ["s"] * 4,
            "model_0": [True, True, False, True],
            "model_1": [True, False, True, True],
        }
    )
    ids = {"night": {"b", "c", "elsewhere"}, "none": set()}
    night, none = limited.compared(rows, ids, None)
    assert night.judged is not None and none.judged is None
    assert (night.judged.images, night.judged.won, night.judged.lost) == (2, 1, 1)
    assert limited.compared(rows, {}, None) == ()
    assert (
        limited.compared(pa.table({"id": pa.array([], pa.string())}), ids, None)[0].judged is None
    )
    twice = pa.concat_tables([rows, rows])
    with pytest.raises(DataError, match="ids of their own"):
        limited.require_own_ids(twice, ids)
    limited.require_own_ids(rows, ids)
    limited.require_own_ids(twice, {})


def test_settings_that_say_nothing_are_refused() -> None:
    for wrong in (
        {"slices": [{"name": "", "where": {"a": "b"}}]},
        {"slices": [{"name": "x", "where": {}}]},
        {"latency_ms": 0},
        {"latency_batch": 0},
        {"size_ratio": -1},
        {"slices": [NIGHT | {"few": "maybe"}]},
    ):
        with pytest.raises(ConfigError):
            cfg(**wrong)


def test_latency_is_of_images_that_decode(tmp_path: Path) -> None:
    """A broken test image without a label is compared by nobody; it ended the retrain."""
    good = [encode(texture(seed, 16)) for seed in range(4)]
    rows = pa.table(
        {
            "image_id": [f"i{n}" for n in range(9)],
            "image": [b"broken", None, b"", *good, *good[:2]],
            "label": [None, None, None, "a", "b", "a", "b", "a", "b"],
            "split": ["test"] * 5 + ["train"] * 2 + ["val"] * 2,
        }
    )
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}})
    append(job.table.uri, rows, "add")
    found = latency.images(pin(job.table, job.feed), job.feed.test, 16, 1)
    assert found == good[:2]


def test_a_slice_has_its_labelled_rows_and_no_others(tmp_path: Path) -> None:
    """A row without an id was in no slice, and an unlabelled twin put its labelled one into one."""
    odd = "<b>'\";--"
    rows = pa.table(
        {
            "image_id": ["a", None, "twin", "twin", "c", "d", "e"],
            "image": [b"x"] * 7,
            "label": ["a", "b", "a", None, "b", "a", "b"],
            "split": ["test"] * 5 + ["train", "val"],
            "shift": [odd, odd, "day", odd, None, odd, odd],
        }
    )
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}})
    append(job.table.uri, rows, "add")
    limits = cfg(slices=[{"name": "n", "where": {"shift": odd}}])
    assert limited.rows_of(limits, job, pin(job.table, job.feed)) == {"n": {"a", ""}}
