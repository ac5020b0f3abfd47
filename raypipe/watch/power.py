"""What a drift check can see, measured on the champion's own reference.

The reference is cut in two again and again: a window as large as a night's, and the rest. Nothing
has drifted between them, so the share of alarms is the check's real false-alarm rate on these
images. If it is far above alpha, images come in groups (the cells of one module, the frames of one
film): then `watch.group` names them, and whole groups are drawn.

The same windows, changed more and more, say what is found: all images moved a little, or a few
images moved far. A change counts as found if FOUND of the windows alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import scipy

from raypipe.errors import DataError
from raypipe.watch.detect import DriftConfig, detect
from raypipe.watch.settings import LEAST_ROWS
from raypipe.watch.sides import Seen

DRAWS, TRIES = 100, 20
FOUND = 0.8
MOVES = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
FAR = 5.0  # standard deviations that a strange image lies away


@dataclass(frozen=True)
class Known:
    """The champion's reference, row by row. labels_N: predicted classes; None of numbers."""

    features_ND: np.ndarray
    scores_NC: np.ndarray
    seen: Seen = field(default_factory=Seen)

    def rows(self, chosen_N: np.ndarray) -> Known:
        """These rows alone."""
        given = {
            name: values if values is None else [values[row] for row in chosen_N]
            for name, values in vars(self.seen).items()
            if name != "looks_NK"
        }
        looks_NK = self.seen.looks_NK
        seen = Seen(**given, looks_NK=None if looks_NK is None else looks_NK[chosen_N])
        return Known(self.features_ND[chosen_N], self.scores_NC[chosen_N], seen)


@dataclass(frozen=True)
class Power:
    """alarms: of `draws` windows of `window` images without drift; low, high: the 95 % interval of
    their rate. move: the least shift of all images, in standard deviations along the reference's
    main direction, that is found; share: the least share of strange images; None: none that was
    tried is.
    """

    alpha: float
    window: int
    reference: int
    draws: int
    alarms: int
    low: float
    high: float
    move: float | None
    share: float | None
    grouped: bool

    @property
    def holds(self) -> bool:
        """Do these draws agree with alpha?"""
        return self.low <= self.alpha


def measure(
    known: Known,
    cfg: DriftConfig,
    window: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    draws: int = DRAWS,
    tries: int = TRIES,
) -> Power:
    """The false-alarm rate of windows of this many images, and the least changes that are found.

    Windows are at most half of the reference. progress: (checks done, about how many in all).
    DataError for a reference of fewer than 2 * LEAST_ROWS images.
    """
    rows = len(known.features_ND)
    if rows < 2 * LEAST_ROWS:
        raise DataError(
            "The reference is too small to be cut in two",
            got=f"{rows} images",
            rule=f"At least {2 * LEAST_ROWS}",
            fix="Register a model with more images in feed.val",
        )
    size = min(window, rows // 2)
    rng = np.random.default_rng(seed)
    direction_D = _direction(known.features_ND)
    # Two searches by halving look at about four changes each.
    total, done = draws + 8 * tries, 0

    def alarms(count: int, changed: Callable[[np.ndarray], np.ndarray]) -> int:
        nonlocal done
        found = 0
        for _ in range(count):
            in_window_N = _drawn(known, size, rng)
            rest, mine = (known.rows(np.flatnonzero(part)) for part in (~in_window_N, in_window_N))
            mine = replace(mine, features_ND=changed(mine.features_ND))
            report = detect(
                rest.features_ND,
                mine.features_ND,
                rest.scores_NC,
                mine.scores_NC,
                cfg,
                int(rng.integers(2**31)),
                rest.seen,
                # Nobody names the domain of a new image. They came in the order of these rows.
                replace(mine.seen, domains=None, arrived_N=range(len(mine.features_ND))),
            )
            found += report.is_drift
            done += 1
            progress(min(done, total), total)
        return found

    def moved(by: float) -> bool:
        return alarms(tries, lambda x_MD: x_MD + by * direction_D) >= FOUND * tries

    def strange(share: float) -> bool:
        def few(x_MD: np.ndarray) -> np.ndarray:
            chosen = rng.permutation(len(x_MD))[: max(1, round(share * len(x_MD)))]
            out_MD = x_MD.copy()
            out_MD[chosen] += FAR * direction_D
            return out_MD

        return alarms(tries, few) >= FOUND * tries

    false = alarms(draws, lambda x_MD: x_MD)
    between = scipy.stats.binomtest(false, draws).proportion_ci()
    return Power(
        alpha=cfg.alpha,
        window=size,
        reference=rows - size,
        draws=draws,
        alarms=false,
        low=float(between.low),
        high=float(between.high),
        move=_least(MOVES, moved),
        share=_least(SHARES, strange),
        grouped=known.seen.groups is not None,
    )


def _direction(features_ND: np.ndarray) -> np.ndarray:
    """direction_D: the first principal component, as long as the standard deviation along it."""
    centred_ND = (features_ND - features_ND.mean(0)).astype(np.float64)
    _, sizes, axes = np.linalg.svd(centred_ND, full_matrices=False)
    direction_D: np.ndarray = axes[0] * sizes[0] / np.sqrt(len(features_ND))
    return direction_D


def _drawn(known: Known, size: int, rng: np.random.Generator) -> np.ndarray:
    """in_window_N: about `size` rows at random, or whole groups where they are known."""
    rows = len(known.features_ND)
    in_window_N = np.zeros(rows, bool)
    groups = known.seen.groups
    if groups is None:
        in_window_N[rng.permutation(rows)[:size]] = True
        return in_window_N
    of_group: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        # Without a group an image stands alone.
        of_group.setdefault(group or f"row {row}", []).append(row)
    names = list(of_group)
    for place in rng.permutation(len(names)):
        if in_window_N.sum() >= size:
            break
        in_window_N[of_group[names[place]]] = True
    return in_window_N


def _least(tried: tuple[float, ...], is_found: Callable[[float], bool]) -> float | None:
    """The least of ascending values that is found, by halving; None if the largest is not."""
    low, high = -1, len(tried)
    while high - low > 1:
        middle = (low + high) // 2
        if is_found(tried[middle]):
            high = middle
        else:
            low = middle
    return tried[high] if high < len(tried) else None


def as_facts(power: Power) -> Mapping[str, str]:
    """The answer in words, by name."""
    p = power
    drawn = "whole groups" if p.grouped else "images"
    rate = f"{p.alarms} of {p.draws} windows alarmed without drift"
    verdict = "as alpha says" if p.holds else "MORE than alpha says: name groups in watch.group"
    moves = f"{p.move:g} standard deviations" if p.move is not None else "none that was tried"
    few = f"{p.share:.0%} of the images" if p.share is not None else "none that was tried"
    return {
        "windows": f"{p.window} {drawn} against {p.reference} of the reference",
        "false alarms": f"{rate} ({p.low:.1%} to {p.high:.1%}): {verdict} ({p.alpha:g})",
        "found: all images moved by": moves,
        f"found: images {FAR:g} standard deviations away": few,
    }
