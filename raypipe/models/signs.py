"""What needs no labels and still says how a model does on a window: four signs.

They compare a window with the nearest mixture of the known domains: the mean confidence, the mean
embedding, the distance of images to their nearest known ones, and the classes that are predicted.
`severity.py` learns from them what accuracy a window costs.

Embeddings are seen in few directions: the principal components of the known images, in units of
standard deviation. In all 1,280 a shift drowns in features that never vary.

Letters in names: N rows, W windows, M rows of a window, C classes, D features, Q directions, K
known domains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypipe.errors import DataError

DIRECTIONS, ROWS_A_DIRECTION = 32, 8
NEIGHBOURS = 5
LEAST_SPREAD = 0.3
"""Of the median feature's: features that hardly vary in validation would rule all distances."""
_AT_ONCE = 2_000_000  # numbers: 16 MB


@dataclass(frozen=True)
class Rows:
    """What a row contributes to a window."""

    scores_NC: np.ndarray
    points_NQ: np.ndarray
    far_N: np.ndarray
    right_N: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> Rows:
        return Rows(
            self.scores_NC[rows], self.points_NQ[rows], self.far_N[rows], self.right_N[rows]
        )


@dataclass(frozen=True)
class Known:
    """The known domains in the projection of their own images."""

    directions_DQ: np.ndarray
    offset_Q: np.ndarray
    reference_NQ: np.ndarray
    means_KQ: np.ndarray
    scores_KC: np.ndarray
    facts_K4: np.ndarray


def know(
    given: tuple[np.ndarray, np.ndarray, np.ndarray],
    domains_N: np.ndarray,
    reference_N: np.ndarray,
    images_N: np.ndarray,
) -> tuple[Known, Rows]:
    """The domains by their reference rows, and all rows seen from there."""
    scores_NC, labels_N, features_ND = given
    reference_RD = features_ND[reference_N]
    deviation_D = reference_RD.std(0)
    # A constant feature's deviation may be rounding.
    varies_D = deviation_D > 1e-9 * (1 + np.abs(reference_RD).max(0))
    if not varies_D.any():
        raise DataError("The features of validation are the same for all images")
    deviation_D = np.maximum(deviation_D, LEAST_SPREAD * np.median(deviation_D[varies_D]))
    standard_RD = (reference_RD - reference_RD.mean(0)) / deviation_D
    count = max(1, min(DIRECTIONS, len(reference_RD) // ROWS_A_DIRECTION, features_ND.shape[1]))
    _, sizes, axes = np.linalg.svd(standard_RD, full_matrices=False)
    # Units of standard deviation in each direction; of one that does not vary, none.
    unit_Q = np.maximum(sizes[:count] / np.sqrt(len(reference_RD)), 1e-3)
    directions_DQ = axes[:count].T / unit_Q / deviation_D[:, None]
    offset_Q = reference_RD.mean(0) @ directions_DQ
    points_NQ = features_ND @ directions_DQ - offset_Q
    # A copy's own image is no neighbour: a new image has none.
    far_N = distance(points_NQ, points_NQ[reference_N], images_N, images_N[reference_N])
    right_N = (scores_NC.argmax(1) == labels_N).astype(float)
    table = Rows(scores_NC, points_NQ, far_N, right_N)

    of_domains = [table[reference_N & (domains_N == name)] for name in np.unique(domains_N)]
    known = Known(
        directions_DQ,
        offset_Q,
        points_NQ[reference_N],
        np.stack([one.points_NQ.mean(0) for one in of_domains]),
        np.stack([one.scores_NC.mean(0) for one in of_domains]),
        np.array(
            [
                [
                    one.scores_NC.max(1).mean(),
                    one.far_N.mean(),
                    one.right_N.mean(),
                    1 / len(one.far_N),
                ]
                for one in of_domains
            ]
        ),
    )
    return known, table


def distance(
    points_MQ: np.ndarray,
    reference_NQ: np.ndarray,
    images_M: np.ndarray | None = None,
    images_N: np.ndarray | None = None,
) -> np.ndarray:
    """The logarithm of the mean distance to the nearest reference rows of other images."""
    far_M = np.empty(len(points_MQ))
    squares_N = (reference_NQ**2).sum(1)
    for start in range(0, len(points_MQ), 1024):
        part = slice(start, start + 1024)
        squared = (points_MQ[part] ** 2).sum(1)[:, None] + squares_N
        squared -= 2 * points_MQ[part] @ reference_NQ.T
        if images_M is not None and images_N is not None:
            squared[images_M[part, None] == images_N] = np.inf
        near = np.partition(squared, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
        far_M[part] = np.sqrt(near.clip(1e-12)).mean(1)
    return np.log(far_M)


def signs(known: Known, window: Rows) -> tuple[np.ndarray, np.ndarray]:
    """(signs_S, shares_K): what differs from the nearest mixture of known domains."""
    # Views: a window of a drift check may be large.
    one = window.points_NQ[None], window.scores_NC[None], window.far_N[None]
    signs_WS, shares_WK = _signs_of(known, *one)
    return signs_WS[0], shares_WK[0]


def signs_of(known: Known, table: Rows, rows_WM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(signs_WS, shares_WK) of W windows of M rows each, as `signs` of each; W is at least 1."""
    width = max(table.scores_NC.shape[1], table.points_NQ.shape[1])
    at_once = max(1, _AT_ONCE // (rows_WM.shape[1] * width))
    parts = []
    for start in range(0, len(rows_WM), at_once):
        some = rows_WM[start : start + at_once]
        drawn = table.points_NQ[some], table.scores_NC[some], table.far_N[some]
        parts.append(_signs_of(known, *drawn))
    return np.concatenate([one for one, _ in parts]), np.concatenate([one for _, one in parts])


def _signs_of(
    known: Known, points_WMQ: np.ndarray, scores_WMC: np.ndarray, far_WM: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    mean_WQ = points_WMQ.mean(1)
    shares_WK = np.stack([_mixture(known.means_KQ, mean_Q) for mean_Q in mean_WQ])
    away_WQ = mean_WQ - shares_WK @ known.means_KQ
    # The mean of few rows lies away by chance.
    by_chance_W = (points_WMQ.var(1) / points_WMQ.shape[1]).sum(1)
    expected_W4 = shares_WK @ known.facts_K4
    predicted_WC = scores_WMC.mean(1) - shares_WK @ known.scores_KC
    four = [
        scores_WMC.max(2).mean(1) - expected_W4[:, 0],
        np.sqrt(np.maximum(0.0, (away_WQ**2).sum(1) - by_chance_W)),
        far_WM.mean(1) - expected_W4[:, 1],
        0.5 * np.abs(predicted_WC).sum(1),
    ]
    return np.stack(four, axis=1), shares_WK


def _mixture(means_KQ: np.ndarray, mean_Q: np.ndarray) -> np.ndarray:
    """The shares of the nearest point between the domains' means."""
    if len(means_KQ) == 1:
        return np.ones(1)
    # Here, so that whoever only opens a package does not wait for scipy.
    from scipy.optimize import nnls

    # Shares sum up to 1: a row with a large weight.
    heavy = 1e3 * max(1.0, float(np.abs(means_KQ).max()))
    left = np.vstack([means_KQ.T, np.full(len(means_KQ), heavy)])
    shares_K: np.ndarray = nnls(left, np.append(mean_Q, heavy))[0]
    return shares_K / shares_K.sum()
