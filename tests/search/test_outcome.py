"""What a search bought: numbered points in two charts, and tables that say what they are."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

from raypipe import report
from raypipe.models.zoo import ModelConfig
from raypipe.search import outcome
from raypipe.search.limits import Variant
from raypipe.search.outcome import Point
from raypipe.search.trials.standing import Reached

SMALL = ModelConfig(name="small_cnn", pretrained=False, mode="finetune", side_px=32)
LARGE = SMALL.model_copy(update={"side_px": 128})


def variant(ms: float, mb: float = 10.0, text: str = "net") -> Variant:
    return Variant(text, ms, 0.9 * ms, 1.1 * ms, mb)


def result(*reached: Reached, seconds: float = 200.0) -> Any:
    """What `outcome` reads of a search's result: two trials with a model, one that failed."""
    trials = [
        SimpleNamespace(name="trial-1", metric=0.8, checkpoint="x"),
        SimpleNamespace(name="trial-0", metric=0.7, checkpoint="x"),
        SimpleNamespace(name="trial-2", metric=float("nan"), checkpoint=None),
    ]
    return SimpleNamespace(
        metric="val_accuracy",
        mode="max",
        trials=trials,
        models={"trial-0": SMALL, "trial-1": LARGE, "trial-2": LARGE},
        reached=reached,
        trials_s=max(seconds, *(one.seconds for one in reached)) if reached else seconds,
        best=SimpleNamespace(metrics={"val_accuracy": 0.85}),
        members=(),
        shares=(),
        refitted=False,
    )


def test_only_points_that_no_other_beats_are_on_the_front() -> None:
    points = [
        Point(name, value, variant(ms))
        for name, value, ms in [
            ("slow and best", 0.9, 50),
            ("slow and worse", 0.6, 50),
            ("fast", 0.8, 2),
            ("as good and slower", 0.8, 4),
            ("between", 0.85, 9),
            ("never a number", float("nan"), 1),
        ]
    ]
    front = [points[place].name for place in outcome.pareto(points, "max")]
    assert front == ["fast", "between", "slow and best"]
    front = [points[place].name for place in outcome.pareto(points, "min")]
    assert front == ["fast", "slow and worse"]
    assert outcome.pareto([], "max") == []


def test_the_page_says_what_each_minute_bought() -> None:
    found = result(Reached(20, 0.5, "trial-0", 1), Reached(150, 0.8, "trial-1", 4))
    timed = {SMALL.shape: variant(2, 0.4, "small_cnn at 32 px"), LARGE.shape: variant(9, 0.4)}
    minutes, front = outcome.blocks(found, timed, variant(11, 0.8, "2 trials together"))
    assert minutes.text.endswith("after 2 min 30 s; the trials took 3 min 20 s.")
    assert minutes.tables[0].rows == (
        ("1", "20 s", "50.00 %", "", "trial-0, epoch 1"),
        ("2", "2 min 30 s", "80.00 %", "+30.00", "trial-1, epoch 4"),
    )
    assert minutes.plots[0].x_label == "minutes"
    chart = minutes.plots[0].chart
    # 20 s and 150 s of 200 s, from the left.
    assert [(left, label) for left, _, label in chart.marks] == [(10, "1"), (75, "2")]
    assert [row[:4] for row in front.tables[0].rows] == [
        ("1", "trial-0", "70.00 %", "2 ms"),
        ("2", "trial-1", "80.00 %", "9 ms"),
        ("3", "the ensemble", "85.00 %", "11 ms"),
    ]
    header = report.Header("Search", "", "key", datetime.now(timezone.utc))
    html = report.render(report.Page(header, blocks=(minutes, front)))
    assert len(re.findall(r'class="mark"', html)) == 5 and "2 trials together" in html


def test_a_registered_mean_of_weights_is_on_the_front() -> None:
    """The table had the best trial there, which is no better and as slow."""
    timed = {SMALL.shape: variant(2), LARGE.shape: variant(9)}
    for value, text in ((0.85, "85.00 %"), (0.8, "80.00 %")):
        found = result()
        found.members, found.best.metrics["val_accuracy"] = ("trial-1", "trial-0"), value
        (front,) = outcome.blocks(found, timed)
        assert [row[:4] for row in front.tables[0].rows] == [
            ("1", "trial-0", "70.00 %", "2 ms"),
            ("2", "the mean of weights", text, "9 ms"),
        ]
    # A refit has no metric of validation, and an ensemble another time.
    for alone in ({"refitted": True}, {"shares": (0.5, 0.5)}):
        found = result()
        found.__dict__.update(alone, members=("trial-1", "trial-0"))
        (front,) = outcome.blocks(found, timed)
        assert [row[1] for row in front.tables[0].rows] == ["trial-0", "trial-1"]


def test_a_search_without_records_has_no_sections() -> None:
    """Of an older version; and of trials whose time is not known."""
    assert outcome.blocks(result(), {}) == ()
    (only,) = outcome.blocks(result(Reached(0.0, 0.5, "the first minute")), {})
    assert "; the first answer and the trials took 3 min 20 s." in only.text
    assert only.tables[0].rows[0][-1] == "the first minute"


def test_charts_of_one_point_and_of_far_ones_are_drawn() -> None:
    assert report.so_far([], 10) is None and report.so_far([(1, float("nan"))], 10) is None
    assert report.front([(1, float("nan"))], [0]) is None
    alone = report.so_far([(0.0, 0.5)], 0.0)
    assert alone is not None and alone.marks == ((0.0, alone.marks[0][1], "1"),)
    whole = report.so_far([(0.0, 1.0)], 10, True)
    assert whole is not None
    assert [label for _, label in whole.y_ticks] == ["95 %", "100 %"], "and not 110 %"
    # A trial at 0 would press a line between 0.80 and 0.82 flat.
    drawn = report.front([(1, 0.80), (2, 0.82), (1.5, 0.0)], [0, 1])
    assert drawn is not None and drawn.note == "Far from the line, and not drawn: 1."
    assert drawn.lines[0][2].count("M") == 2
    # Marks that would meet: the later one stays.
    near = report.so_far([(1, 0.5), (1.1, 0.501), (9, 0.9)], 10)
    assert near is not None and [label for *_, label in near.marks] == ["2", "3"]
