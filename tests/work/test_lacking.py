"""What a registered model lacks because time was short, by its package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raypipe.config import RunConfig
from raypipe.registry.package import MANIFEST, seal_of
from raypipe.registry.runs import KEY
from raypipe.registry.tracking import RegistryConfig
from raypipe.registry.versions import SEAL, ModelVersion
from raypipe.search.ledger import Ledger
from raypipe.train import shifted
from raypipe.work import lacking

FEW = "registry.severity_images=200 and registry.severity_s=1.5 allow 16 shifted images"


def ledger(budget_s: float | None = 60.0, copies: int = 1800) -> Ledger:
    made = Ledger(budget_s)
    made.forecast.splits, made.forecast.shifted = (400, 1000), copies
    return made


def info(why_not: str = "", copied: int = 200, **registry: Any) -> dict[str, Any]:
    """What `publish` writes into package.json of it."""
    config = {"registry": RegistryConfig(**registry).model_dump(mode="json")}
    return {"config": config, "severity": {"why_not": why_not, "copied": copied, "seconds": 1.0}}


@pytest.mark.parametrize(
    ("why_not", "copied", "is_said"),
    [
        ("", 200, False),
        (shifted.NO_TIME, 0, True),
        (FEW, 16, True),
        # Neither is a matter of time.
        ("there are no validation images", 0, False),
        ("too few wrong answers to calibrate on", 200, False),
    ],
)
def test_shifted_copies_that_the_clock_has_cut_are_said(
    why_not: str, copied: int, is_said: bool
) -> None:
    """A host that became slow in the end cost the estimate, and only drift checks said so."""
    said = [f"No estimate of accuracy in drift checks: {why_not}"] if is_said else []
    assert lacking.lacks(info(why_not, copied), ledger()) == said
    assert lacking.lacks(info(why_not, copied), ledger(None)) == said, "severity_s is a clock, too"
    assert lacking.lacks(info(why_not, copied), ledger(copies=0)) == [], "nobody wants them"


def test_a_sample_that_judges_is_said_within_a_budget() -> None:
    (said,) = lacking.lacks(info(judged_images=900), ledger())
    assert said == "At most 900 images of a split judge the model (the largest has 1,000)"
    assert lacking.lacks(info(judged_images=1000), ledger()) == []
    assert lacking.lacks(info(judged_images=None), ledger()) == []
    assert lacking.lacks(info(judged_images=900), ledger(None)) == []
    # Nothing is known of a package of ba74455.
    assert lacking.lacks({}, ledger()) == []


def test_only_the_registered_package_is_asked(tmp_path: Path) -> None:
    folder = tmp_path / "packages" / "k"
    folder.mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps(info(judged_images=900)))
    (folder / MANIFEST).write_text("{}")
    run = RunConfig(dir=str(tmp_path))
    ours = ModelVersion("m", 1, "uri", {KEY: "k", SEAL: seal_of(folder)})
    # Of another registry, for which the package was built before.
    others = ModelVersion("m", 2, "uri", {KEY: "k", SEAL: "another"})
    gone = ModelVersion("m", 3, "uri", {KEY: "gone", SEAL: seal_of(folder)})
    for version, count in ((ours, 1), (others, 0), (gone, 0)):
        made = ledger()
        lacking.note(version, run, made)
        assert len(made.notes) == count
