"""Is the accuracy that is estimated without labels the true one, and when is there no answer?

    python -m benchmarks.severity --json [--worlds solar,emoji,solar_poly,solar_both] [--brief]

Champions, pictures and corruptions: benchmarks/shifted.py. Each is calibrated on its validation
images and nine kinds of shifted copies (raypipe.images.shifts); the five corruptions, and the
natural shift, are none of these. Windows of 200 test images, drawn without replacement, 50 a cell.

known: windows of the known domains, as they are, with other shares of the classes, and for
solar_both mixed. corrupted: five kinds, three severities. natural: the other domain.

Beside it, on the same windows: difference of confidences alone (validation accuracy plus the change
of confidence) and the validation accuracy itself, both with the binomial interval and without
abstaining; and our own calibration without the kinds that are most like a corruption (gamma,
pixelate, dead), without any shifted copy, and as a model is published by default: copies of 100
images, each way at one strength.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import numpy as np

from benchmarks.feed import commit, machine
from benchmarks.shifted import SEVERITIES, World, world
from raypipe.images.shifts import KINDS
from raypipe.models.severity import Calibration, calibrate, estimate
from raypipe.registry.tracking import RegistryConfig
from raypipe.train.shifted import STRENGTHS

WINDOW, WINDOWS = 200, 50
LIKE_A_CORRUPTION = ("gamma", "pixelate", "dead")
CHAMPIONS = ("solar", "emoji", "solar_poly", "solar_both")
Window = tuple[np.ndarray, np.ndarray, np.ndarray]


def calibrated(
    made: World, seed: int, without: tuple[str, ...] = (), copied: int = 0
) -> Calibration:
    """On validation rows and their shifted copies, except these kinds ("*": all).

    copied: only of so many images, each kind at one strength, as raypipe.train.shifted has it. 0:
    of all images, at all strengths.
    """
    arrays: list[tuple[Any, ...]] = []
    domains = sum(part.endswith("validation") for part in made.labels)
    for name, labels in made.labels.items():
        domain, _, part = name.rpartition("/")
        kind = part.split(":")[1] if part.startswith("shift:") else ""
        if (part != "validation" and not kind) or (kind and {kind, "*"} & set(without)):
            continue
        first = 0 if domain != "poly" else 10_000
        chosen = np.arange(len(labels))
        if kind and copied:
            chosen = np.random.default_rng(5).permutation(chosen)[: copied // domains]
            turn = STRENGTHS.index(float(part.split(":")[2]))
            way = list(KINDS).index(kind)
            chosen = chosen[(np.arange(len(chosen)) + way) % len(STRENGTHS) == turn]
        rows = len(chosen)
        arrays.append(
            (
                made.scores[name][chosen],
                labels[chosen],
                made.features[name][chosen],
                np.full(rows, domain or "own"),
                np.full(rows, kind),
                first + chosen,
            )
        )
    scores, labels, features, domains, shifts, images = (
        np.concatenate(parts) for parts in zip(*arrays, strict=True)
    )
    return calibrate(scores, labels, features, domains, seed, shifts, images)


def cells(made: World) -> Iterator[tuple[str, str, list[Window]]]:
    """(group, name, windows of scores, features and labels)."""
    rng = np.random.default_rng(11)

    def drawn(name: str, weight: np.ndarray | None = None, count: int = WINDOW) -> Window:
        rows = rng.choice(len(made.labels[name]), count, replace=False, p=weight)
        return made.scores[name][rows], made.features[name][rows], made.labels[name][rows]

    tests = [name for name in made.labels if name.endswith("test")]
    for name in tests:
        yield "known", name, [drawn(name) for _ in range(WINDOWS)]
        windows = []
        for _ in range(WINDOWS):
            labels = made.labels[name]
            weight = rng.uniform(0.3, 3, labels.max() + 1)[labels]
            windows.append(drawn(name, weight / weight.sum(), WINDOW // 2))
        yield "known_classes", f"{name}, other classes, {WINDOW // 2} images", windows
    if len(tests) > 1:
        mixed = []
        for _ in range(WINDOWS):
            count = int(rng.integers(20, WINDOW - 20))
            parts = (drawn(tests[0], None, count), drawn(tests[1], None, WINDOW - count))
            one, other = parts
            mixed.append(tuple(np.concatenate(pair) for pair in zip(one, other, strict=True)))
        yield "known", "mixed", mixed  # type: ignore[misc]
    for name in made.labels:
        part = name.rpartition("/")[2]
        if part.split(":")[0] in SEVERITIES:
            group = "mild_and_middle" if part[-1] in "12" else "strong"
            yield group, name, [drawn(name) for _ in range(WINDOWS)]
        if part == "other":
            yield "natural", name, [drawn(name) for _ in range(WINDOWS)]


def answered(calibration: Calibration, windows: list[Window]) -> dict[str, Any]:
    covered, widths, errors, why = [], [], [], ""
    for scores, features, labels in windows:
        truth = float((scores.argmax(1) == labels).mean())
        found = estimate(calibration, scores, features)
        if found.abstains:
            why = found.abstains
            continue
        covered.append(found.low <= truth <= found.high)
        widths.append(found.high - found.low)
        errors.append(found.accuracy - truth)
    truths = [float((scores.argmax(1) == labels).mean()) for scores, _, labels in windows]
    return {
        "true": float(np.mean(truths)),
        "windows": len(windows),
        "answers": len(covered),
        "covered": int(sum(covered)),
        "widths": widths,
        "errors": errors,
        "abstains": why,
    }


def plain(windows: list[Window], accuracy: float, confidence: float | None) -> tuple[int, int]:
    """(windows, covered) of an estimate with the binomial interval that always answers."""
    covered = 0
    for scores, _, labels in windows:
        truth = float((scores.argmax(1) == labels).mean())
        change = scores.max(1).mean() - confidence if confidence is not None else 0.0
        guess = float(np.clip(accuracy + change, 0.02, 0.98))
        covered += abs(guess - truth) <= 1.96 * np.sqrt(guess * (1 - guess) / len(labels))
    return len(windows), covered


def summary(found: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Over cells: coverage and width where it answers, and how often it answers by group."""
    answers = sum(cell["answers"] for _, cell in found)
    result: dict[str, Any] = {
        "windows": sum(cell["windows"] for _, cell in found),
        "answers": answers,
        "covered_of_answered": round(sum(c["covered"] for _, c in found) / max(1, answers), 4),
    }
    at_200 = [w for group, cell in found if group != "known_classes" for w in cell["widths"]]
    result["median_width_points"] = round(100 * float(np.median(at_200)), 1)
    errors = np.concatenate([cell["errors"] for _, cell in found if cell["errors"]])
    result["mean_absolute_error_points"] = round(100 * float(np.abs(errors).mean()), 1)
    for group in ("known", "known_classes", "mild_and_middle", "strong", "natural"):
        mine = [cell for name, cell in found if name == group]
        if mine:
            given = sum(cell["answers"] for cell in mine)
            result[group] = {
                "answered": round(given / sum(cell["windows"] for cell in mine), 3),
                "covered": round(sum(cell["covered"] for cell in mine) / max(1, given), 3),
            }
    return result


def measure(name: str, brief: bool) -> dict[str, Any]:
    made = world(name)
    start = time.perf_counter()
    calibration = calibrated(made, 0)
    seconds = time.perf_counter() - start
    ways = {"": calibration}
    if not brief:
        ways |= {
            "without_like_a_corruption": calibrated(made, 0, LIKE_A_CORRUPTION),
            "without_copies": calibrated(made, 0, ("*",)),
            "as_published": calibrated(made, 0, copied=RegistryConfig().severity_images),
            "seed_1": calibrated(made, 1),
            "seed_2": calibrated(made, 2),
        }
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {way: [] for way in ways}
    table: dict[str, Any] = {}
    validation = [part for part in made.labels if part.endswith("validation")]
    confidence = float(np.concatenate([made.scores[p].max(1) for p in validation]).mean())
    baselines = {"confidence_alone": [0, 0], "validation_accuracy": [0, 0]}
    spent = 0.0
    for group, cell_name, windows in cells(made):
        for way, one in ways.items():
            start = time.perf_counter()
            found[way].append((group, answered(one, windows)))
            spent += time.perf_counter() - start
        for rule, reference in (("confidence_alone", confidence), ("validation_accuracy", None)):
            for place, number in enumerate(plain(windows, calibration.accuracy, reference)):
                baselines[rule][place] += number
        cell = found[""][-1][1]
        table[cell_name] = {
            "true": round(cell["true"], 3),
            "answers": cell["answers"],
            "covered": cell["covered"],
            "bias_points": round(100 * float(np.mean(cell["errors"])), 1)
            if cell["errors"]
            else None,
            "width_points": round(100 * float(np.median(cell["widths"])), 1)
            if cell["widths"]
            else None,
            "abstains": cell["abstains"],
        }
    count = sum(cell["windows"] for cells_ in found.values() for _, cell in cells_)
    result = summary(found[""])
    result["cells"] = table
    result["beside"] = {way: summary(cells_) for way, cells_ in found.items() if way}
    result["beside"] |= {
        rule: {"windows": total, "covered": round(covered / total, 3)}
        for rule, (total, covered) in baselines.items()
    }
    result["validation_accuracy"] = round(calibration.accuracy, 3)
    result["calibrate_s"] = round(seconds, 2)
    result["estimate_ms"] = round(1000 * spent / count, 2)
    result["calibration_json_kb"] = round(len(json.dumps(calibration.to_json())) / 1000)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worlds", default=",".join(CHAMPIONS))
    parser.add_argument("--brief", action="store_true", help="without the other calibrations")
    given = parser.parse_args()
    worlds = {}
    for name in given.worlds.split(","):
        worlds[name] = measure(name, given.brief)
        brief = {k: v for k, v in worlds[name].items() if k not in ("cells", "beside")}
        print(name, brief, file=sys.stderr, flush=True)
    answers = sum(one["answers"] for one in worlds.values())
    covered = sum(one["answers"] * one["covered_of_answered"] for one in worlds.values())
    found: dict[str, Any] = {
        "covered_of_answered": round(covered / answers, 4),
        "worlds": worlds,
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.severity " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(found) if given.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
