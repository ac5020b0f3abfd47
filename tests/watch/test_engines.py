"""Both engines give equal evidence on equal arrays, and the report says which one gave it."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.watch import detect as detecting
from raypipe.watch import engine
from raypipe.watch.detect import DriftConfig, DriftReport, detect
from raypipe.watch.detectors import DETECTORS
from raypipe.watch.sides import Seen

from .test_detect import interleaved, photographs, sample

BOTH = ("mmd", "ks", "cvm", "chi2", "looks")
ALIBI_ONLY = ("lsdd", "classifier", "spot_the_diff", "learned_kernel")


def report(
    engine_name: str, detectors: tuple[str, ...], shift: float, seed: int = 3
) -> DriftReport:
    cfg = DriftConfig(detectors=detectors, permutations=1000, engine=engine_name, max_rows=120)
    before = Seen(["a", "b", "c", "b"] * 40, photographs(3, 160))
    after = Seen(["a", "b", "c", "c"] * 35, photographs(4, 140, darker=shift / 10))
    sides = interleaved(sample(1, 160), sample(2, 140, shift=shift))
    return detect(*sides, cfg, seed, before, after)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("shift", [0.0, 0.15, 0.8])
def test_they_agree(shift: float) -> None:
    here, there = report("exact", BOTH, shift), report("alibi", BOTH, shift)
    assert len(here.evidence) == 7
    for one, other in zip(here.evidence, there.evidence, strict=True):
        assert (one.detector, one.on, one.engine, other.engine) == (
            *(other.detector, other.on),
            *("exact", "alibi"),
        )
        assert one.statistic == pytest.approx(other.statistic, abs=1e-5), one
        if one.detector == "mmd":
            # The same permutations: the same count of them is more extreme.
            assert one.p_value == other.p_value
        else:
            # Alibi keeps p in float32, which has no numbers below 1e-45.
            assert one.p_value == pytest.approx(other.p_value, rel=1e-5, abs=1e-40), one
        assert one.is_drift == other.is_drift
    assert here.unusual == there.unusual and here.p_value == pytest.approx(there.p_value, abs=1e-4)


@pytest.mark.usefixtures("ray_session")
def test_what_only_alibi_has_finds_drift_and_is_quiet_without() -> None:
    moved, still = (report("auto", ALIBI_ONLY, shift) for shift in (0.8, 0.0))
    assert [e.detector for e in moved.evidence] == list(ALIBI_ONLY)
    assert all(e.is_drift for e in moved.evidence), moved
    assert not still.is_drift and min(e.p_value for e in still.evidence) > 0.01, still
    assert moved.engine == "alibi" and "only Alibi Detect's sidecar has it" in moved.notes[0]
    assert report("auto", ALIBI_ONLY, 0.0) == still, "equal input gives an equal report"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", ALIBI_ONLY)
def test_what_is_trained_is_not_tested_on(name: str) -> None:
    """60 draws of one distribution: at .05 more than 9 have odds of 1 to 1,000."""
    cfg = DriftConfig(detectors=(name,), permutations=100, alpha=0.05)
    p_values = []
    for seed in range(60):
        sides = interleaved(sample(100 + seed, 60), sample(200 + seed, 60))
        p_values.append(detect(*sides, cfg, seed).evidence[0].p_value)
    assert np.mean(np.array(p_values) <= 0.05) <= 9 / 60, p_values
    assert 0.3 < np.mean(p_values) < 0.75, p_values


def test_auto_says_why() -> None:
    chosen = engine.choose("auto", ["ks", "lsdd", "mmd"])
    assert chosen.engine_by_detector == {"ks": "exact", "lsdd": "alibi", "mmd": "exact"}
    assert chosen.name == "exact and alibi"
    assert "exact for ks, mmd" in chosen.why and "alibi for lsdd" in chosen.why
    asked = engine.choose("alibi", ["mmd"])
    assert (asked.name, asked.why) == ("alibi", "alibi: drift.engine says so")
    assert {name for name, one in DETECTORS.items() if one.exact} == {*BOTH, "online"}


def test_exact_tests_need_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the sidecar was called")

    monkeypatch.setattr(detecting.engine.sidecar, "call", refuse)
    found = report("auto", BOTH, 0.0)
    assert found.engine == "exact" and {e.engine for e in found.evidence} == {"exact"}
    with pytest.raises(AssertionError, match="the sidecar was called"):
        report("alibi", ("ks",), 0.0)
