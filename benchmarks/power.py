"""How often each drift detector alone sees a change, at alpha 0.01.

python -m benchmarks.power --json [--windows 60] [--trained 20] [--only noise,poly]

Windows of 50, 100, 200 and 500 pictures, drawn anew for each one; no picture lies on both sides.

mono -> poly          natural: another kind of solar cell. Reference 260 mono cells
google -> twitter     natural: another vendor's drawings. Reference 500, other motifs in the window
both KIND SEVERITY    half mono, half poly on both sides (reference 520), the window's cells spoilt:
                      noise, blur, dark, contrast, JPEG, each mild (0), middle (1), strong (2)
both                  the same without a fault: false alarms

The champion is a logistic regression on embeddings that neither side holds (domain_data.py). A
detector is asked alone, so that alpha is all its own; its pieces share it (Holm). mmd + ks is the
default without domains, mixture the one with them. 500 permutations, as in a check; 200 for Alibi
Detect's.

lsdd, classifier, spot_the_diff and learned_kernel are Alibi Detect's, in its sidecar's interpreter:
seconds a window, so they get fewer windows. A share of n windows is known to about 1 / sqrt(n).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

ALPHA = 0.01
PERMUTATIONS = 200
SIZES = (50, 100, 200, 500)
HERE = ("mixture", "mmd", "ks", "cvm", "chi2", "looks")
TRAINED = ("lsdd", "classifier", "spot_the_diff", "learned_kernel")
# Cells of each type that train the champion's head, and that its reference holds.
HEAD, REFERENCE = 300, 260


@dataclass(frozen=True)
class Pictures:
    """What is known of N pictures."""

    features_ND: np.ndarray
    looks_NK: np.ndarray
    scores_NC: np.ndarray
    classes: tuple[str, ...]
    domains: list[str] | None = None

    def rows(self, chosen_M: np.ndarray) -> Pictures:
        domains = None if self.domains is None else [self.domains[row] for row in chosen_M]
        parts = (self.features_ND, self.looks_NK, self.scores_NC)
        return Pictures(*(part[chosen_M] for part in parts), self.classes, domains)


Sides = tuple[Pictures, Pictures]
Draw = Callable[[np.random.Generator, int], Sides]


def head(features_ND: np.ndarray, labels_N: np.ndarray) -> Any:
    """A logistic regression, whose penalty its own rows choose."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=1e-3)).fit(features_ND, labels_N)


def shifts() -> dict[str, Draw]:
    """Each name draws a reference and a window."""
    return {**_cells(), "google -> twitter": _emoji()}


def _cells() -> dict[str, Draw]:
    from benchmarks import domain_data as data

    features_ND, type_N, defective_N, _ = data.cells()
    looks_NK = data.cells(data.looks)[0]
    places_n = data.corrupted("noise", 0)[1]
    free = np.setdiff1d(np.arange(len(type_N)), places_n)
    order = np.random.default_rng(0).permutation(free)
    by_type = [order[type_N[order] == name] for name in data.TYPES]
    trained = np.concatenate([rows[:HEAD] for rows in by_type])
    model = head(features_ND[trained], np.where(defective_N, "defective", "whole")[trained])
    mono, poly = (rows[HEAD:] for rows in by_type)

    def pictures(x_ND: np.ndarray, seen_NK: np.ndarray, types: np.ndarray | None) -> Pictures:
        known = None if types is None else types.tolist()
        return Pictures(x_ND, seen_NK, model.predict_proba(x_ND), tuple(model.classes_), known)

    whole = pictures(features_ND, looks_NK, type_N)

    def to_poly(rng: np.random.Generator, size: int) -> Sides:
        reference = pictures(features_ND[mono], looks_NK[mono], None)
        chosen = rng.permutation(len(mono))[:REFERENCE]
        return reference.rows(chosen), whole.rows(rng.permutation(poly)[:size])

    def half(spoilt: Pictures | None) -> Draw:
        places = [np.flatnonzero(type_N[places_n] == name) for name in data.TYPES]

        def draw(rng: np.random.Generator, size: int) -> Sides:
            drawn = [rng.permutation(rows) for rows in (mono, poly)]
            reference = whole.rows(np.concatenate([rows[:REFERENCE] for rows in drawn]))
            left = [rows[REFERENCE:] for rows in drawn] if spoilt is None else places
            window = [rng.permutation(rows)[: size // 2] for rows in left]
            return reference, (spoilt or whole).rows(np.concatenate(window))

        return draw

    found = {"mono -> poly": to_poly, "both": half(None)}
    for kind in data.SEVERITIES:
        for severity in range(3):
            spoilt = pictures(
                data.corrupted(kind, severity)[0],
                data.corrupted(kind, severity, data.looks)[0],
                type_N[places_n],
            )
            found[f"both {kind} {severity}"] = half(spoilt)
    return found


def _emoji() -> Draw:
    from benchmarks import domain_data as data

    google, twitter = (
        (data.emoji(vendor), data.emoji(vendor, data.looks)) for vendor in data.VENDORS
    )
    category_N = data.emoji_categories()
    order = np.random.default_rng(0).permutation(len(category_N))
    trained, rest = order[:400], order[400:]
    model = head(google[0][trained], category_N[trained])

    def draw(rng: np.random.Generator, size: int) -> Sides:
        rows = rng.permutation(rest)
        sides = []
        for (x_ND, seen_NK), chosen in ((google, rows[:500]), (twitter, rows[500 : 500 + size])):
            scores_NC = model.predict_proba(x_ND[chosen])
            sides.append(Pictures(x_ND[chosen], seen_NK[chosen], scores_NC, tuple(model.classes_)))
        return sides[0], sides[1]

    return draw


def here(sides: Sides, seed: int) -> dict[str, bool]:
    """Which detectors of raypipe's own alarm, each asked alone; and mmd + ks together."""
    from raypipe.watch.detect import DriftConfig, detect
    from raypipe.watch.sides import Seen
    from raypipe.watch.superiority import holm

    # Its own number of permutations: settings would ask for more of so many tests at once.
    cfg = DriftConfig(detectors=HERE, permutations=1_000, unusual=0)
    cfg = cfg.model_copy(update={"permutations": DriftConfig().permutations})
    seen = [
        Seen(
            labels_N=[side.classes[place] for place in side.scores_NC.argmax(1)],
            looks_NK=side.looks_NK,
        )
        for side in sides
    ]
    known = Seen(labels_N=seen[0].labels_N, looks_NK=seen[0].looks_NK, domains=sides[0].domains)
    one, other = sides
    report = detect(
        one.features_ND,
        other.features_ND,
        one.scores_NC,
        other.scores_NC,
        cfg,
        seed,
        known,
        seen[1],
    )
    p_values: dict[str, list[float]] = defaultdict(list)
    for piece in report.evidence:
        p_values[piece.detector].append(piece.p_value)
    p_values["mmd + ks"] = p_values["mmd"] + p_values["ks"]
    return {name: bool(holm(found, ALPHA)) for name, found in p_values.items()}


def embeddings(sides: Sides, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What Alibi Detect gets: both sides projected, as in a check."""
    from raypipe.watch import projection

    rng = np.random.default_rng(seed)
    cut = [projection.subsample(side.features_ND, 500, rng) for side in sides]
    return projection.project(*cut)


def trained(draws: list[Sides]) -> dict[str, list[float]]:
    """The p-values of Alibi Detect's own detectors, in the interpreter of its sidecar."""
    from raypipe.cluster import sidecar

    with tempfile.TemporaryDirectory() as temporary:
        for seed, sides in enumerate(draws):
            reference, window = embeddings(sides, seed)
            np.savez(Path(temporary) / f"{seed}.npz", reference=reference, window=window)
        command = [str(sidecar.ensure("alibi")), "-m", "benchmarks.power", "--inside", temporary]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def inside(folder: Path) -> dict[str, list[float]]:
    """Alibi Detect's side. It knows numpy, and nothing of raypipe but its sidecar's modules."""
    import torch

    from raypipe.watch.alibi_sidecar import check

    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in TRAINED}
    options = {"permutations": PERMUTATIONS, "alpha": ALPHA, "width": 1.0}
    for seed in range(len(list(folder.iterdir()))):
        given = np.load(folder / f"{seed}.npz")
        arrays = {"ref.embedding": given["reference"], "batch.embedding": given["window"]}
        tests = [[name, "embedding"] for name in TRAINED]
        _, facts = check(arrays, {**options, "tests": tests, "seed": seed})
        for name, one in zip(TRAINED, facts["evidence"], strict=True):
            found[name].append(one["p_value"])
    return found


def table(windows: int, few: int, wanted: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """One row a shift and size: the share of windows in which each detector alarms."""
    for name, draw in shifts().items():
        for size in SIZES if wanted(name) else ():
            fired: dict[str, int] = defaultdict(int)
            for seed in range(windows):
                for detector, alarms in here(draw(np.random.default_rng(seed), size), seed).items():
                    fired[detector] += alarms
            share = {detector: fired[detector] / windows for detector in (*HERE, "mmd + ks")}
            if few:
                drawn = [draw(np.random.default_rng(seed), size) for seed in range(few)]
                for detector, p_values in trained(drawn).items():
                    share[detector] = float((np.array(p_values) <= ALPHA).mean())
            yield {"shift": name, "size": size, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--windows", type=int, default=60, help="for raypipe's detectors")
    parser.add_argument("--trained", type=int, default=20, help="for Alibi Detect's; 0: leave out")
    parser.add_argument("--only", default="", help="names of shifts, or parts of them")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(inside(given.inside)))
        return
    from benchmarks.feed import commit, machine

    parts = given.only.split(",")
    rows = []
    for row in table(given.windows, given.trained, lambda name: any(p in name for p in parts)):
        shares = "  ".join(f"{name} {share:.2f}" for name, share in row["share"].items())
        print(f"{row['shift']}, {row['size']}: {shares}", file=sys.stderr, flush=True)
        rows.append(row)
    found: dict[str, Any] = {"windows": given.windows, "trained_windows": given.trained}
    found |= {"when": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    found |= {"machine": machine(), "commit": commit(), "power": rows}
    print(json.dumps(found, indent=None if given.json else 2))


if __name__ == "__main__":
    main()
