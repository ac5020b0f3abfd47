"""A year of nights: false alarms, delay and cost of three rules, and how small p-values are shown.

    python -m benchmarks.horizon --json [--only streams,drift,tails,evalue,cost]

Rules: horizon (raypipe.watch.horizon at its defaults: 3 % in 365 checks, single nights), spans (the
same budget over tonight, 7 and 28 nights), nightly (p < .01 each
night, Alibi Detect's usual way; the p-value is the same), weekly (retrain every seventh night,
look at nothing). One retrain is counted as 37 CPU minutes (2026-11-21-solar.md).

streams: nights without drift. ELPV mono cells: a reference of 200 and windows of 50, drawn from
1,074 embeddings, anew for each stream.
- `independent`: a new window each night.
- `pool`: 80 % of the images stay from night to night.
- `pool_spans`: the same, with the last 7 and 28 nights tested too.
- `weather`: all images of a night are moved along two real directions (darker, less contrast), each
  by an AR(1) of 0.8; judged by `night_p` against 60 earlier nights.
- `weather_by_rows`: the same judged by permutation of rows, which does not cover it.
- `season`: a yearly wave is added after the reference's 60 nights; not covered either.
drift: from night 100 on.
tails: 30 + 20 rows of 4 dimensions; 200,000 permutations are the truth.
evalue: one dimension, Gaussian: spending against an e-process with the reference's error in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import numpy as np
from scipy.stats import norm

from benchmarks.feed import commit, machine
from benchmarks.nights import Regrouped, last_nights, night_p
from benchmarks.shifted import world
from raypipe.watch.policy import WatchHorizon
from raypipe.watch.projection import median_width

CFG = WatchHorizon()
LEVEL = CFG.false_alarm / CFG.checks
NIGHTLY = 0.01
SPANS = (1, 7, 28)  # watch.horizon.spans beside the night itself
REFERENCE, WINDOW, NIGHTS, ONSET = 200, 50, 365, 100
STAY = 0.8
WEATHER, WEATHER_SD, REFERENCE_NIGHTS = 0.8, 0.7, 60
RETRAIN_MIN = 37
# 1,000 without drift whose model is covered, and a few that are not.
STREAMS = {
    "independent": 250,
    "pool": 200,
    "pool_spans": 50,
    "weather": 500,
    "weather_by_rows": 20,
    "season": 200,
}
COVERED = ("independent", "pool", "pool_spans", "weather")
MOST_ROWS = 100  # of a span of nights

Table = dict[str, np.ndarray]


class Pictures:
    """Rows of a table of real embeddings, and the kernel of all pairs."""

    def __init__(self) -> None:
        made = world("solar").features
        own = np.concatenate([made["train"], made["validation"], made["test"]])
        parts: Table = {
            "mono": own,
            "poly": made["other"],
            "brightness_middle": made["brightness:2"],
            "blur_mild": made["blur:1"],
        }
        self.rows: Table = {}
        start = 0
        for name, features in parts.items():
            self.rows[name] = np.arange(start, start + len(features))
            start += len(features)
        self.features = np.concatenate(list(parts.values()))
        # Directions of the training rows; nights of weather are drawn from the others.
        train, self.not_train = own[: len(made["train"])], own[len(made["train"]) :]
        self.directions = np.linalg.svd(train - train.mean(0), full_matrices=False)[2][:8].T
        width = median_width(own, 0)
        every = Regrouped.of(self.features[:-2], self.features[-2:], width, 0)
        self.kernel = every._kernel_LL
        self.light = np.stack(
            [
                made[f"{kind}:1"].mean(0) - made["test"].mean(0)
                for kind in ("brightness", "contrast")
            ]
        )

    def p_value(
        self, reference: np.ndarray, window: np.ndarray, seed: int, level: float = LEVEL
    ) -> float:
        picked = np.concatenate([reference, window])
        kernel_LL = self.kernel[picked[:, None], picked]
        return Regrouped(kernel_LL, len(reference), seed).p_value(level).p_value


def windows(pool: np.ndarray, stay: float, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """A share of the images stays from night to night; no image twice in a night."""
    kept = round(stay * WINDOW)
    window = rng.choice(pool, WINDOW, replace=False)
    while True:
        yield window
        old = rng.choice(window, kept, replace=False)
        fresh = rng.choice(np.setdiff1d(pool, old), WINDOW - kept, replace=False)
        window = np.concatenate([old, fresh])


def rows_stream(pictures: Pictures, kind: str, seed: int) -> np.ndarray:
    """p-values of a stream; of `pool_spans` the smallest of three, times three."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(pictures.rows["mono"])
    reference, pool = order[:REFERENCE], order[REFERENCE:]
    drawn = windows(pool, 0.0 if kind == "independent" else STAY, rng)
    seen: list[np.ndarray] = []
    p_values = []
    for t in range(NIGHTS):
        seen.append(next(drawn))
        spans = SPANS if kind == "pool_spans" else (1,)
        p_values.append(_spans_p(pictures, reference, seen, spans, seed * 1000 + t))
    return np.array(p_values)


def _spans_p(
    pictures: Pictures,
    reference: np.ndarray,
    seen: list[np.ndarray],
    spans: tuple[int, ...],
    seed: int,
) -> float:
    smallest = 1.0
    for span in spans[: len(seen)]:
        rows = np.array(last_nights(seen, span, MOST_ROWS, seed))
        p = pictures.p_value(reference, rows, seed, LEVEL / len(spans))
        smallest = min(smallest, p * len(spans))
        if smallest <= LEVEL:
            break
    return smallest


def weather(nights: int, rng: np.random.Generator) -> np.ndarray:
    """Two independent stationary AR(1) series, (nights, 2)."""
    steps = rng.normal(size=(nights, 2)) * WEATHER_SD
    steps[1:] *= np.sqrt(1 - WEATHER**2)
    for t in range(1, nights):
        steps[t] += WEATHER * steps[t - 1]
    return steps


def weather_stream(pictures: Pictures, kind: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rest, directions = pictures.not_train, pictures.directions
    total = REFERENCE_NIGHTS + NIGHTS
    light = weather(total, rng)
    if kind == "season":
        days = np.arange(NIGHTS)[:, None]
        light[REFERENCE_NIGHTS:] += 2 * WEATHER_SD * np.sin(2 * np.pi * days / 365)
    picked = np.stack([rng.choice(len(rest), WINDOW, replace=False) for _ in range(total)])
    if kind != "weather_by_rows":
        means = (rest @ directions)[picked].mean(1) + light @ (pictures.light @ directions)
        return night_p(means[:REFERENCE_NIGHTS], means[REFERENCE_NIGHTS:])
    moved = rest[picked] + (light @ pictures.light)[:, None].astype(np.float32)
    # A reference of 200 rows of the 60 nights.
    reference = moved[:REFERENCE_NIGHTS].reshape(-1, moved.shape[-1])
    reference = reference[rng.choice(len(reference), REFERENCE, replace=False)]
    width = median_width(reference, 0)
    p_values = np.ones(NIGHTS)
    for t in range(NIGHTS):
        regrouped = Regrouped.of(reference, moved[REFERENCE_NIGHTS + t], width, t)
        p_values[t] = regrouped.p_value(LEVEL).p_value
        if p_values[t] <= LEVEL:
            break
    return p_values


def streams(pictures: Pictures, share: float, kinds: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    covered = []
    for kind in kinds:
        count = max(2, round(STREAMS[kind] * share))
        made: Callable[[int], np.ndarray]
        if kind in ("independent", "pool", "pool_spans"):
            made = lambda seed, kind=kind: rows_stream(pictures, kind, seed)  # noqa: E731
        else:
            made = lambda seed, kind=kind: weather_stream(pictures, kind, seed)  # noqa: E731
        p_SN = np.stack([made(seed) for seed in range(count)])
        ever = (p_SN <= LEVEL).any(1)
        found[kind] = {
            "streams": count,
            "alarm_ever": float(ever.mean()),
            "nightly_alarm_ever": float((p_SN < NIGHTLY).any(1).mean()),
            "nightly_alarms_a_year": float((p_SN < NIGHTLY).sum(1).mean()),
            "lag_1_correlation_of_z": _lag(p_SN),
        }
        if kind in COVERED:
            covered.append(ever)
        print(kind, found[kind], file=sys.stderr, flush=True)
    if covered:
        every = np.concatenate(covered)
        found["covered"] = {"streams": len(every), "alarm_ever": float(every.mean())}
    return found


def _lag(p_SN: np.ndarray) -> float:
    """How alike neighbouring nights of a stream are, beyond what the whole stream shares."""
    z_SN = norm.isf(p_SN.clip(1e-9, 1 - 1e-3))
    z_SN = z_SN - z_SN.mean(1, keepdims=True)
    return float((z_SN[:, 1:] * z_SN[:, :-1]).sum() / (z_SN**2).sum())


def drift(pictures: Pictures, share: float) -> dict[str, Any]:
    """Nights from the onset to the first alarm; 265 where none came."""
    kinds = {
        "poly": ("poly", 1.0),
        "poly_half": ("poly", 0.5),
        "poly_fifth": ("poly", 0.2),
        "brightness_middle": ("brightness_middle", 1.0),
        "blur_mild": ("blur_mild", 1.0),
    }
    found: dict[str, Any] = {}
    for kind, (part, mixed) in kinds.items():
        delays: dict[str, list[int]] = {"spans": [], "horizon": [], "nightly": []}
        for seed in range(max(2, round(12 * share))):
            rng = np.random.default_rng(seed)
            order = rng.permutation(pictures.rows["mono"])
            reference, pool = order[:REFERENCE], order[REFERENCE:]
            moved = round(mixed * WINDOW)
            first: dict[str, int] = {}
            # Nights before the onset, that are in the spans too.
            seen = [rng.choice(pool, WINDOW, replace=False) for _ in range(28)]
            for t in range(NIGHTS - ONSET):
                window = np.concatenate(
                    [
                        rng.choice(pictures.rows[part], moved, replace=False),
                        rng.choice(pool, WINDOW - moved, replace=False),
                    ]
                )
                seen.append(window)
                p = pictures.p_value(reference, window, seed * 1000 + t)
                if p < NIGHTLY:
                    first.setdefault("nightly", t)
                if p <= LEVEL:
                    first.setdefault("horizon", t)
                if "spans" not in first:
                    together = _spans_p(pictures, reference, seen, SPANS, seed * 1000 + t)
                    if together <= LEVEL:
                        first["spans"] = t
                if len(first) == len(delays):
                    break
            for rule in delays:
                delays[rule].append(first.get(rule, NIGHTS - ONSET))
        found[kind] = {
            f"{rule}_{name}": float(value)
            for rule, nights in delays.items()
            for name, value in (
                ("median", np.median(nights)),
                ("p90", np.quantile(nights, 0.9)),
                ("same_night", np.mean(np.array(nights) == 0)),
            )
        }
        print(kind, found[kind], file=sys.stderr, flush=True)
    return found


def tail_p(observed: float, permuted_P: np.ndarray, most: int = 250) -> float:
    """Knijnenburg et al. 2009: a generalised Pareto on the largest permuted statistics, by
    probability-weighted moments (Hosking and Wallis 1987). It is not in the product: see tails."""
    extreme = int((permuted_P >= observed).sum())
    if extreme >= 10:
        return (extreme + 1) / (len(permuted_P) + 1)
    ordered = np.sort(permuted_P)
    threshold = (ordered[-most] + ordered[-most - 1]) / 2
    above = ordered[-most:] - threshold
    places = (np.arange(1, most + 1) - 0.35) / most
    first, second = above.mean(), ((1 - places) * above).mean()
    shape = first / (first - 2 * second) - 2
    scale = 2 * first * second / (first - 2 * second)
    inside = max(0.0, 1 - shape * (observed - threshold) / scale)
    return float(most / len(permuted_P) * inside ** (1 / shape))


def tails(share: float) -> dict[str, Any]:
    truths, ways = [], {"gpd_2000": [], "gpd_5000": [], "sequential": []}  # type: ignore[var-annotated]
    permutations = []
    rng = np.random.default_rng(0)
    while len(truths) < max(5, round(100 * share)):
        reference = rng.normal(size=(30, 4)).astype(np.float32)
        batch = rng.normal(size=(20, 4)).astype(np.float32) + np.float32(rng.uniform(0.4, 0.9))
        long = Regrouped.of(reference, batch, 2.0, 0)
        at_least = long.statistic - 1e-6
        extreme = sum(int((long.draw(10_000) >= at_least).sum()) for _ in range(20))
        truth = (extreme + 1) / 200_001
        # Around the level, where it matters.
        if not LEVEL / 12 < truth < LEVEL * 12:
            continue
        truths.append(truth)
        fresh = Regrouped.of(reference, batch, 2.0, len(truths))
        for few in (2000, 5000):
            ways[f"gpd_{few}"].append(tail_p(at_least, fresh.draw(few)))
        one = fresh.p_value(LEVEL)
        ways["sequential"].append(one.p_value)
        permutations.append(one.permutations)
    truth_C = np.array(truths)
    found: dict[str, Any] = {"cases": len(truths)}
    clear = (truth_C < LEVEL / 2) | (truth_C > LEVEL * 2)
    for way, values in ways.items():
        p_C = np.array(values)
        ratio = np.quantile(np.maximum(p_C, 1e-12) / truth_C, [0.05, 0.5, 0.95])
        found[way] = {
            "ratio_to_truth_5_50_95": [float(f"{r:.3g}") for r in ratio],
            "false_alarms": int(((p_C <= LEVEL) & (truth_C > LEVEL)).sum()),
            "of_truly_above": int((truth_C > LEVEL).sum()),
            "missed": int(((p_C > LEVEL) & (truth_C <= LEVEL)).sum()),
            "of_truly_below": int((truth_C <= LEVEL).sum()),
            "wrong_beyond_a_factor_of_2": int(
                (((p_C <= LEVEL) != (truth_C <= LEVEL)) & clear).sum()
            ),
            "p_of_0": int((p_C == 0).sum()),
        }
    found["sequential"]["permutations_mean"] = float(np.mean(permutations))
    found["under_the_null"] = _null_levels(share)
    return found


def _null_levels(share: float) -> dict[str, Any]:
    """P(p <= a) of windows without drift, from the tail of 500 permutations and sequentially."""
    rng = np.random.default_rng(1)
    p_values: dict[str, list[float]] = {"gpd_500": [], "sequential": []}
    for seed in range(max(200, round(20_000 * share))):
        rows = rng.normal(size=(50, 4)).astype(np.float32)
        regrouped = Regrouped.of(rows[:30], rows[30:], 2.0, seed)
        p_values["gpd_500"].append(tail_p(regrouped.statistic, regrouped.draw(500), 100))
        p_values["sequential"].append(regrouped.p_value(1e-3).p_value)
    return {
        way: {str(a): float(np.mean(np.array(p) <= a)) for a in (0.01, 0.003, 0.001)}
        for way, p in p_values.items()
    } | {"windows": len(p_values["sequential"])}


def evalue(share: float) -> dict[str, Any]:
    """Alarm ever without drift, and median delay, of spending and of two e-processes."""
    found: dict[str, Any] = {}
    count = max(50, round(1000 * share))
    for name, stay in (("independent", 0.0), ("autocorrelated", STAY)):
        for size in (0.0, 0.15, 0.25, 0.4, 0.6):
            rng = np.random.default_rng(7)
            nights = rng.normal(size=(count, NIGHTS))
            nights[:, 1:] *= np.sqrt(1 - stay**2)
            for t in range(1, NIGHTS):
                nights[:, t] += stay * nights[:, t - 1]
            nights /= np.sqrt(WINDOW)
            nights[:, ONSET:] += size
            away = nights - rng.normal(size=(count, 1)) / np.sqrt(REFERENCE)
            limit = norm.isf(LEVEL / 2) * np.sqrt(1 / WINDOW + 1 / REFERENCE)
            alarms = {
                "spending": np.abs(away) >= limit,
                "spending_over_1_7_28_nights": _spans(away, nights),
                "e_process": _e_process(away, REFERENCE) >= 1 / CFG.false_alarm,
                "e_process_reference_taken_as_exact": _e_process(away, 10**9)
                >= 1 / CFG.false_alarm,
            }
            for rule, alarm in alarms.items():
                if size == 0:
                    value: Any = float(alarm.any(1).mean())
                else:
                    late = alarm[:, ONSET:]
                    first = np.where(late.any(1), late.argmax(1), NIGHTS - ONSET)
                    value = float(np.median(first))
                key = "alarm_ever" if size == 0 else f"delay_at_{size}_sd"
                found.setdefault(name, {}).setdefault(rule, {})[key] = value
    return found


def _spans(away_SN: np.ndarray, nights_SN: np.ndarray) -> np.ndarray:
    """A third of the level each for tonight, the last 7 and the last 28 nights together.

    The variance of a mean of many nights is that of independent nights.
    """
    alarm_SN = np.zeros(away_SN.shape, bool)
    offset_S1 = away_SN[:, :1] - nights_SN[:, :1]
    sums = np.concatenate([np.zeros((len(nights_SN), 1)), np.cumsum(nights_SN, 1)], 1)
    for span in (1, 7, 28):
        ends = np.arange(1, nights_SN.shape[1] + 1)
        starts = np.maximum(0, ends - span)
        rows_N = (ends - starts) * WINDOW
        means_SN = (sums[:, ends] - sums[:, starts]) / (ends - starts) + offset_S1
        limit_N = norm.isf(LEVEL / 6) * np.sqrt(1 / rows_N + 1 / REFERENCE)
        alarm_SN |= np.abs(means_SN) >= limit_N
    return alarm_SN


def _e_process(away_SN: np.ndarray, reference: int, prior_sd: float = 0.3) -> np.ndarray:
    """A mixture over when the drift began (each night equally likely) and how large it is.

    Differences to the reference's mean are jointly Gaussian: they share its error.
    """
    streams, nights = away_SN.shape
    sums = np.concatenate([np.zeros((streams, 1)), np.cumsum(away_SN, 1)], 1)
    values = np.zeros((streams, nights))
    for t in range(1, nights + 1):
        began = np.arange(t)
        lasted = t - began
        shared = WINDOW**2 / (reference + t * WINDOW)
        information = WINDOW * lasted - shared * lasted**2
        total = sums[:, [t]]
        score = WINDOW * (total - sums[:, :t]) - shared * lasted * total
        log_ratio = 0.5 * score**2 / (information + prior_sd**-2)
        log_ratio -= 0.5 * np.log1p(prior_sd**2 * information)
        # Nights of onset still to come have a ratio of 1.
        values[:, t - 1] = (np.exp(np.minimum(log_ratio, 500)).sum(1) + nights - t) / nights
    return values


def cost() -> dict[str, Any]:
    """Seconds of one check of 500 + 500 rows x 1280: usual nights, and one that alarms."""
    rng = np.random.default_rng(0)
    seconds, permutations = [], []
    for night in range(10):
        rows = rng.normal(size=(1000, 1280)).astype(np.float32)
        start = time.perf_counter()
        found = Regrouped.of(rows[:500], rows[500:], 36.0, night).p_value(LEVEL)
        seconds.append(time.perf_counter() - start)
        permutations.append(found.permutations)
    start = time.perf_counter()
    found = Regrouped.of(rows[:500], rows[500:] + 1, 36.0, 0).p_value(LEVEL)
    alarm_s = time.perf_counter() - start
    usual_s = float(np.median(seconds))
    without_drift = {
        "horizon": (CFG.false_alarm, usual_s),
        "nightly": (NIGHTLY * NIGHTS, usual_s),
        "weekly": (NIGHTS / 7, 0.0),
    }
    return {
        "usual_night_s": usual_s,
        "usual_night_permutations": float(np.median(permutations)),
        "alarm_night_s": alarm_s,
        "alarm_night_permutations": found.permutations,
        "cpu_min_a_year_without_drift": {
            rule: round(retrains * RETRAIN_MIN + check_s * NIGHTS / 60, 1)
            for rule, (retrains, check_s) in without_drift.items()
        },
        "false_retrains_a_year_at_most": {
            rule: round(retrains, 2) for rule, (retrains, _) in without_drift.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="streams,drift,tails,evalue,cost")
    parser.add_argument("--kinds", default=",".join(STREAMS), help="of streams")
    parser.add_argument("--share", type=float, default=1.0, help="of the repetitions")
    given = parser.parse_args()
    asked = given.only.split(",")
    found: dict[str, Any] = {}
    pictures = Pictures() if {"streams", "drift"} & set(asked) else None
    for part in asked:
        start = time.perf_counter()
        if part == "streams" and pictures:
            found[part] = streams(pictures, given.share, given.kinds.split(","))
        elif part == "drift" and pictures:
            found[part] = drift(pictures, given.share)
        elif part in ("tails", "evalue"):
            found[part] = {"tails": tails, "evalue": evalue}[part](given.share)
        else:
            found[part] = cost()
        found[part]["seconds"] = round(time.perf_counter() - start, 1)
    found |= {
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.horizon " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(found) if given.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
