"""Did the images change while they came? The largest MMD of a window that slides over a night.

A check compares a night as a whole. If the last 60 of 500 images are drift, the others hide them.
Here a window of W images slides over the night in its order of arrival, and each place has the
squared MMD of Alibi Detect's MMDDriftOnline (equal to 1e-5, test_online.py). The statistic is the
largest of them.

Alibi's online test raises an alarm by thresholds for an expected run time, which it takes from
resampled references. It gives no p-value, so it has no place among the tests of a check; and for a
run time of 20,000 images it wants 200,000 resamples. Here the p-value is that of a permutation
test: rows of both sides change places, each regrouping is a night in some order, and its largest
MMD is compared with ours. If the night's images are drawn as the reference's were, in any order,
this is exact for every size of the reference. Without drift, nights of M images then alarm after
M / alpha images in the mean, or later: that is the expected run time.

The test begins anew each night, and keeps nothing. So a repeated or killed check gives the same
result. Its price: a change in the last few images of a night is found in the next one.

Neighbouring images that are alike, as the frames of a film or the cells of one module, are no
independent draws: this test finds them always (detect.py leaves it out where groups are known).

Cost: 500 + 500 rows, W = 50, 500 permutations: 0.3 s and 100 MB on one core.

Legend: N rows of the reference, M of the night in order, L = N + M, W of the window, T = M - W + 1
places of it, P permutations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raypipe.errors import DataError
from raypipe.watch import mmd
from raypipe.watch.projection import MOST_ONLINE

AT_ONCE = 256  # permutations whose matrices are in memory together
ROUNDING = 1e-6
"""Of a squared MMD in float32. That of 50 rows varies by about 1e-2."""


@dataclass(frozen=True)
class Scan:
    """squared_T: the squared MMD at each place of the window. permuted_P: each permutation's
    largest. window: images of it."""

    squared_T: np.ndarray
    permuted_P: np.ndarray
    window: int

    @property
    def statistic(self) -> float:
        """The largest squared MMD of all places."""
        return float(self.squared_T.max())

    @property
    def p_value(self) -> float:
        """The share of regroupings that are at least as extreme; the observed one counts too."""
        extreme = int((self.permuted_P >= self.statistic - ROUNDING).sum())
        return (extreme + 1) / (len(self.permuted_P) + 1)

    @property
    def farthest(self) -> tuple[int, int]:
        """(first, last) image of the window that lies farthest from the reference, from 1 on."""
        place = int(self.squared_T.argmax())
        return place + 1, place + self.window

    def alarm_after(self, alpha: float) -> int | None:
        """Images of the night until an alarm at this level; None without one.

        The first window that alone would be enough: at most alpha of the regroupings reach it.
        """
        p_T = 1 + (self.permuted_P >= self.squared_T[:, None] - ROUNDING).sum(1)
        over_T = p_T <= alpha * (len(self.permuted_P) + 1)
        return int(over_T.argmax()) + self.window if over_T.any() else None


def scan(
    reference_ND: np.ndarray,
    night_MD: np.ndarray,
    width: float,
    window: int,
    permutations: int,
    seed: int,
) -> Scan:
    """Slide a window of `window` rows, at most half of them, over a night in its order of arrival.

    width: of the kernel of mmd.py. Equal input and seed give an equal result. DataError for fewer
    than two rows of the reference or four of the night, and for more than MOST_ONLINE of a side.
    """
    rows, night_rows = len(reference_ND), len(night_MD)
    if not (2 <= rows <= MOST_ONLINE and 4 <= night_rows <= MOST_ONLINE and window >= 2):
        raise DataError(
            "No window can slide over so many rows",
            got=f"{rows} of the reference, {night_rows} of the night, a window of {window}",
            rule=f"At least 2, 4 and 2, and at most {MOST_ONLINE} rows of a side",
        )
    window = min(window, night_rows // 2)
    kernel_LL = mmd.kernel(np.concatenate([reference_ND, night_MD]), width)
    row_sums_L = kernel_LL.sum(1, dtype=np.float64)
    rng = np.random.default_rng(seed)
    observed_1M = np.arange(rows, rows + night_rows)[None]
    squared_T = _squared(kernel_LL, row_sums_L, observed_1M, window)[0]
    largest = []
    for start in range(0, permutations, AT_ONCE):
        keys_PL = rng.random((min(AT_ONCE, permutations - start), len(kernel_LL)), np.float32)
        drawn_PM = keys_PL.argsort(axis=1)[:, :night_rows]
        largest.append(_squared(kernel_LL, row_sums_L, drawn_PM, window).max(1))
    return Scan(squared_T, np.concatenate(largest), window)


def _squared(
    kernel_LL: np.ndarray, row_sums_L: np.ndarray, night_PM: np.ndarray, window: int
) -> np.ndarray:
    """The unbiased squared MMD (P, T) of each window of these nights to all other rows.

    night_PM: the rows of each night, in order.
    """
    count, night_rows = night_PM.shape
    rows = len(kernel_LL) - night_rows
    chosen_LP = np.zeros((len(kernel_LL), count), np.float32)
    chosen_LP[night_PM.T, np.arange(count)] = 1
    # torch's product, not numpy's: it obeys the number of threads that raypipe has set.
    with_night_LP = (torch.from_numpy(kernel_LL) @ torch.from_numpy(chosen_LP)).numpy()
    with_night_PM = with_night_LP[night_PM, np.arange(count)[:, None]].astype(np.float64)
    with_rest_PM = row_sums_L[night_PM] - with_night_PM
    across_P = with_rest_PM.sum(1)
    inside_rest_P = row_sums_L.sum() - with_night_PM.sum(1) - 2 * across_P

    # Pairs that enter the window with its last row, and that leave it with its first.
    with_earlier_PM = np.zeros((count, night_rows))
    with_later_PM = np.zeros((count, night_rows))
    for apart in range(1, window):
        pairs = kernel_LL[night_PM[:, :-apart], night_PM[:, apart:]]
        with_later_PM[:, :-apart] += pairs
        with_earlier_PM[:, apart:] += pairs
    changes = with_earlier_PM[:, window:] - with_later_PM[:, : night_rows - window]
    first_P1 = with_earlier_PM[:, :window].sum(1, keepdims=True)
    inside_PT = np.concatenate([first_P1, first_P1 + changes.cumsum(1)], axis=1)
    sums = np.concatenate([np.zeros((count, 1)), with_rest_PM.cumsum(1)], axis=1)
    across_PT = sums[:, window:] - sums[:, :-window]

    squared_PT: np.ndarray = (
        (inside_rest_P / (rows * (rows - 1)))[:, None]
        + 2 * inside_PT / (window * (window - 1))
        - 2 * across_PT / (rows * window)
    )
    return squared_PT
