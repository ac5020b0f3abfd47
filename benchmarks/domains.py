"""Target: after a promotion, nights of one known domain are quiet, and nights of others are not.

python -m benchmarks.domains --json [--only story,solar,emoji,synthetic,groups,clusters]

Real cells and emoji pictures as EfficientNet-Lite0 sees them (domain_data.py: 5 minutes on one core
the first time). Everything is drawn anew for each seed; alpha is 0.01, 500 permutations.

story      solar cells are split once a seed: 20 % are kept for the nights, 30 % of the others are
           the champion's reference, the rest trains a linear probe. Nights of 200 are drawn with
           replacement, 20 of each kind, from cells that neither saw
solar      poly windows against a mono reference; mono windows against a mono reference, both anew
emoji      windows of one vendor against a reference of the other
synthetic  false alarms of the mixture test where the truth is known: 1 to 10 domains, a domain of
           five rows, windows of 50 to 500
groups     windows of whole modules against references of whole modules
clusters   no column names the domains
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch
from scipy import stats

from benchmarks import domain_data
from benchmarks.feed import commit, machine
from raypipe.watch import mmd as exact
from raypipe.watch import projection
from raypipe.watch.clusters import clusters
from raypipe.watch.domains import Fit, Rows, fit
from raypipe.watch.mixture import project

ALPHA = 0.01
NIGHT = 200
FAULTS = [(kind, severity) for kind in domain_data.SEVERITIES for severity in range(3)]


def probe(features_ND: np.ndarray, is_true_N: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A logistic regression: scores (M, 2) of features."""
    mean, spread = features_ND.mean(0), features_ND.std(0) + 1e-6
    x, y = (
        torch.tensor(a, dtype=torch.float32) for a in ((features_ND - mean) / spread, is_true_N)
    )
    weights = torch.zeros(x.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=60)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        logits = x @ weights[1:] + weights[0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
        loss = loss + 1e-2 * (weights[1:] ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    fitted = weights.detach().numpy()

    def scores(asked_MD: np.ndarray) -> np.ndarray:
        logits = ((asked_MD - mean) / spread) @ fitted[1:] + fitted[0]
        said = 1 / (1 + np.exp(-logits.clip(-50, 50)))
        return np.stack([said, 1 - said], axis=1)

    return scores


def constant(features_ND: np.ndarray) -> np.ndarray:
    """Scores that say nothing."""
    return np.full((len(features_ND), 2), 0.5)


def alarms(found: Fit) -> bool:
    """As a check judges it: two pieces of evidence."""
    return min(found.p_value, found.score_p_value) < ALPHA / 2


def others(reference_ND: np.ndarray, window_MD: np.ndarray, seed: int) -> dict[str, float]:
    """p-values of the tests that know no domains."""
    # As projection.project, by a faster way to the same components.
    points_LD = project(np.concatenate([reference_ND, window_MD])).astype(np.float32)
    reference, window = np.split(points_LD, [len(reference_ND)])
    width = projection.median_width(np.concatenate([reference, window]), seed)
    chosen = exact.regroupings(len(reference), len(window), 200, seed)
    pairs = zip(reference.T, window.T, strict=True)
    smallest = min(stats.ks_2samp(one, other, method="asymp").pvalue for one, other in pairs)
    return {
        "mmd": exact.mmd(reference, window, width, chosen).p_value,
        "ks": min(1.0, reference.shape[1] * float(smallest)),
    }


Scores = Callable[[np.ndarray], np.ndarray]


def champion(
    rng: np.random.Generator, wanted: Callable[[str], bool]
) -> tuple[Rows, Scores, dict[str, np.ndarray]]:
    """(reference, scores of features, pools that nights are drawn from) of the story's end."""
    features_ND, type_N, defective_N, _ = domain_data.cells()
    nights, reference, training = [], [], []
    for name in domain_data.TYPES:
        rows = rng.permutation(np.flatnonzero(type_N == name))
        night = len(rows) // 5
        ends = night, night + 3 * (len(rows) - night) // 10
        for part, kept in zip(np.split(rows, ends), (nights, reference, training), strict=True):
            kept.append(part)
    ref, train = np.concatenate(reference), np.concatenate(training)
    scores = probe(features_ND[train], defective_N[train])
    known = Rows(features_ND[ref], scores(features_ND[ref]), type_N[ref].tolist())

    unseen = np.concatenate(nights)
    pools = {"mono": features_ND[nights[0]], "poly": features_ND[nights[1]]}
    pools["mixed"] = features_ND[unseen]
    if wanted("emoji"):
        pools["emoji"] = np.concatenate([domain_data.emoji(v) for v in domain_data.VENDORS])
    for kind, severity in FAULTS:
        name = f"{kind} {severity}"
        if wanted(name):
            # Faulty pictures of cells that neither training nor reference saw.
            faulty_nD, place_n = domain_data.corrupted(kind, severity)
            pools[name] = faulty_nD[np.isin(place_n, unseen)]
    return known, scores, {name: pool for name, pool in pools.items() if wanted(name)}


def story(
    seeds: range, wanted: Callable[[str], bool] = lambda name: True, plain: bool = True
) -> dict[str, Any]:
    """wanted: which nights. plain: judge the nights of known domains by mmd and ks, too."""
    counts: dict[str, list[int]] = defaultdict(list)
    without: dict[str, list[int]] = defaultdict(list)
    distinct = {}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        known, scores, pools = champion(rng, wanted)
        for name, pool in pools.items():
            fired = defaultdict(int)
            for night in range(20):
                drawn = np.random.default_rng([seed, night])
                rows = drawn.choice(len(pool), NIGHT, replace=True)
                window = Rows(pool[rows], scores(pool[rows]))
                fired["mixture"] += alarms(fit(known, window, seed=100 * seed + night))
                if plain and name in ("mono", "poly", "mixed"):
                    for test, p_value in others(known.features_ND, pool[rows], night).items():
                        fired[test] += p_value < ALPHA
            counts[name].append(fired.pop("mixture"))
            for test, count in fired.items():
                without[f"{name}, {test}"].append(count)
            distinct[name] = len(pool)
            show("story, seed", seed, name, counts[name][-1], dict(fired), "of 20")
    return {
        "alarms_of_20": dict(counts),
        "distinct_images": distinct,
        "reference_rows": len(known.features_ND),
        "without_domains_of_20": dict(without),
    }


def solar(windows: range) -> dict[str, Any]:
    """One domain: the reference is mono, the probe knows mono cells."""
    features_ND, type_N, defective_N, _ = domain_data.cells()
    mono, poly = (np.flatnonzero(type_N == name) for name in domain_data.TYPES)
    found: dict[str, int] = {"mono": 0, "poly": 0}
    for seed in windows:
        rng = np.random.default_rng(seed)
        mixed = rng.permutation(mono)
        ref, night, train = np.split(mixed, (400, 400 + NIGHT))
        scores = probe(features_ND[train], defective_N[train])
        known = Rows(features_ND[ref], scores(features_ND[ref]))
        asked = {"mono": night}
        if seed < 50:
            asked["poly"] = rng.choice(poly, NIGHT, replace=False)
        for name, rows in asked.items():
            window = Rows(features_ND[rows], scores(features_ND[rows]))
            found[name] += alarms(fit(known, window, seed=seed))
    test = stats.binomtest(found["mono"], len(windows), ALPHA, alternative="greater")
    show("solar", found, test.pvalue)
    return {
        "poly_fired_of_50": found["poly"],
        "mono_alarms": found["mono"],
        "mono_windows": len(windows),
        "mono_binomial_p": float(test.pvalue),
    }


def emoji(windows: range) -> dict[str, Any]:
    """A reference of 500 of one vendor; the window has other pictures of the other vendor."""
    sides = [domain_data.emoji(vendor) for vendor in domain_data.VENDORS]
    fired = {"other": 0, "same": 0}
    for seed in windows:
        rng = np.random.default_rng(seed)
        one, other = sides[seed % 2], sides[1 - seed % 2]
        rows = rng.permutation(len(one))
        known = Rows(one[rows[:500]], constant(rows[:500]))
        chosen = rows[500 : 500 + NIGHT]
        for name, side in (("other", other), ("same", one)):
            found = fit(known, Rows(side[chosen], constant(chosen)), seed=seed)
            fired[name] += found.p_value < ALPHA
    show("emoji", fired, len(windows))
    return {"fired": fired["other"], "same_vendor_alarms": fired["same"], "windows": len(windows)}


def synthetic(windows: range) -> dict[str, Any]:
    """Skewed, correlated features as behind a ReLU; domains differ in one factor each."""
    mix = np.random.default_rng(0).normal(size=(12, 96))

    def rows(rng: np.random.Generator, count: int, domain: int, apart: float) -> np.ndarray:
        factors = rng.normal(size=(count, 12))
        factors[:, domain % 12] += apart
        drawn: np.ndarray = np.maximum(factors @ mix + rng.normal(size=(count, 96)), 0)
        return drawn

    cases: dict[str, tuple[list[int], int, list[float], float]] = {
        "1 domain, 130, window 50": ([130], 50, [1], 0),
        "1 domain, 130, window 500": ([130], 500, [1], 0),
        "2 equal, 250 each, window 200": ([250, 250], 200, [0.5, 0.5], 0),
        "2 near (0.5), 250 each, one alone": ([250, 250], 200, [1, 0], 0.5),
        "2 near (1), 250 each, one alone": ([250, 250], 200, [1, 0], 1),
        "2 near, 250 each, half and half": ([250, 250], 200, [0.5, 0.5], 1),
        "2 apart, 1900 and 100, the small one": ([1900, 100], 500, [0, 1], 3),
        "2 apart, 65 each, half and half, 500": ([65, 65], 500, [0.5, 0.5], 3),
        "5 near, 130 to 5, all alike": ([130, 60, 30, 20, 5], 200, [0.2] * 5, 1),
        "5 apart, 130 to 5, all alike": ([130, 60, 30, 20, 5], 200, [0.2] * 5, 4),
        "5 apart, 130 to 5, the one of 5": ([130, 60, 30, 20, 5], 100, [0, 0, 0, 0, 1], 4),
        "10 apart, 20 each, window 300": ([20] * 10, 300, [0.1] * 10, 2),
        "10 apart, 200 each, window 50": ([200] * 10, 50, [0.1] * 10, 2),
    }
    found = {}
    for name, (counts, size, weights, apart) in cases.items():
        p_values = []
        for seed in windows:
            rng = np.random.default_rng(seed)
            ref = np.concatenate([rows(rng, n, k, apart) for k, n in enumerate(counts)])
            names = np.repeat([f"d{k}" for k in range(len(counts))], counts).tolist()
            drawn = rng.multinomial(size, weights)
            window = np.concatenate([rows(rng, n, k, apart) for k, n in enumerate(drawn)])
            known = Rows(ref, ref[:, :2], names)
            p_values.append(fit(known, Rows(window, window[:, :2]), 99, seed=seed).p_value)
        said = np.array(p_values)
        found[name] = {
            "below_.01": float((said <= 0.01).mean()),
            "below_.05": float((said <= 0.05).mean()),
            "mean": float(said.mean()),
            "binomial_p_.05": float(
                stats.binomtest(int((said <= 0.05).sum()), len(windows), 0.05, "greater").pvalue
            ),
        }
        show("synthetic", name, found[name])
    return found


def groups(windows: range) -> dict[str, Any]:
    """Windows of five whole modules of one type; the other modules of both types are known."""
    features_ND, type_N, _, module_N = domain_data.cells()
    pictures = domain_data.emoji("google")
    whole = [m for m in np.unique(module_N) if (module_N == m).sum() >= 40]
    kinds = {m: type_N[module_N == m][0] for m in whole}
    fired: dict[str, list[bool]] = defaultdict(list)
    for seed in windows:
        rng = np.random.default_rng(seed)
        name = domain_data.TYPES[seed % 2]
        chosen = rng.permutation([m for m in whole if kinds[m] == name])[:5]
        ref = np.flatnonzero(np.isin(module_N, [m for m in whole if m not in chosen]))
        night = np.flatnonzero(np.isin(module_N, chosen))
        window = features_ND[night]
        known = [features_ND[ref], constant(ref), type_N[ref].tolist()]
        blocks = [[str(m) for m in module_N[rows]] for rows in (ref, night)]
        grouped = fit(
            Rows(*known, blocks[0]), Rows(window, constant(night), None, blocks[1]), seed=seed
        )
        alone = fit(Rows(*known), Rows(window, constant(night)), seed=seed)
        # A third domain, cut into as many modules.
        other = pictures[rng.permutation(len(pictures))[: len(night)]]
        moved = fit(
            Rows(*known, blocks[0]), Rows(other, constant(night), None, blocks[1]), seed=seed
        )
        fired["grouped"].append(grouped.p_value < 0.05)
        fired["rows alone"].append(alone.p_value < 0.05)
        fired["emoji, grouped"].append(moved.p_value < 0.05)
        least = grouped.least_p
    show("groups", {name: sum(said) for name, said in fired.items()}, least)
    return {
        "alarms_at_.05": {name: sum(said) for name, said in fired.items()},
        "windows": len(windows),
        "least_p": least,
        "modules": {
            name: sum(kind == name for kind in kinds.values()) for name in domain_data.TYPES
        },
    }


def found_clusters(windows: range) -> dict[str, Any]:
    """Nights against a reference of 260 + 370 cells whose types nobody wrote down."""
    features_ND, type_N, _, _ = domain_data.cells()
    fired: dict[str, dict[str, int]] = {
        "clusters": defaultdict(int),
        "one domain": defaultdict(int),
    }
    counts = []
    for seed in windows:
        rng = np.random.default_rng(seed)
        mono, poly = (rng.permutation(np.flatnonzero(type_N == n)) for n in domain_data.TYPES)
        ref = np.concatenate([mono[:260], poly[:370]])
        code_N = clusters(features_ND[ref], seed)
        counts.append(int(code_N.max()) + 1)
        nights = {
            "mono": mono[300:500],
            "poly": poly[400:600],
            "mixed": np.concatenate([mono[300:400], poly[400:500]]),
        }
        for how, names in (("clusters", [str(c) for c in code_N]), ("one domain", None)):
            known = Rows(features_ND[ref], constant(ref), names)
            for name, rows in nights.items():
                found = fit(known, Rows(features_ND[rows], constant(rows)), seed=seed)
                fired[how][name] += found.p_value < ALPHA
    show("clusters", {how: dict(said) for how, said in fired.items()}, counts)
    return {
        "alarms": {how: dict(said) for how, said in fired.items()},
        "windows": len(windows),
        "clusters": counts,
    }


def show(*what: object) -> None:
    print(*what, file=sys.stderr, flush=True)


SECTIONS: dict[str, tuple[Callable[[range], dict[str, Any]], int]] = {
    "story": (story, 2),
    "solar": (solar, 200),
    "emoji": (emoji, 200),
    "synthetic": (synthetic, 200),
    "groups": (groups, 100),
    "clusters": (found_clusters, 30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--repeats", type=int, help="seeds of each section; default: all of them")
    parser.add_argument("--first", type=int, default=0, help="the first seed, to go on with a part")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name in given.only.split(","):
        section, repeats = SECTIONS[name]
        started = time.process_time()
        found[name] = section(range(given.first, given.first + (given.repeats or repeats)))
        found[name]["cpu_s"] = round(time.process_time() - started, 1)
    found |= {
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.domains " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(found) if given.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
