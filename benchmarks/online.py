"""The online part of benchmarks/drift.py: run length without drift, and images until an alarm.

python -m benchmarks.drift --json --only online,online_alibi

ELPV cells, 1,280 features of EfficientNet-Lite0, standardised by 274 mono cells that nothing else
uses. A replay draws a reference of 200 of the other 800 mono cells anew; nights of 100 come from
the rest of them, each without repeats. Ours (raypipe.watch.online) begins anew each night; at the
level alpha it is designed for 100 / alpha images between false alarms. Alibi Detect's
MMDDriftOnline gets the same references, the window of 50, `ert` = 1,000 and ten times as many
bootstraps, as its docs ask; its stream does not end with a night.

online_false_alarm: images per alarm, all images of all replays, and what was designed.
online_delay: images of the new kind until the first window that alarms; the change comes at a
random place of a night. `checked`: until the end of that night, when a nightly check says so.
`whole`: the same for MMD of whole nights (detector mmd) at the same level.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

REFERENCE, NIGHT, WINDOW, ALPHA, PERMUTATIONS = 200, 100, 50, 0.1, 199
REPLAYS, NIGHTS, DELAYS = 60, 20, 15
MOST_NIGHTS = 10
ALIBI_REPLAYS, ALIBI_IMAGES, ALIBI_DELAYS = 3, 4_000, 5

Table = dict[str, np.ndarray]


def pictures() -> Table:
    """Standardised features of mono cells, and of what comes after a change."""
    from benchmarks.shifted import world

    made = world("solar").features
    own = np.concatenate([made["train"], made["validation"], made["test"]])
    order = np.random.default_rng(0).permutation(len(own))
    apart, rest = own[order[:274]], own[order[274:]]
    mean, spread = apart.mean(0), np.maximum(apart.std(0), 1e-3)
    parts = {
        "mono": rest,
        "poly": made["other"],
        "darker": made["brightness:1"],
        "blurred": made["blur:1"],
    }
    return {name: ((x - mean) / spread).astype(np.float32) for name, x in parts.items()}


def ours(known: Table) -> dict[str, Any]:
    began = time.perf_counter()
    p_values = []
    for replay in range(REPLAYS):
        rng = np.random.default_rng(replay)
        reference, pool = _split(known["mono"], rng)
        for night in range(NIGHTS):
            drawn = pool[rng.choice(len(pool), NIGHT, replace=False)]
            p_values.append(_scan(_sides(reference, drawn), night).p_value)
    images = NIGHT * len(p_values)
    alarms = {a: int((np.array(p_values) <= a).sum()) for a in (ALPHA, 0.05, 0.01)}
    return {
        "images": images,
        "images_per_alarm": {a: images / max(1, found) for a, found in alarms.items()},
        "designed": {a: NIGHT / a for a in alarms},
        "alarms": alarms,
        "s_per_night": (time.perf_counter() - began) / len(p_values),
    }


def our_delay(known: Table, kind: str, share: float = 1.0) -> dict[str, Any]:
    """Images of the new kind until the alarm; nights before the change are of the pool."""
    delays: dict[str, list[int]] = {"online": [], "checked": [], "whole": []}
    early = 0
    for replay in range(DELAYS):
        rng = np.random.default_rng(1000 + replay)
        reference, pool = _split(known["mono"], rng)
        place = int(rng.integers(NIGHT))
        came, first = -place, {}
        for night in range(MOST_NIGHTS):
            old = pool[rng.choice(len(pool), NIGHT, replace=False)]
            new = known[kind][rng.choice(len(known[kind]), NIGHT, replace=False)]
            is_new = rng.random(NIGHT) < share
            is_new[: place if night == 0 else 0] = False
            drawn = np.where(is_new[:, None], new, old)
            sides = _sides(reference, drawn)
            alarm = _scan(sides, night).alarm_after(ALPHA)
            if alarm is not None and came + alarm <= 0:
                # Before the change: a false alarm, which ends nothing.
                early += 1
                alarm = None
            if alarm is not None and "online" not in first:
                first |= {"online": came + alarm, "checked": came + NIGHT}
            if "whole" not in first and _whole(sides, night) <= ALPHA:
                first["whole"] = came + NIGHT
            came += NIGHT
            if len(first) == len(delays):
                break
        for name, found in delays.items():
            found.append(first.get(name, MOST_NIGHTS * NIGHT))
    return _summary(delays) | {"false_alarms_before": early}


def _split(own: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    order = rng.permutation(len(own))
    return own[order[:REFERENCE]], own[order[REFERENCE:]]


Sides = tuple[np.ndarray, np.ndarray, float]


def _sides(reference: np.ndarray, night: np.ndarray) -> Sides:
    """Both sides as a check compares them, and the kernel's width."""
    from raypipe.watch import projection

    sides = projection.project(reference.astype(np.float64), night.astype(np.float64))
    return *sides, projection.median_width(np.concatenate(sides), 0)


def _scan(sides: Sides, seed: int) -> Any:
    from raypipe.watch.online import scan

    return scan(*sides, WINDOW, PERMUTATIONS, seed)


def _whole(sides: Sides, seed: int) -> float:
    from raypipe.watch.mmd import mmd, regroupings

    chosen = regroupings(len(sides[0]), len(sides[1]), PERMUTATIONS, seed)
    return mmd(*sides, chosen).p_value


def _summary(delays: dict[str, list[int]]) -> dict[str, Any]:
    return {
        f"{name}_{what}": float(value)
        for name, found in delays.items()
        for what, value in (("median", np.median(found)), ("p90", np.quantile(found, 0.9)))
    }


def alibis(known: Table) -> dict[str, Any]:
    from raypipe.cluster import sidecar

    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "known.npz", allow_pickle=False, **known)  # type: ignore[arg-type]
        python = str(sidecar.ensure("alibi"))
        command = [python, "-m", "benchmarks.online", folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _alibi_side(folder: Path) -> dict[str, Any]:
    """Under numpy 1, in the sidecar: nothing of raypipe but its neighbour."""
    import torch

    from raypipe.watch.alibi_sidecar import alibi

    with np.load(folder / "known.npz") as stored:
        known = {name: stored[name] for name in stored.files if name != "allow_pickle"}
    run_time = NIGHT / ALPHA
    images = alarms = 0
    each: list[float] = []
    configure_s = 0.0
    delays: dict[str, list[int]] = {kind: [] for kind in ("poly", "darker", "blurred")}
    for replay in range(ALIBI_REPLAYS):
        rng = np.random.default_rng(replay)
        reference, pool = _split(known["mono"], rng)
        torch.manual_seed(replay)
        began = time.perf_counter()
        detector = alibi().MMDDriftOnline(
            reference,
            ert=run_time,
            window_size=WINDOW,
            backend="pytorch",
            n_bootstraps=int(10 * run_time),
            device="cpu",
            verbose=False,
        )
        configure_s += time.perf_counter() - began
        mine = 0
        for _ in range(ALIBI_IMAGES // NIGHT):
            for row in rng.choice(len(pool), NIGHT, replace=False):
                images += 1
                if detector.predict(pool[row])["data"]["is_drift"]:
                    mine += 1
                    detector.reset_state()
        alarms += mine
        each.append(ALIBI_IMAGES / max(1, mine))
        for kind, found in delays.items():
            for _ in range(ALIBI_DELAYS):
                detector.reset_state()
                for row in rng.choice(len(pool), WINDOW, replace=False):
                    detector.predict(pool[row])
                after = 0
                while after < MOST_NIGHTS * NIGHT:
                    after += 1
                    row = int(rng.integers(len(known[kind])))
                    if detector.predict(known[kind][row])["data"]["is_drift"]:
                        break
                found.append(after)
    return {
        "images": images,
        "images_per_alarm": images / max(1, alarms),
        "images_per_alarm_by_reference": sorted(each),
        "designed": run_time,
        "configure_s": configure_s / ALIBI_REPLAYS,
        "delay": _summary(delays),
    }


def measure() -> dict[str, Any]:
    known = pictures()
    false_alarm = {"ours": ours(known)}
    print(false_alarm, file=sys.stderr, flush=True)
    delay: dict[str, Any] = {
        kind: our_delay(known, kind) for kind in ("poly", "darker", "blurred")
    } | {"poly_fifth": our_delay(known, "poly", 0.2)}
    return {"online_false_alarm": false_alarm, "online_delay": delay}


def measure_alibi() -> dict[str, Any]:
    """Alibi Detect's own; minutes, most of them for its thresholds."""
    theirs = alibis(pictures())
    return {"online_delay_alibi": theirs.pop("delay"), "online_false_alarm_alibi": theirs}


if __name__ == "__main__":
    print(json.dumps(_alibi_side(Path(sys.argv[1]))))
