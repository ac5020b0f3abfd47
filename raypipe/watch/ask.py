"""Which images of a drifted window are worth a label: those the champion is unsure of, and those
unlike all that it knows.

Each image gets two ranks, by uncertainty and by novelty, and their mean orders the list. Ranks,
because the two have no common unit. Copies of one image are asked for once.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from raypipe.files import write_atomic

BLANK = " \t\r\n\v\f\0\u00a0\u200b\ufeff"


def worth_a_label(
    scores_NC: np.ndarray, distance_N: np.ndarray, sha256: Sequence[str], most: int
) -> list[int]:
    """Rows of the images to label, most valuable first, at most `most`.

    scores_NC: of classes; of one column (a number) novelty alone counts. distance_N: to the nearest
    known images (projection.unusual). sha256: of each image.
    """
    value_N = _ranks(distance_N)
    unsure_N = uncertainty(scores_NC)
    if unsure_N is not None:
        value_N = value_N + _ranks(unsure_N)
    asked: list[int] = []
    seen: set[str] = set()
    for row in np.argsort(-value_N, kind="stable").tolist():
        if len(asked) == most:
            break
        if sha256[row] not in seen:
            seen.add(sha256[row])
            asked.append(row)
    return asked


def _ranks(value_N: np.ndarray) -> np.ndarray:
    """Ranks, the highest for the largest. A value that is no number is stranger than all others.

    rankdata itself gives NaN to all rows if one is NaN.
    """
    ranks_N: np.ndarray = rankdata(np.nan_to_num(value_N, nan=np.inf, posinf=np.inf))
    return ranks_N


def uncertainty(scores_NC: np.ndarray) -> np.ndarray | None:
    """unsure_N, 0 to 1: one less the gap between the two best classes; None without classes."""
    if scores_NC.shape[1] < 2:
        return None
    best_N2 = np.sort(scores_NC, axis=1)[:, -2:]
    unsure_N: np.ndarray = 1 - (best_N2[:, 1] - best_N2[:, 0])
    return unsure_N


def write(
    file: Path,
    asked: Sequence[int],
    ids: Sequence[str | None],
    sha256: Sequence[str],
    labels: Sequence[str],
    scores_NC: np.ndarray,
    distance_N: np.ndarray,
) -> None:
    """A CSV for whoever labels: file id, hash, what the champion says, and why it is asked."""
    unsure_N = uncertainty(scores_NC)
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["file", "sha256", "label", "champion_says", "uncertainty", "times_as_far"])
    for row in asked:
        unsure = "" if unsure_N is None else f"{unsure_N[row]:.3f}"
        far = f"{distance_N[row]:.2f}"
        rows.writerow([_plain(ids[row]), sha256[row], "", _plain(labels[row]), unsure, far])
    write_atomic(file, out.getvalue())


def _plain(text: str | None) -> str:
    """A spreadsheet would compute a cell that begins with one of these, also after blanks."""
    if not text:
        return ""
    # NFKC: full-width forms of them count, too.
    start = unicodedata.normalize("NFKC", text).lstrip(BLANK)[:1]
    return "'" + text if text[0] in "\t\r\n" or (start and start in "=+-@") else text
