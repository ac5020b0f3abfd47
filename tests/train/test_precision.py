"""Every strategy and precision learns as one device in fp32; fp16's loss scale falls in time.

fp16 and bf16 engines of DeepSpeed leave global state: each precision has processes of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import RaypipeError
from raypipe.train.parallel.precision import LOWEST_SCALE, require_scale

from .parallel_ranks import Scenario, result, run, run_here

ZERO, NATIVE = ("zero1", "zero2", "zero3"), ("ddp", "fsdp")
STEPS, HIGH = 10, 2.0**30


def scenarios(strategies: tuple[str, ...], precision: str) -> list[Scenario]:
    half: dict[str, Any] = {"precision": precision}
    plain = [Scenario(f"{s}-{precision}", s, STEPS, settings=half) for s in strategies]
    return plain + [
        Scenario(f"{s}-{precision}-clip", s, STEPS, settings=half | {"clip_norm": 0.5})
        for s in strategies
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    clipped = {"clip_norm": 0.5}
    run_here(
        [Scenario("plain", "single", STEPS), Scenario("clip", "single", STEPS, settings=clipped)],
        folder,
    )
    return folder


def agree(folder: Path, name: str, whole: str, rel: float = 0.02) -> None:
    """Equal curve and moments. Clipping the norm times the scale would shrink moments 70-fold."""
    told, one = result(folder, name), result(folder, whole)
    assert told["losses"] == pytest.approx(one["losses"], rel=rel)
    moments = [
        sum(float(t.sum()) for k, t in r["optimizer"].items() if k.startswith("exp_avg_sq/"))
        for r in (told, one)
    ]
    assert moments[0] == pytest.approx(moments[1], rel=0.1)


@pytest.mark.slow
@pytest.mark.share
def test_fp16_of_zero_steps_clips_and_lowers_its_scale(expected: Path) -> None:
    """ba74455 made no more steps after an overflow, and clipped the norm times the scale."""
    high = [
        Scenario(f"{s}-high", s, 40, scale=HIGH, settings={"precision": "fp16"})
        for s in ("zero2", "zero3")
    ]
    goes_on = Scenario("zero3-on", "zero3", STEPS, "zero2-high", settings={"precision": "fp16"})
    clip = [s for s in scenarios(("zero2", "zero3"), "fp16") if s.name.endswith("clip")]
    run(2, [*clip, *high, goes_on], expected)
    for s in ("zero2", "zero3"):
        agree(expected, f"{s}-fp16-clip", "clip")
        told = result(expected, f"{s}-high")
        assert 1 < told["facts"]["scaler"]["scale"] < 2.0**22
        assert told["losses"][-1] < 0.9 * told["losses"][0]
    scales = [result(expected, name)["facts"]["scaler"] for name in ("zero2-high", "zero3-on")]
    assert (
        scales[0]["scale"] == scales[1]["scale"]
        and scales[1]["_growth_tracker"] == scales[0]["_growth_tracker"] + STEPS
    )
    # And one device goes on with it, clipped or not.
    run_here(
        [Scenario("single-on", "single", 2, "zero2-high", settings={"precision": "fp16"})], expected
    )
    assert result(expected, "single-on")["facts"]["scaler"]["scale"] == scales[0]["scale"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("strategies", [NATIVE, ZERO], ids=["native", "zero"])
def test_every_strategy_in_every_precision(
    expected: Path, strategies: tuple[str, ...], precision: str
) -> None:
    run(2, scenarios(strategies, precision), expected)
    for s in strategies:
        agree(expected, f"{s}-{precision}", "plain")
        agree(expected, f"{s}-{precision}-clip", "clip")


def test_one_device_lowers_its_scale_too(expected: Path) -> None:
    run_here(
        [Scenario("single-high", "single", 40, scale=HIGH, settings={"precision": "fp16"})],
        expected,
    )
    told = result(expected, "single-high")
    assert (
        1 < told["facts"]["scaler"]["scale"] < 2.0**22
        and told["losses"][-1] < 0.9 * told["losses"][0]
    )


def test_a_scale_that_only_falls_is_an_error_and_not_a_training() -> None:
    with pytest.raises(
        RaypipeError, match=r"Every step overflows fp16.*loss scale.*Set train\.precision=bf16"
    ):
        require_scale(LOWEST_SCALE / 2)
    require_scale(1.0)
