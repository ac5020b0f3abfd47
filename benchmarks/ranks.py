"""What races between methods say: mean ranks with intervals, and what one is better by. Pure.

A race is one task, seed and budget. Only a full race counts, in which every method has a line: a
method that has measured its easy races alone must not look good by them. `left_out` names the other
races: read it too, because a method may have no answer in a race that is hard for it.

A model that came after the budget (`model_s`) ranks below all that came in time. Its score stands
in the means, and `late` counts it.

Intervals are 95 % bootstrap intervals: RESAMPLES times as many races are drawn with replacement.
They treat races as independent. Two seeds of one task are not quite that, so intervals are somewhat
too narrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

Line = dict[str, Any]
Race = tuple[str, int]  # task, seed
RESAMPLES = 5_000
NEAR = 0.99


def summary(lines: Iterable[Line], methods: Sequence[str]) -> dict[str, Line]:
    """By budget: how the methods compare over the races in which all of them are.

    Lines without a test score, and of other methods, are left out.
    """
    by_budget: dict[float, dict[Race, dict[str, Line]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        if line["method"] in methods and line.get("test") is not None:
            race = (line["task"], line["seed"])
            by_budget[line["budget_s"]][race][line["method"]] = line
    return {
        f"{budget_s:g} s": compared(by_budget[budget_s], methods) for budget_s in sorted(by_budget)
    }


def compared(races: dict[Race, dict[str, Line]], methods: Sequence[str]) -> Line:
    """The races of one budget."""
    full = [race for race in races.values() if all(method in race for method in methods)]
    found: Line = {
        "races": len(full),
        "left_out": {
            f"{task} {seed}": "no " + ", ".join(m for m in methods if m not in race)
            for (task, seed), race in sorted(races.items())
            if race not in full
        },
    }
    if not full:
        return found
    counted = [line for race in full for line in race.values()]
    found["commits"] = sorted({line.get("commit", "") for line in counted})
    found["not_valid"] = sum(not line.get("valid", True) for line in counted)
    ranks_RM = np.array([ranks([race[method] for method in methods]) for race in full])
    tests_RM = np.array([[race[method]["test"] for method in methods] for race in full])
    for place, method in enumerate(methods):
        own = [race[method] for race in full]
        times = [seconds_to(race, method) for race in full]
        found[method] = {
            "mean_rank": round(float(ranks_RM[:, place].mean()), 2),
            "mean_rank_95": interval(ranks_RM[:, place], 2),
            "mean_test": round(float(tests_RM[:, place].mean()), 4),
            "median_s_to_99": round(median(times), 1),
            "late": sum(map(is_late, own)),
        }
        if place:
            gains_R = tests_RM[:, 0] - tests_RM[:, place]
            # Of the first method over this one, in parts of one.
            found[method][f"{methods[0]}_better_by"] = round(float(gains_R.mean()), 4)
            found[method][f"{methods[0]}_better_by_95"] = interval(gains_R, 4)
    return found


def ranks(race: Sequence[Line]) -> list[float]:
    """Of each line by its test score; 1 is the best, and equal ones share their mean rank."""
    scores = [(not is_late(line), line["test"]) for line in race]
    found = []
    for score in scores:
        better = sum(other > score for other in scores)
        equal = sum(other == score for other in scores)
        found.append(better + (equal + 1) / 2)
    return found


def is_late(line: Line) -> bool:
    """Did the model that was tested exist only after the budget?"""
    return bool(line.get("model_s", 0.0) > line["budget_s"])


def seconds_to(race: dict[str, Line], method: str) -> float:
    """Seconds until a method had NEAR of the best validation score that any reached in this race;
    the budget, where it never had.
    """
    wanted = NEAR * max(line["val"] for line in race.values())
    line = race[method]
    reached = (seconds for seconds, best in line["curve"] if best >= wanted)
    return float(next(reached, line["budget_s"]))


def interval(values_R: np.ndarray, digits: int) -> list[float] | None:
    """Of the mean over races; None for one race, which says nothing of others."""
    if len(values_R) < 2:
        return None
    draws = np.random.default_rng(0).integers(0, len(values_R), (RESAMPLES, len(values_R)))
    low, high = np.percentile(values_R[draws].mean(1), [2.5, 97.5])
    return [round(float(low), digits), round(float(high), digits)]
