"""Which test rows champion and challenger are compared on: independent ones."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import binomtest

from raypipe.config import replace, validate
from raypipe.feed.dataset import pin
from raypipe.registry.package import Package
from raypipe.registry.versions import ModelVersion
from raypipe.tables.table import append
from raypipe.train.job import TrainJob
from raypipe.watch import judging
from raypipe.watch.decide import GateConfig, gate

PARTS, EACH = 60, 10
# Only chance, and the number of rows, are in question.
GATE = GateConfig(tolerance=0.5)


def rows(
    hits_N2: np.ndarray, belongs: list[str] | None = None, hashes: list[str] | None = None
) -> pa.Table:
    names = [f"i{n}" for n in range(len(hits_N2))]
    columns: dict[str, Any] = {"id": names, "group": ["all"] * len(names)}
    columns |= {"sha256": hashes or names, "belongs": belongs or [""] * len(names)}
    return pa.table(columns | {"model_0": hits_N2[:, 0], "model_1": hits_N2[:, 1]})


def parts_of(seed: int, challenger: float = 0.7) -> pa.Table:
    """Images of parts: a model has all images of a part right, or none. The champion is right on
    70 %."""
    rng = np.random.default_rng(seed)
    hits_P2 = rng.random((PARTS, 2)) < (0.7, challenger)
    return rows(np.repeat(hits_P2, EACH, axis=0), [f"p{n // EACH}" for n in range(PARTS * EACH)])


def promotes(judged: pa.Table) -> bool:
    return gate(*judging.by_slice(judged, ["all"], None), GATE).act


def quiet(text: str) -> None:
    pass


def test_an_equal_challenger_is_not_promoted_by_images_of_one_part() -> None:
    """Ten images of a part were ten wins: an equal challenger was promoted every third time."""
    tries = 200
    by_images = by_parts = 0
    for seed in range(tries):
        judged = parts_of(seed)
        by_images += promotes(judged)
        by_parts += promotes(judging.independent(judged, seed, quiet))
    assert by_images > 0.2 * tries, by_images
    assert binomtest(by_parts, tries, GATE.alpha, "greater").pvalue > 0.001, by_parts
    # And a challenger that is better is still seen.
    better = [parts_of(seed, challenger=0.97) for seed in range(20)]
    assert sum(promotes(judging.independent(one, 0, quiet)) for one in better) > 15


def test_one_of_each_group_and_one_of_several_copies_is_compared() -> None:
    said: list[str] = []
    belongs = ["a"] * 5 + ["b"] + [""] * 6
    hashes = ["0", "1", "2", "3", "4", "5", "6", "7", "7", "7", "8", "9"]
    judged = rows(np.random.default_rng(0).random((12, 2)) < 0.5, belongs, hashes)
    kept = judging.independent(judged, 1, said.append)
    ids = kept["id"].to_pylist()
    assert said == [
        "6 of 12 test rows are compared: one of each group, and one of several copies of an image"
    ]
    assert len({*ids} & {"i0", "i1", "i2", "i3", "i4"}) == 1
    assert len({*ids} & {"i7", "i8", "i9"}) == 1
    assert {"i5", "i6", "i10", "i11"} <= {*ids}
    # Neither the models' answers nor the order of the rows chooses them; the seed does.
    others = judged.set_column(5, "model_1", [[True] * 12]).take(list(range(11, -1, -1)))
    assert {*judging.independent(others, 1, quiet)["id"].to_pylist()} == {*ids}
    drawn = {tuple(judging.independent(judged, seed, quiet)["id"].to_pylist()) for seed in range(9)}
    assert len(drawn) > 3
    # Rows that stand alone are all compared, and nothing is said.
    alone = rows(np.ones((3, 2), bool))
    assert judging.independent(alone, 1, said.append).equals(alone) and len(said) == 1
    assert len(judging.independent(alone.slice(0, 0), 1, quiet)) == 0


def test_groups_are_those_of_the_job_or_else_the_champion_s(tmp_path: Path) -> None:
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}})
    columns = {"image_id": ["a", "b", "c"], "image": [b"x"] * 3, "label": ["a", "b", "a"]}
    columns |= {"split": ["train", "val", "test"], "part": ["p", "q", "r"]}
    append(job.table.uri, pa.table(columns), "add")
    pinned = pin(job.table, job.feed)

    def column(champion: dict[str, Any], **changes: str) -> str | None:
        package = cast(Package, SimpleNamespace(info={"config": champion}))
        return judging.group_column(replace(job, changes).registry, package, pinned)

    theirs = {"registry": {"group": "part"}}
    assert column({}) is None and column({"registry": {"group": None}}) is None
    assert column(theirs) == "part"
    assert column(theirs, **{"registry.group": "split"}) == "split"
    assert column({"registry": {"group": "gone"}}) is None


NAN = math.nan


@pytest.mark.parametrize(
    ("champion", "challenger", "says"),
    [
        ([1.0] * 60, [0.5] * 60, ""),
        (
            [NAN, 1.0] * 30,
            [0.5] * 60,
            "Refused: the champion m/1 gives no finite number for 30 of 60 test images, as 'i0'. "
            "The challenger gives one for each: raypipe promote CONFIG --version 2 puts it in use",
        ),
        (
            [1.0] * 60,
            [*[0.5] * 59, math.inf],
            "Refused: the challenger m/2 gives no finite number for 1 of 60 test images, as 'i59'",
        ),
        (
            [NAN, *[1.0] * 59],
            [1.0, NAN, *[1.0] * 58],
            "Refused: the champion m/1 gives no finite number for 1 of 60 test images, as 'i0' and "
            "the challenger m/2 gives no finite number for 1 of 60 test images, as 'i1'",
        ),
    ],
)
def test_a_number_that_is_not_finite_names_the_model_and_the_way_out(
    champion: list[float], challenger: list[float], says: str
) -> None:
    """It was "error nan to 0.5 on all is not a finite number"; if the champion's was not, no
    challenger could ever replace it, and nothing said how."""
    judged = rows(np.array([champion, challenger]).T)
    versions = [ModelVersion("m", n, f"models:/m/{n}", {}) for n in (1, 2)]
    text = judging.not_finite(judged, *versions)
    decision = gate(*judging.by_slice(judged, ["all"], 1.0), GATE, not_finite=text)
    assert decision.act == (not says)
    assert decision.reason == says or not says
    assert judging.not_finite(rows(np.ones((3, 2), bool)), *versions) == ""
