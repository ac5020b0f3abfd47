"""What a check can see, where that is known: normal features, and groups that are all alike."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.errors import DataError
from raypipe.watch import power
from raypipe.watch.detect import DriftConfig
from raypipe.watch.power import Known
from raypipe.watch.sides import Seen

CFG = DriftConfig(alpha=0.05, permutations=100)


def known(rows: int, groups: int | None = None, spread: float = 0.0) -> Known:
    """Normal features; the images of a group share a place of their own."""
    rng = np.random.default_rng(5)
    features_ND = rng.normal(size=(rows, 6))
    names = None
    if groups is not None:
        of_N = np.arange(rows) * groups // rows
        features_ND += spread * rng.normal(size=(groups, 6))[of_N]
        names = [f"module {group}" for group in of_N]
    scores_NC = rng.dirichlet([3, 3], rows)
    labels = ["ab"[int(score > 0.5)] for score in scores_NC[:, 1]]
    return Known(features_ND, scores_NC, Seen(labels_N=labels, groups=names))


def test_independent_images_alarm_as_often_as_alpha_says() -> None:
    done: list[tuple[int, int]] = []
    found = power.measure(known(240), CFG, 100, 1, lambda *at: done.append(at), draws=60, tries=5)
    assert found.holds and found.alarms <= 9 and found.low < 0.05 < found.high
    assert found.move is not None and 0.3 <= found.move <= 1.5
    assert found.share is not None and 0.02 < found.share <= 0.5
    assert (found.window, found.reference) == (100, 140)
    assert done[-1][0] >= 60 and all(at <= total for at, total in done)
    larger = power.measure(known(1200), CFG, 500, 1, draws=5, tries=5)
    assert larger.move is not None and larger.move < found.move, "more images see more"


def test_groups_are_drawn_whole_and_their_want_is_noticed() -> None:
    grouped = known(240, groups=12, spread=3.0)
    whole = power.measure(grouped, CFG, 100, 1, draws=20, tries=2)
    assert whole.grouped
    # The window's groups are others than the reference's. Rows alone say that this is drift.
    blind = Known(grouped.features_ND, grouped.scores_NC)
    in_window_N = power._drawn(grouped, 100, np.random.default_rng(0))
    assert in_window_N.sum() == 100
    assert all(len(set(part)) == 1 for part in in_window_N.reshape(12, 20).tolist())
    report = power.detect(
        blind.features_ND[~in_window_N],
        blind.features_ND[in_window_N],
        blind.scores_NC[~in_window_N],
        blind.scores_NC[in_window_N],
        CFG,
        1,
    )
    assert report.is_drift


def test_the_words_say_whether_alpha_holds() -> None:
    found = power.Power(0.01, 100, 140, 100, 30, 0.21, 0.40, None, 0.1, False)
    said = power.as_facts(found)
    assert "MORE than alpha says: name groups in watch.group" in said["false alarms"]
    assert said["found: all images moved by"] == "none that was tried"
    assert said["found: images 5 standard deviations away"] == "10% of the images"


def test_a_reference_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(DataError, match="too small to be cut in two"):
        power.measure(known(39), CFG, 100, 1)
