"""Which images of a drifted window are worth a label: those the champion is unsure of, and those
unlike all that it knows, and no ten that are nearly the same.

Each image gets two ranks, by uncertainty and by novelty, and their mean is its value. Ranks,
because the two have no common unit. Copies of one image are asked for once. Of the most valuable
images those to label are drawn by k-means++ on the features: each next one with a chance that is
its value to the POWER times its squared distance to the nearest one that was drawn (as BADGE does,
Ash et al. 2020, on gradients). So a second picture of one thing comes last, and the same seed asks
for the same images.

POWER holds values against distances. Emoji of Twitter under a model of Google's, 100 of 1,200 asked
for, two windows, means of 3 seeds: without features they lie in 78 and 83 of 300 clusters, with a
mean uncertainty of 0.71 and 0.74. POWER 2: 79 and 76, 0.38. 8: 89 and 87, 0.56. 16: 88 and 89, 0.65
and 0.64. It was chosen on these windows.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np
import scipy

from raypipe.files import write_atomic
from raypipe.models.tasks import NUMERIC, Kind

POOL = 20  # times as many as are asked for: the most valuable ones, of which some are drawn
POWER = 16
COLUMNS = "image_id", "path", "sha256", "label", "champion_says", "uncertainty", "times_as_far"
BLANK = " \t\r\n\v\f\0\u00a0\u200b\ufeff"


def worth_a_label(
    scores_NC: np.ndarray,
    distance_N: np.ndarray,
    sha256: Sequence[str],
    most: int,
    features_ND: np.ndarray | None = None,
    seed: int = 0,
    labelled: Set[str] = frozenset(),
) -> list[int]:
    """Rows of the images to label, most valuable first, at most `most`.

    scores_NC: as `compared` gives them; of one column (a number) novelty alone counts. distance_N:
    to the nearest known images (projection.unusual). sha256: of each image. features_ND: the
    backbone's; None: the most valuable ones are taken, however alike they are. labelled: sha256 of
    images that have a label already.
    """
    value_N = _ranks(distance_N)
    unsure_N = uncertainty(scores_NC)
    if unsure_N is not None:
        value_N = value_N + _ranks(unsure_N)
    by_value: list[int] = []
    seen = set(labelled)
    for row in np.argsort(-value_N, kind="stable").tolist():
        if sha256[row] not in seen:
            seen.add(sha256[row])
            by_value.append(row)
    if features_ND is None or len(by_value) <= most or not most:
        return by_value[:most]
    pool_P = np.array(by_value[: POOL * most])
    weight_P = (value_N[pool_P] / value_N[pool_P].max()) ** POWER
    drawn = spread(features_ND[pool_P], weight_P, most, seed)
    # The pool is in the order of values.
    return [int(pool_P[place]) for place in sorted(drawn)]


def spread(features_ND: np.ndarray, value_N: np.ndarray, most: int, seed: int) -> list[int]:
    """`most` different rows by k-means++, weighted by value_N, which is above 0; first the first.

    Where all that are left equal one that was drawn, the most valuable of them follow.
    """
    rows_ND = _comparable(features_ND)
    squares_N = np.full(len(rows_ND), np.inf)
    rng = np.random.default_rng(seed)
    drawn = [0]
    while len(drawn) < min(most, len(rows_ND)):
        gap_ND = rows_ND - rows_ND[drawn[-1]]
        squares_N = np.minimum(squares_N, np.einsum("nd,nd->n", gap_ND, gap_ND))
        squares_N[drawn[-1]] = 0
        chances_N = value_N * squares_N
        total = chances_N.sum()
        if not total:
            break
        drawn.append(int(rng.choice(len(rows_ND), p=chances_N / total)))
    left = sorted(set(range(len(rows_ND))) - set(drawn), key=lambda row: (-value_N[row], row))
    return [*drawn, *left[: most - len(drawn)]]


def _comparable(features_ND: np.ndarray) -> np.ndarray:
    """float64, each feature in its standard deviations.

    Rows with a feature that is no number are one neighbourhood, far from all others.
    """
    rows_ND = np.asarray(features_ND, np.float64)
    is_number_N: np.ndarray = np.asarray(np.isfinite(rows_ND).all(axis=1))
    # Squares of what is larger are no numbers any more.
    rows_ND = np.clip(np.where(is_number_N[:, None], rows_ND, 0.0), -1e100, 1e100)
    spread_D = usual_D = np.ones(rows_ND.shape[1])
    if is_number_N.any():
        spread_D = rows_ND[is_number_N].std(0)
        # Of the middle half of images: one with a huge feature would make all others constant.
        usual_D = np.subtract(*np.percentile(rows_ND[is_number_N], [75, 25], axis=0))
    largest = float(usual_D.max(initial=0.0)) or float(spread_D.max(initial=0.0))
    alive = np.flatnonzero(spread_D > 1e-6 * max(1e-300, largest))
    rows_ND = rows_ND[:, alive] / spread_D[alive]
    far = 10 * np.sqrt(1.0 + rows_ND.shape[1])
    return np.column_stack([rows_ND, np.where(is_number_N, 0.0, far)])


def _ranks(value_N: np.ndarray) -> np.ndarray:
    """Ranks, the highest for the largest. A value that is no number is stranger than all others.

    rankdata itself gives NaN to all rows if one is NaN.
    """
    ranks_N: np.ndarray = scipy.stats.rankdata(np.nan_to_num(value_N, nan=np.inf, posinf=np.inf))
    return ranks_N


def uncertainty(scores_NC: np.ndarray) -> np.ndarray | None:
    """unsure_N, 0 to 1: one less the gap between the two best classes; None without classes."""
    if scores_NC.shape[1] < 2:
        return None
    best_N2 = np.sort(scores_NC, axis=1)[:, -2:]
    unsure_N: np.ndarray = 1 - (best_N2[:, 1] - best_N2[:, 0])
    return unsure_N


def compared(kind: Kind, scores_NC: np.ndarray) -> np.ndarray:
    """A model's scores as `worth_a_label` takes them: those of two classes or more, or one column.

    The scores of a number are no classes. Of tags it is the one that the model is least sure of:
    set, and not set. Several tags may be set, or none: by the two best ones, an image with two
    certain tags would be the least certain of all.
    """
    if kind in NUMERIC:
        return scores_NC[:, :1]
    if kind != "multi_label":
        return scores_NC
    place_N = np.abs(scores_NC - 0.5).argmin(axis=1)
    set_N = np.take_along_axis(scores_NC, place_N[:, None], axis=1)[:, 0]
    return np.stack([set_N, 1 - set_N], axis=1)


def is_filled(file: Path) -> bool:
    """Has somebody written labels into this list? One that is read no more as it was written was
    saved by another program."""
    try:
        rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8-sig"))))
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError, csv.Error):
        return True
    return any(row.get("label") != "" for row in rows)


def write(
    file: Path,
    asked: Sequence[int],
    ids: Sequence[str | None],
    sha256: Sequence[str],
    labels: Sequence[str],
    scores_NC: np.ndarray,
    distance_N: np.ndarray,
    paths: Mapping[int, str | None] | None = None,
) -> None:
    """A CSV for whoever labels: id, path, hash, what the champion says, and why it is asked.

    paths: where the source of an image had it, by row; None: nobody knows.
    """
    unsure_N = uncertainty(scores_NC)
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(COLUMNS)
    for row in asked:
        unsure = "" if unsure_N is None else f"{unsure_N[row]:.3f}"
        far = f"{distance_N[row]:.2f}"
        # An id that ingest gave is a hash: only the path says which picture to look at.
        named = [_plain(ids[row]), _plain((paths or {}).get(row))]
        rows.writerow([*named, sha256[row], "", _plain(labels[row]), unsure, far])
    write_atomic(file, out.getvalue())


def _plain(text: str | None) -> str:
    """A spreadsheet would compute a cell that begins with one of these, also after blanks."""
    if not text:
        return ""
    # NFKC: full-width forms of them count, too.
    start = unicodedata.normalize("NFKC", text).lstrip(BLANK)[:1]
    return "'" + text if text[0] in "\t\r\n" or (start and start in "=+-@") else text
