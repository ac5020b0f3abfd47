"""Does a window fit any mixture of the domains that the champion knows?

After a promotion the reference holds several domains: mono and poly cells, or three cameras. A
night of one of them alone differs from the reference as a whole, and that is no drift. So the
statistic is the distance of the window to the *nearest mixture*: the least squared MMD (Gretton et
al. 2012) over all weights of the domains, with one Gaussian kernel on principal components.

Its p-value comes from permutations inside the domains. Each row of the window is given to one
domain, drawn by how likely it came from each (memberships.py). Then, inside each domain, reference
rows and these rows change places at random, and the weights are fitted anew. If the window is a
mixture and the likelihoods are right, the data as observed are one of these regroupings, whatever
the weights are. So nothing is held out, windows may be larger than the reference, a domain may have
five rows, and fitted weights cost nothing. With one domain it is the usual permutation test of MMD.

Of near domains nobody can say which ones a window holds. If it holds one of two alone, the weights
lie at the edge of what is allowed, and fit less freely than between the two. So the test is made
twice, with all domains and with the fewest that explain the window, and the larger p-value counts.
(Of 300 windows of one of two near domains, 9 % had p < 0.05 without this, and 4 % with it.) Not
mended: near domains of which one has five rows. There 10 % of windows without drift have p < 0.05.

Components and the kernel's width come from all rows together, as in alibi_sidecar.py. What was
tried instead, and what was worse: benchmarks/results/2026-11-25-domains.md.

Rows of one group (the cells of one module) change places together. Copies of a row count once, as
a copy is no new evidence. But a camera that hangs sends one picture all night: whether one row
comes more often than chance repeats any is a test of its own.

Legend: N rows of the reference, M of the window, L = N + M, D features, C classes, K domains,
P permutations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from raypipe.errors import DataError
from raypipe.watch import groups, memberships
from raypipe.watch.mixture import Placed, gaussian, project, squared_distances, statistics
from raypipe.watch.settings import LEAST_ROWS

# With more domains the nearest ones are joined: sources may be as many as nights.
MOST_DOMAINS = 10
# Rows of the reference that are compared, for each row of the window's limit.
REFERENCE_ROWS = 3
MOST_REPEATED = 100  # rows of which it is asked how often the reference has them
NAMED = 3  # of joined domains; the others are counted
CLEAR = 0.3
TIE = 1e-7  # differences below are rounding, in float32


@dataclass(frozen=True)
class Rows:
    """The rows of one side, as arrays and lists of one length.

    domains: a name each, of reference rows; None: all are one domain. groups: rows of one name
    belong together, those of a blank name do not; None: each row stands alone.
    """

    features_ND: np.ndarray
    scores_NC: np.ndarray
    domains: Sequence[str] | None = None
    groups: Sequence[str] | None = None


@dataclass(frozen=True)
class Part:
    """What of a window resembles one domain.

    weight: of the domain in the nearest mixture. share: of the window's rows that resemble this
    domain most. unlike: of these, the share that lies farther from the domain than 99 % of its own
    rows.
    """

    domain: str
    weight: float
    share: float
    unlike: float


@dataclass(frozen=True)
class Fit:
    """How well the nearest mixture fits a window.

    statistic, p_value: squared MMD of features to the nearest mixture; of scores to the mixture
    with the same weights. It is the biased estimate, never below 0. least_p: no p-value of this
    window can be smaller. rows: (reference, window) that were compared, without copies.
    most_copies: of the row that the window holds most often. copies_p_value: how likely one row
    comes so often, if the window's different rows are drawn with replacement. They count as
    LEAST_ROWS at least: of one picture alone, it would be certain that only that picture comes.
    least_p: the smallest p-value that can come out; least_of_groups: with all regroupings, however
    many are drawn.
    """

    statistic: float
    p_value: float
    score_statistic: float
    score_p_value: float
    parts: tuple[Part, ...]
    least_p: float
    rows: tuple[int, int]
    most_copies: int
    copies_p_value: float
    least_of_groups: float = 0.0


def fit(
    reference: Rows, window: Rows, permutations: int = 500, most: int = 500, seed: int = 0
) -> Fit:
    """Compare a window with all mixtures of the reference's domains.

    most: rows of the window that are compared; of the reference REFERENCE_ROWS times as many, drawn
    evenly over its domains. Groups count if both sides have them. Equal input and seed give an
    equal result. Raises DataError for rows that are not finite, or that do not fit together.

    500 + 1,500 rows of 1,280 features, 500 permutations: 1.1 s on one core with two domains, 2.3 s
    with ten; 300 MB. 200 + 630 rows: 0.35 s.
    """
    _check(reference, window)
    rng = np.random.default_rng(seed)
    given = ["all"] * len(reference.features_ND) if reference.domains is None else reference.domains
    names, domain_N = _coded(given)
    kept_N, _ = _distinct(reference, domain_N)
    fewest = min(LEAST_ROWS, len(kept_N))
    kept_N = kept_N[_evenly(domain_N[kept_N], REFERENCE_ROWS * most, rng)]
    kept_M, copies_M = _distinct(window, np.zeros(len(window.features_ND)))
    most_copies, copies_p_value = _repeated(reference, window, kept_M, copies_M, fewest)
    if len(kept_M) > most:
        kept_M = np.sort(rng.choice(kept_M, most, replace=False))
    if reference.groups is None or window.groups is None:
        group_N, group_M = np.arange(len(kept_N)), np.arange(len(kept_M))
    else:
        group_N, group_M = (
            groups.codes(reference.groups)[kept_N],
            groups.codes(window.groups)[kept_M],
        )
        # Groups can change places only if they are of one size.
        size = min(groups.median_size(group_N), groups.median_size(group_M))
        first_N = groups.at_most(group_N, size, rng)
        first_M = groups.at_most(group_M, size, rng)
        kept_N, group_N = kept_N[first_N], group_N[first_N]
        kept_M, group_M = kept_M[first_M], group_M[first_M]

    names, domain_n = _named(names, domain_N[kept_N])
    count = len(kept_N)
    features = np.concatenate([reference.features_ND[kept_N], window.features_ND[kept_M]])
    scores = np.concatenate([reference.scores_NC[kept_N], window.scores_NC[kept_M]])
    points_LD, score_points_LC = project(features), project(scores)
    names, domain_n = _joined(names, domain_n, points_LD[:count])

    # Groups are wholly of one domain: their rows are likely together.
    units_M, unit_M = np.unique(group_M, return_inverse=True)
    each_MK = memberships.log_likelihoods(points_LD[:count], domain_n, points_LD[count:], seed)
    unit_UK = np.stack([each_MK[unit_M == unit].mean(0) for unit in range(len(units_M))])
    member_UK = memberships.posterior(unit_UK)
    squared_LL = squared_distances(points_LD)
    kernels = gaussian(squared_LL), gaussian(squared_distances(score_points_LC))
    worlds = [member_UK]
    fewest_UK = memberships.sparse(unit_UK)
    if (fewest_UK == 0).any():
        worlds.append(fewest_UK)
    p_values, least_of_groups = np.zeros(2), 0.0
    for likely_UK in worlds:
        # The larger p-value counts, and it is no news already.
        if p_values.min() > CLEAR:
            break
        drawn_U = (likely_UK.cumsum(1) <= rng.random((len(likely_UK), 1))).sum(1)
        drawn_U = drawn_U.clip(max=len(names) - 1)
        unit_L, domain_U, is_window_U = _units(group_N, domain_n, unit_M, drawn_U)
        placed = Placed(unit_L, domain_U, is_window_U, len(names))
        statistics_2P, weights_K = statistics(kernels, placed, permutations, rng)
        p_values = np.maximum(p_values, (statistics_2P >= statistics_2P[:, :1] - TIE).mean(1))
        least_of_groups = max(least_of_groups, 1 / placed.regroupings())

    domain_M = member_UK.argmax(1)[unit_M]
    unlike_M = memberships.is_unlike(
        squared_LL[count:, :count], squared_LL[:count, :count], domain_n, domain_M
    )
    parts = []
    for place, name in enumerate(names):
        mine = domain_M == place
        unlike = float(unlike_M[mine].mean()) if mine.any() else 0.0
        parts.append(Part(name, float(weights_K[place]), float(mine.mean()), unlike))
    return Fit(
        statistic=float(statistics_2P[0, 0]),
        p_value=float(p_values[0]),
        score_statistic=float(statistics_2P[1, 0]),
        score_p_value=float(p_values[1]),
        parts=tuple(sorted(parts, key=lambda part: -part.weight)),
        least_p=max(1 / (permutations + 1), least_of_groups),
        rows=(count, len(kept_M)),
        most_copies=most_copies,
        copies_p_value=copies_p_value,
        least_of_groups=least_of_groups,
    )


def _check(reference: Rows, window: Rows) -> None:
    for side, rows in (("reference", reference), ("window", window)):
        count = len(rows.features_ND)
        lengths = {
            len(one) for one in (rows.scores_NC, rows.domains, rows.groups) if one is not None
        }
        if count < 2 or lengths != {count}:
            raise DataError(
                f"The rows of the {side} do not fit together",
                got=f"{count} rows of features, others {sorted(lengths)}",
                rule="At least two rows; row i of all is image i",
            )
        for name, array in (("features", rows.features_ND), ("scores", rows.scores_NC)):
            bad = int((~np.isfinite(array).all(axis=1)).sum())
            if bad:
                raise DataError(
                    f"The {name} of the {side} are not finite in {bad} of {count} rows",
                    fix="Look at these images: raypipe clean marks broken ones",
                )
    for name in ("features_ND", "scores_NC"):
        ours, theirs = getattr(reference, name).shape[1], getattr(window, name).shape[1]
        if ours != theirs:
            raise DataError(
                f"The window's {name.split('_')[0]} are {theirs} wide and the reference's {ours}",
                fix="Compute both with the same model version",
            )


def _distinct(rows: Rows, code_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places of the rows, without copies of a row in its own domain; how often each comes)."""
    features = np.asarray(rows.features_ND, np.float32)
    # 0.0 and -0.0 are equal, and their bytes are not.
    labelled = np.column_stack([code_N.astype(np.float32), features]) + np.float32(0)
    bytes_N = np.ascontiguousarray(labelled).view(np.dtype((np.void, labelled[0].nbytes)))
    _, first, counts = np.unique(bytes_N.ravel(), return_index=True, return_counts=True)
    order = first.argsort()
    return first[order], counts[order]


def _repeated(
    reference: Rows, window: Rows, kept_M: np.ndarray, copies_M: np.ndarray, fewest: int
) -> tuple[int, float]:
    """(how often a row comes in the window, how likely that is) of the row that repeats most
    unusually.

    A bound: all different rows are equally likely, and each may be the one that comes so often. A
    row that the reference repeats, too, as a placeholder for a picture that is missing, may come
    as often here as there: of the equal rows of both sides so many fall into the window by chance.

    fewest: as many different rows there are to draw from, even if fewer came.
    """
    rows, drawn = max(len(copies_M), fewest), int(copies_M.sum())
    count = len(reference.features_ND)
    often, p_value = int(copies_M.max()), 1.0
    repeated = int((copies_M > 1).sum())
    for place in np.argsort(-copies_M, kind="stable")[:MOST_REPEATED].tolist():
        copies = int(copies_M[place])
        bound = rows * float(scipy.stats.binom(drawn, 1 / rows).sf(copies - 1))
        # It rises as copies fall.
        if bound >= p_value:
            break
        usual = _equal_rows(reference.features_ND, window.features_ND[kept_M[place]])
        if usual:
            by_chance = scipy.stats.hypergeom(count + drawn, usual + copies, drawn)
            # Each of the rows that repeat may be the one.
            bound = max(bound, min(1.0, repeated * float(by_chance.sf(copies - 1))))
        if bound < p_value:
            often, p_value = copies, bound
    return often, p_value


def _equal_rows(rows_ND: np.ndarray, row_D: np.ndarray) -> int:
    """How many rows equal this one but for rounding: other batches round otherwise."""
    near = 1e-4 * max(1e-12, float(np.abs(row_D).max()))
    return int((np.abs(rows_ND - row_D) <= near).all(axis=1).sum())


def _evenly(code_N: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Places of at most `most` rows, sorted. Small domains are kept whole; of the others, equally
    many rows are drawn. Of more domains than `most`, some are left out."""
    if len(code_N) <= most:
        return np.arange(len(code_N))
    sizes_K = np.bincount(code_N)
    if len(sizes_K) > most:
        return np.sort(rng.choice(len(code_N), most, replace=False))
    # Water rises in all domains until `most` rows are below it.
    level, left, domains = 0, most, len(sizes_K)
    for size in sorted(sizes_K.tolist()):
        share = left // domains
        if size > share:
            level = share
            break
        left, domains, level = left - size, domains - 1, size
    places = [
        rng.permutation(np.flatnonzero(code_N == code))[: max(1, level)]
        for code in range(len(sizes_K))
    ]
    return np.sort(np.concatenate(places))


def _coded(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The different names, sorted, and the place of each row's among them.

    Not by an array of text: that drops a NUL at the end, and one long name would make all of them
    as long.
    """
    known = sorted({str(name) for name in names})
    place = {name: number for number, name in enumerate(known)}
    return known, np.array([place[str(name)] for name in names], int)


def _named(names: list[str], code_N: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The names that occur, and codes 0 to K - 1 for them."""
    used, coded_N = np.unique(code_N, return_inverse=True)
    return [names[code] for code in used.tolist()], coded_N


def _joined(
    names: list[str], domain_N: np.ndarray, points_ND: np.ndarray
) -> tuple[list[str], np.ndarray]:
    """At most MOST_DOMAINS domains: the nearest pair is joined again and again (Ward 1963)."""
    count = len(names)
    if count <= MOST_DOMAINS:
        return names, domain_N
    means_KD = np.stack([points_ND[domain_N == k].mean(0) for k in range(count)])
    sizes_K = np.bincount(domain_N, minlength=count).astype(float)
    members = [[k] for k in range(count)]

    def costs(squared: np.ndarray, size: np.ndarray) -> np.ndarray:
        return np.asarray(squared / (1 / size + 1 / sizes_K))

    cost_KK = costs(squared_distances(means_KD), sizes_K[:, None])
    np.fill_diagonal(cost_KK, np.inf)
    for _ in range(count - MOST_DOMAINS):
        one, other = map(int, np.unravel_index(cost_KK.argmin(), cost_KK.shape))
        total = sizes_K[one] + sizes_K[other]
        both_D = sizes_K[one] * means_KD[one] + sizes_K[other] * means_KD[other]
        means_KD[one], sizes_K[one] = both_D / total, total
        members[one] += members[other]
        members[other] = []
        # Only the distances to the joined pair change.
        cost_K = costs(squared_distances(means_KD[one][None], means_KD)[0], total)
        cost_K[[not left for left in members]] = np.inf
        cost_K[one] = np.inf
        cost_KK[one], cost_KK[:, one] = cost_K, cost_K
        cost_KK[other], cost_KK[:, other] = np.inf, np.inf
    left = [group for group in members if group]
    place_K = np.empty(count, int)
    for place, group in enumerate(left):
        place_K[group] = place
    return [_together([names[k] for k in group]) for group in left], place_K[domain_N]


def _together(names: list[str]) -> str:
    """The name of joined domains: a few of theirs, for there may be thousands."""
    shown = " + ".join(names[:NAMED])
    return f"{shown} + {len(names) - NAMED} more" if len(names) > NAMED else shown


def _units(
    group_N: np.ndarray, domain_N: np.ndarray, unit_M: np.ndarray, domain_U: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(unit of each row of both sides, domain of each unit, whether it is the window's).

    A group of the reference that lies in two domains is two units.
    """
    pairs, unit_N = np.unique(np.stack([group_N, domain_N]), axis=1, return_inverse=True)
    unit_N = unit_N.reshape(-1)
    count = pairs.shape[1]
    is_window_U = np.arange(count + len(domain_U)) >= count
    units_L = np.concatenate([unit_N, count + unit_M])
    return units_L, np.concatenate([pairs[1], domain_U]), is_window_U
