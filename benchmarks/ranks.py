"""What races between methods say: mean ranks with intervals, and what one is better by. Pure.

A race is one task, seed and budget. Only a full race counts, in which every method has a line: a
method that has measured its easy races alone must not look good by them. `left_out` names the other
races.

A line is of one of three kinds:

- The model was there in time.
- It came after the budget (`model_s`): it ranks below all that came in time. Its score stands in
  the means, and `late` counts it.
- There was none (`no_model`): it ranks last, is in no mean, and is counted. `better_by` is over the
  races in which both have a model.

Intervals are 95 % bootstrap intervals. Races on the same images are not independent: the four tasks
of solar cells are one source, and two seeds split the same images. So whole sources are drawn with
replacement, RESAMPLES times, each with all its races. Three sources are few: such an interval is
wide, and still too narrow. `by_source` has the mean rank of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import numpy as np

Line = dict[str, Any]
Race = dict[str, Line]  # by method
SourceOf = Callable[[str], str]  # of a task
Known = Mapping[str, Set[str]]
RESAMPLES = 5_000
NEAR = 0.99


def summary(
    lines: Iterable[Line],
    methods: Sequence[str],
    source_of: SourceOf = str,
    known: Known = MappingProxyType({}),
) -> dict[str, Line]:
    """By budget: how the methods compare over the races in which all of them are.

    source_of: where a task's images come from. known: by source, images that test splits held which
    somebody had looked at before. Of such a source the others' share of right ones is told apart
    (`fresh`).

    Lines of a trial without a test, and of other methods, are left out.
    """
    by_budget: dict[float, dict[tuple[str, int], Race]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        if line["method"] in methods and (line.get("test") is not None or has_none(line)):
            race = (line["task"], line["seed"])
            by_budget[line["budget_s"]][race][line["method"]] = line
    return {
        f"{budget_s:g} s": compared(by_budget[budget_s], methods, source_of, known)
        for budget_s in sorted(by_budget)
    }


def compared(
    races: dict[tuple[str, int], Race],
    methods: Sequence[str],
    source_of: SourceOf = str,
    known: Known = MappingProxyType({}),
) -> Line:
    """The races of one budget."""
    full = {key: race for key, race in races.items() if all(one in race for one in methods)}
    found: Line = {
        "races": len(full),
        "left_out": {
            f"{task} {seed}": "no " + ", ".join(m for m in methods if m not in race)
            for (task, seed), race in sorted(races.items())
            if (task, seed) not in full
        },
    }
    if not full:
        return found
    sources = [source_of(task) for task, _ in full]
    counted = [line for race in full.values() for line in race.values()]
    found["sources"] = len(set(sources))
    found["commits"] = _different(counted, "commit")
    found["machines"] = _different(counted, "machine")
    found["not_valid"] = sum(not line.get("valid", True) for line in counted)
    ranked = [ranks([race[method] for method in methods]) for race in full.values()]
    some = list(full.values())
    for place, method in enumerate(methods):
        found[method] = {
            **_placed([own[place] for own in ranked], sources),
            **_of_method(some, method),
            **_fresh(some, sources, method, known),
            **(_gains(some, sources, methods[0], method) if place else {}),
        }
    return found


def _placed(ranks_R: Sequence[float], sources: Sequence[str]) -> Line:
    """The ranks of one method: all together, and by source."""
    by_source = {one: _of(one, ranks_R, sources) for one in sorted({*sources})}
    return {
        "mean_rank": round(fmean(ranks_R), 2),
        "mean_rank_95": interval(ranks_R, sources, 2),
        "by_source": {source: round(fmean(own), 2) for source, own in by_source.items()},
    }


def _fresh(races: Sequence[Race], sources: Sequence[str], method: str, known: Known) -> Line:
    """How many of the images are right that no known test split held before."""
    rights = []
    for race, source in zip(races, sources, strict=True):
        if source in known:
            cells = race[method].get("cells", ())
            rights += [right for image, right in cells if image not in known[source]]
    return {"fresh": {"images": len(rights), "right": round(fmean(rights), 4)}} if rights else {}


def _of_method(races: Sequence[Race], method: str) -> Line:
    """What its own lines say."""
    own = [race[method] for race in races]
    tests = [line["test"] for line in own if not has_none(line)]
    times, most_s = [seconds_to(race, method) for race in races], own[0]["budget_s"]
    return {
        "mean_test": round(fmean(tests), 4) if tests else None,
        # The budget stands for the races in which it was not reached.
        "median_s_to_99": round(median(at if at is not None else most_s for at in times), 1),
        "reached_99": sum(seconds is not None for seconds in times),
        "late": sum(map(is_late, own)),
        "no_model": sum(map(has_none, own)),
    }


def _gains(races: Sequence[Race], sources: Sequence[str], first: str, method: str) -> Line:
    """What the first method is better by, in parts of one, where both have a model."""
    gains, of = [], []
    for race, source in zip(races, sources, strict=True):
        if not has_none(race[first]) and not has_none(race[method]):
            gains.append(race[first]["test"] - race[method]["test"])
            of.append(source)
    if not gains:
        return {}
    name = f"{first}_better_by"
    return {name: round(fmean(gains), 4), f"{name}_95": interval(gains, of, 4)}


def ranks(race: Sequence[Line]) -> list[float]:
    """Of each line by its test score; 1 is the best, and equal ones share their mean rank."""
    scores = [_score(line) for line in race]
    found = []
    for score in scores:
        better = sum(other > score for other in scores)
        equal = sum(other == score for other in scores)
        found.append(better + (equal + 1) / 2)
    return found


def _score(line: Line) -> tuple[int, float]:
    if has_none(line):
        return 0, 0.0
    return (1 if is_late(line) else 2), line["test"]


def has_none(line: Line) -> bool:
    """Was there no model when the budget was over?"""
    return line.get("no_model") is not None


def is_late(line: Line) -> bool:
    """Did the model that was tested exist only after the budget?"""
    return bool(line.get("model_s", 0.0) > line["budget_s"])


def seconds_to(race: Race, method: str) -> float | None:
    """Seconds until a method had NEAR of the best validation score that any reached in this race;
    None: it never had.
    """
    best = max((line["val"] for line in race.values() if not has_none(line)), default=None)
    if best is None:
        return None
    reached = (
        seconds for seconds, so_far in race[method].get("curve", ()) if so_far >= NEAR * best
    )
    return next(reached, None)


def interval(values: Sequence[float], sources: Sequence[str], digits: int) -> list[float] | None:
    """Of the mean over races; None for one source, which says nothing of others."""
    by_source = [_of(one, values, sources) for one in sorted({*sources})]
    if len(by_source) < 2:
        return None
    sums_S = np.array([sum(some) for some in by_source], float)
    counts_S = np.array([len(some) for some in by_source])
    shape = (RESAMPLES, len(by_source))
    draws_RS = np.random.default_rng(0).integers(0, len(by_source), shape)
    means_R = sums_S[draws_RS].sum(1) / counts_S[draws_RS].sum(1)
    low, high = np.percentile(means_R, [2.5, 97.5])
    return [round(float(low), digits), round(float(high), digits)]


def _of(source: str, values: Sequence[float], sources: Sequence[str]) -> list[float]:
    return [value for value, one in zip(values, sources, strict=True) if one == source]


def _different(lines: Sequence[Line], name: str) -> list[str]:
    return sorted({line.get(name, "") for line in lines})
