"""Windows whose accuracy is known, and how large the errors of a model of their accuracy are.

`severity.calibrate` draws windows from labelled validation rows and fits a linear model of their
signs. Its errors are those on kinds of windows and on images that it was not fitted on. Their size
grows with the distance of a window, and with the novelty of its signs.

Letters in names: N rows, C classes, K known domains, W windows, V other windows, S signs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypipe.models.signs import Known, Rows, signs_of

WINDOW = 200
COVER = 0.95
"""Of windows of kinds left out, so many are covered. Kinds that nobody thought of are worse."""
LEAST_KINDS = 3
"""Kinds of windows that have to be near: one kind alone may cost much less than another."""
SPLITS = 20
WINDOWS = 40
"""Of each kind and each split. With 8 splits the seed alone decided whether intervals of a champion
of two domains were 15 or 24 points wide."""
RIDGE = 1e-3

DRAWN = ("domains", "classes", "unsure")
"""Kinds of windows without shifted copies."""


@dataclass(frozen=True)
class Windows:
    """Drawn windows: their kinds, signs, and by how much their accuracy differs.

    few_W: 1 / the number of known images that a window is compared with. It is compared with a
    domain's images only as far as it is of this domain.
    """

    kind_W: np.ndarray
    signs_WS: np.ndarray
    change_W: np.ndarray
    few_W: np.ndarray


def balanced(
    half_N: np.ndarray, domains_N: np.ndarray, plain_N: np.ndarray, images_N: np.ndarray
) -> np.ndarray:
    """The half, with every second image of a domain that lies on one side only."""
    for name in np.unique(domains_N):
        mine = np.unique(images_N[plain_N & (domains_N == name)])
        # Of images, not of rows: one large group is no whole domain.
        share = np.isin(mine, images_N[half_N]).mean()
        if not 0.2 < share < 0.8:
            half_N = np.where(np.isin(images_N, mine), np.isin(images_N, mine[::2]), half_N)
    return half_N


def on_one_side(half_N: np.ndarray, domains_N: np.ndarray, plain_N: np.ndarray) -> list[str]:
    """The domains of which one half has no image, as groups that lie in several domains may do."""
    return [
        str(name)
        for name in np.unique(domains_N)
        if len(np.unique(half_N[plain_N & (domains_N == name)])) < 2
    ]


def draw(
    known: Known,
    table: Rows,
    labels_N: np.ndarray,
    domains_N: np.ndarray,
    shifts_N: np.ndarray,
    kinds: list[str],
    part_N: np.ndarray,
    rng: np.random.Generator,
) -> Windows:
    """Windows of all kinds from the rows of a part. Their accuracy is that of the rows drawn."""
    plain = np.flatnonzero(part_N & (shifts_N == ""))
    names, domain_N = np.unique(domains_N, return_inverse=True)
    sizes_K = np.bincount(domain_N[plain], minlength=len(names))
    classes = table.scores_NC.shape[1]
    confidence_N = table.scores_NC.max(1)
    found = []
    for number, kind in enumerate(kinds):
        is_shift = number >= len(DRAWN)
        shifted = np.flatnonzero(part_N & (shifts_N == kind)) if is_shift else plain
        if not len(shifted):
            continue
        windows = []
        for _ in range(WINDOWS):
            weight_K = rng.dirichlet(np.ones(len(names))) / sizes_K
            # A shift may come with other shares of the classes.
            weight_C, tilt = np.ones(classes), 0.0
            if kind == "classes" or (is_shift and rng.random() < 0.5):
                weight_C = rng.dirichlet(np.full(classes, 2.0))
            elif kind == "unsure":
                tilt = rng.uniform(-3, 3)
            # From a few shifted images among usual ones to a window of them.
            count = int(WINDOW * rng.uniform(0.05, 1)) if is_shift else 0
            picked = []
            for rows, many in ((plain, WINDOW - count), (shifted, count)):
                if not many:
                    continue
                weight_R = weight_K[domain_N[rows]] * weight_C[labels_N[rows]]
                if tilt:
                    weight_R = weight_R * np.exp(tilt * confidence_N[rows])
                picked.append(_chosen(rows, many, weight_R + 1e-12, rng))
            windows.append(np.concatenate(picked))
        rows_WM = np.stack(windows)
        signs_WS, shares_WK = signs_of(known, table, rows_WM)
        change_W = table.right_N[rows_WM].mean(1) - shares_WK @ known.facts_K4[:, 2]
        few_W = shares_WK**2 @ known.facts_K4[:, 3]
        found.append((np.full(WINDOWS, number), signs_WS, change_W, few_W))
    return Windows(*(np.concatenate(part) for part in zip(*found, strict=True)))


def _chosen(
    rows: np.ndarray, many: int, weight_R: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """So many of the rows, by weight: what rng.choice gives, without its checks of the weights."""
    until_R = np.cumsum(weight_R / weight_R.sum())
    until_R /= until_R[-1]
    drawn: np.ndarray = rows[until_R.searchsorted(rng.random(many), side="right")]
    return drawn


def fitted(windows: Windows, use_W: np.ndarray) -> np.ndarray:
    """Weights of the signs, without a constant: a window like the known domains has no change.

    Near windows count most: far ones will get no answer.
    """
    signs_WS = windows.signs_WS[use_W]
    unit_S = np.sqrt((signs_WS**2).mean(0)) + 1e-9
    scaled_WS = signs_WS / unit_S
    near_W = 1 / (1 + signs_WS[:, 1] ** 2)
    left = (scaled_WS * near_W[:, None]).T @ scaled_WS
    left += RIDGE * near_W.sum() * np.eye(len(left))
    weights_S: np.ndarray = (
        np.linalg.solve(left, (scaled_WS * near_W[:, None]).T @ windows.change_W[use_W]) / unit_S
    )
    return weights_S


def left_out(
    fitted_on: Windows, tried_on: Windows, kinds: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(what errors may grow with, errors, kinds, few_W) of windows whose kind was left out."""
    spread_S = fitted_on.signs_WS.std(0) + 1e-9
    grows, errors, of_kind, few = [], [], [], []
    for kind in range(kinds):
        others = fitted_on.kind_W != kind
        mine = tried_on.kind_W == kind
        if not mine.any() or not others.any():
            continue
        signs_WS = tried_on.signs_WS[mine]
        novelty_W = novelty(
            signs_WS / spread_S, fitted_on.signs_WS[others] / spread_S, fitted_on.kind_W[others]
        )
        grows.append(np.column_stack([np.ones(mine.sum()), signs_WS[:, 1], novelty_W]))
        errors.append(signs_WS @ fitted(fitted_on, others) - tried_on.change_W[mine])
        of_kind.append(np.full(mine.sum(), kind))
        few.append(tried_on.few_W[mine])
    grows_W3, error_W, kind_W, few_W = map(np.concatenate, (grows, errors, of_kind, few))
    return grows_W3, error_W, kind_W, few_W


def novelty(signs_WS: np.ndarray, seen_VS: np.ndarray, kind_V: np.ndarray) -> np.ndarray:
    """How far a window's signs are from the `LEAST_KINDS`-th nearest kind of window, (W,)."""
    nearest = []
    for kind in np.unique(kind_V):
        difference_WVS = signs_WS[:, None] - seen_VS[kind_V == kind]
        nearest.append(np.sqrt((difference_WVS**2).sum(2)).min(1))
    ordered = np.sort(np.stack(nearest), axis=0)
    novelty_W: np.ndarray = ordered[min(LEAST_KINDS, len(ordered)) - 1]
    return novelty_W


def reach(windows: Windows) -> float:
    """The distance that at least `LEAST_KINDS` kinds of windows have reached."""
    kinds = np.unique(windows.kind_W)
    farthest = [windows.signs_WS[windows.kind_W == kind, 1].max() for kind in kinds]
    return float(np.sort(farthest)[-min(LEAST_KINDS, len(farthest))])


def scale(
    grows_W3: np.ndarray, residual_W: np.ndarray, kind_W: np.ndarray, drawn_W: np.ndarray
) -> tuple[np.ndarray, float]:
    """(error_3, quantile): the likeliest size of errors, each kind counting alike.

    The size is a sum of a constant, a part by distance and a part by novelty, none negative.
    drawn_W: the variance by the chance of drawing, which comes on top.
    """
    weight_W = 1 / np.bincount(kind_W)[kind_W]
    steps = np.array([0, 5, 10, 15, 20, 25, 30, 38, 46, 56, 68, 82, 100, 150]) / 1000
    best, lowest = np.zeros(3), np.inf
    square_W1, drawn_W1 = (residual_W**2)[:, None], drawn_W[:, None]
    for constant in steps:
        for by_distance in steps:
            # All steps by novelty at once, WB.
            size_W1 = grows_W3[:, :2] @ np.array([[constant], [by_distance]])
            variance_WB = (size_W1 + grows_W3[:, 2:] * steps) ** 2 + drawn_W1
            loss_B = weight_W @ (square_W1 / variance_WB + np.log(variance_WB))
            place = int(loss_B.argmin())
            if loss_B[place] < lowest:
                best = np.array([constant, by_distance, steps[place]])
                lowest = float(loss_B[place])
    relative_W = np.abs(residual_W) / np.sqrt((grows_W3 @ best) ** 2 + drawn_W)
    order = np.argsort(relative_W)
    reached = np.cumsum(weight_W[order]) / weight_W.sum()
    last = min(int(np.searchsorted(reached, COVER)), len(order) - 1)
    return best, max(1.96, float(relative_W[order[last]]))
