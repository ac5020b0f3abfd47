"""How much accuracy does a drifted window cost? An estimate with its interval, without labels.

A p-value says that a window is different, not that it matters. Here the champion's accuracy on a
window is estimated from what needs no labels, and `estimate` abstains where calibration has not
been.

Calibration uses labelled validation images of each known domain, as they are and as copies that
were changed on purpose (raypipe.images.shifts). From them, windows are drawn whose accuracy is
known: mixtures of domains, other shares of the classes, more unsure images, a share of shifted
copies. A window becomes four numbers, its signs: how the confidence differs from that of the
nearest mixture of known domains (difference of confidences, Guillory et al. 2021), how far its mean
embedding is from this mixture, how far images are from their nearest known ones, and how the
predicted classes differ. A linear model of these says by how much the accuracy differs.

What keeps the interval honest: the model is tried on kinds of windows that it was not fitted on
(one kind is left out at a time) and on other images. Its errors there grow with the distance, and
with how far the signs are from any that calibration has seen. The interval has this size, and the
chance of drawing few images. There is no answer where it would be wider than `WIDEST`, nor further
away than the shifted copies are.

What it cannot see: classes that look as before and mean something else.

Letters in names: N rows of validation, copies too; M of a window; C classes; D features; Q
directions; K known domains; W windows; S signs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from raypipe.config import require_format
from raypipe.errors import DataError
from raypipe.models.severity_windows import (
    DRAWN,
    SPLITS,
    WINDOW,
    Windows,
    balanced,
    draw,
    fitted,
    left_out,
    novelty,
    on_one_side,
    reach,
    scale,
)
from raypipe.models.signs import Known, Rows, distance, know, signs

WIDEST = 0.30
"""An interval wider than 30 points of accuracy, at 200 images, is no answer."""
BEYOND = 1.5
"""Known domains are answered that far beyond the farthest window of other images that was drawn,
and signs that are so much newer than any of a kind left out."""
FORMAT = 1
LEAST_ROWS = 30
LEAST_VALIDATION, LEAST_OF_DOMAIN = 100, 20


@dataclass(frozen=True)
class Calibration:
    """What `estimate` needs, as plain lists and numbers: `asdict` of it is JSON.

    kinds: the kinds of shift that it has seen. accuracy: of the validation images as they are.
    """

    domains: list[str]
    kinds: list[str]
    accuracy: float
    directions_DQ: list[list[float]]
    offset_Q: list[float]
    reference_NQ: list[list[float]]
    means_KQ: list[list[float]]
    scores_KC: list[list[float]]
    # Confidence, log distance to the nearest images, accuracy, 1 / images.
    facts_K4: list[list[float]]
    weights_S: list[float]
    # The signs of calibration's windows in units of their spread, and the number of their kind.
    spread_S: list[float]
    seen_WS: list[list[float]]
    kind_W: list[int]
    # Standard deviation of the model's error: of any window, by distance, by novelty of signs.
    error_3: list[float]
    quantile: float
    # Limits of distance and of novelty.
    farthest: float
    newest: float

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, and the format; `from_json` reads them."""
        return {"format": FORMAT} | asdict(self)

    @classmethod
    def from_json(cls, read: Any, where: str) -> Calibration:
        """What `to_json` gave. where: what it belongs to, for messages.

        DataError for anything else: a missing part, NaN, a number that is none, lengths that do not
        fit together, a newer format. A wrong limit would turn no answer into a wrong one.
        """
        if not isinstance(read, Mapping):
            raise _refused(where, "no object of JSON")
        require_format(read, FORMAT, f"The calibration of severity of {where}")
        names = {field.name for field in fields(cls)}
        if read.keys() - {"format"} != names:
            odd = sorted((read.keys() - {"format"}) ^ names)
            raise _refused(where, f"missing or unknown: {', '.join(map(str, odd[:3]))}")
        made = cls(**{name: read[name] for name in names})
        _check_calibration(made, where)
        return made


@dataclass(frozen=True)
class Estimate:
    """The accuracy of the champion on a window, 0 to 1, and an interval that holds it in about
    19 of 20 windows.

    abstains: why there is no answer, empty where there is one; the numbers are NaN then.
    nearest: the mixture of known domains that the window resembles most, as shares.
    known: the accuracy on validation images of this mixture. NaN where it was not computed.
    """

    accuracy: float
    low: float
    high: float
    abstains: str
    nearest: dict[str, float]
    known: float = np.nan


def calibrate(
    scores_NC: np.ndarray,
    labels_N: np.ndarray,
    features_ND: np.ndarray,
    domains_N: Sequence[str] | np.ndarray,
    seed: int,
    shifts_N: Sequence[str] | np.ndarray | None = None,
    images_N: Sequence[int] | np.ndarray | None = None,
) -> Calibration:
    """Learn from the champion's labelled validation rows what its scores say about accuracy.

    scores_NC: probabilities of classes; labels_N: their numbers; features_ND: embeddings.
    domains_N: the known domain of each row. shifts_N: empty for an image as it is, else the kind of
    shift of this copy; without copies, only windows of the known domains get an answer. images_N:
    the same number for all copies of one image.

    DataError with fewer than `LEAST_VALIDATION` images, for labels that are no class, and for
    numbers that are not finite.
    """
    domains_N = np.asarray(domains_N, dtype=str)
    rows = len(domains_N)
    shifts_N = np.full(rows, "") if shifts_N is None else np.asarray(shifts_N, dtype=str)
    images_N = np.arange(rows) if images_N is None else np.asarray(images_N)
    _check(scores_NC, features_ND, "validation")
    lengths = {len(a) for a in (scores_NC, labels_N, features_ND, domains_N, shifts_N, images_N)}
    if len(lengths) > 1:
        raise DataError("Arrays of validation differ in length", got=sorted(lengths))
    labels_N = np.asarray(labels_N)
    if not np.isin(labels_N, np.arange(scores_NC.shape[1])).all():
        raise DataError(
            "A label of validation is no class of the champion",
            got=labels_N.min() if labels_N.min() < 0 else labels_N.max(),
            rule=f"Labels are whole numbers from 0 to {scores_NC.shape[1] - 1}",
        )
    plain_N = shifts_N == ""
    names = [str(name) for name in np.unique(domains_N)]
    distinct = np.unique(images_N[plain_N])
    require_enough(domains_N[plain_N], images_N[plain_N])
    rng = np.random.default_rng(seed)
    given = (np.asarray(scores_NC), labels_N, np.asarray(features_ND, np.float64))
    kinds = [*DRAWN, *(str(kind) for kind in np.unique(shifts_N[~plain_N]))]

    def halves(half_N: np.ndarray, other_N: np.ndarray) -> tuple[Windows, Windows]:
        known, table = know(given, domains_N, plain_N & half_N, images_N)
        drawn = [
            draw(known, table, labels_N, domains_N, shifts_N, kinds, part_N, rng)
            for part_N in (half_N, other_N)
        ]
        return drawn[0], drawn[1]

    # What goes wrong with kinds and images that it was not fitted on.
    tried = []
    for _ in range(SPLITS):
        chosen = rng.permutation(distinct)[: len(distinct) // 2]
        half_N = np.isin(images_N, chosen)
        # Each half holds each domain, or there is nothing to compare with.
        half_N = balanced(half_N, domains_N, plain_N, images_N)
        alone = on_one_side(half_N, domains_N, plain_N)
        if alone:
            raise DataError(
                "Validation images cannot be halved so that each half has every domain",
                got=", ".join(alone[:3]),
                rule="Images of one group stay together, also where they are of several domains",
                fix="Name groups that lie in one domain each",
            )
        tried.append(left_out(*halves(half_N, ~half_N), len(kinds)))
    error_WS, residual_W, kind_W, few_W = (
        np.concatenate(parts) for parts in zip(*tried, strict=True)
    )
    accuracy = float((given[0].argmax(1) == labels_N)[plain_N].mean())
    # The chance in the other half's images stays in error_3. To subtract it too is right in theory,
    # and covered 84 % where this covers 97 % (benchmarks/results/2026-11-25-severity.md).
    error_3, quantile = scale(error_WS, residual_W, kind_W, _variance(accuracy, WINDOW, few_W))

    every = np.ones(rows, bool)
    known, table = know(given, domains_N, plain_N, images_N)
    windows = draw(known, table, labels_N, domains_N, shifts_N, kinds, every, rng)
    spread_S = windows.signs_WS.std(0) + 1e-9
    return Calibration(
        domains=names,
        kinds=kinds[len(DRAWN) :],
        accuracy=accuracy,
        directions_DQ=_plain(known.directions_DQ),
        offset_Q=_plain(known.offset_Q),
        reference_NQ=_plain(known.reference_NQ),
        means_KQ=_plain(known.means_KQ),
        scores_KC=_plain(known.scores_KC),
        facts_K4=_plain(known.facts_K4),
        weights_S=fitted(windows, np.ones(len(windows.kind_W), bool)).tolist(),
        spread_S=spread_S.tolist(),
        seen_WS=_plain(windows.signs_WS / spread_S),
        kind_W=windows.kind_W.tolist(),
        error_3=error_3.tolist(),
        quantile=quantile,
        farthest=max(reach(windows), BEYOND * float(error_WS[kind_W < len(DRAWN), 1].max())),
        newest=BEYOND * float(error_WS[:, 2].max()),
    )


def require_enough(domains_N: np.ndarray, images_N: np.ndarray) -> None:
    """Raise DataError for fewer validation images, or fewer of a domain, than `calibrate` needs."""
    names = [str(name) for name in np.unique(domains_N)]
    counts = {name: len(np.unique(images_N[domains_N == name])) for name in names}
    few = [name for name in names if counts[name] < LEAST_OF_DOMAIN]
    if few or len(np.unique(images_N)) < LEAST_VALIDATION:
        raise DataError(
            "Too few labelled validation images to calibrate on",
            got=counts,
            rule=f"{LEAST_VALIDATION} as they are, beside shifted copies, and {LEAST_OF_DOMAIN} of "
            "each domain",
            fix="Put small domains together",
        )


def estimate(calibration: Calibration, scores_MC: np.ndarray, features_MD: np.ndarray) -> Estimate:
    """The champion's accuracy on a window, from its scores and features alone.

    DataError for numbers that are not finite, and for other widths than those of calibration.
    """
    _check(scores_MC, features_MD, "the window")
    directions_DQ = np.asarray(calibration.directions_DQ)
    widths = (len(calibration.scores_KC[0]), len(directions_DQ))
    if (scores_MC.shape[1], features_MD.shape[1]) != widths:
        raise DataError(
            "The window was predicted by another model than calibration",
            got=(scores_MC.shape[1], features_MD.shape[1]),
            rule=f"Scores are {widths[0]} wide and features {widths[1]}",
        )
    rows = len(scores_MC)
    if rows < LEAST_ROWS:
        return _abstained(f"{rows} images are too few: at least {LEAST_ROWS}")
    known = Known(
        directions_DQ,
        *(
            np.asarray(part)
            for part in (
                calibration.offset_Q,
                calibration.reference_NQ,
                calibration.means_KQ,
                calibration.scores_KC,
                calibration.facts_K4,
            )
        ),
    )
    points_MQ = np.asarray(features_MD, np.float64) @ known.directions_DQ - known.offset_Q
    far_M = distance(points_MQ, known.reference_NQ)
    table = Rows(np.asarray(scores_MC), points_MQ, far_M, np.zeros(rows))
    signs_S, shares_K = signs(known, table)
    nearest = {
        name: round(float(share), 3)
        for name, share in zip(calibration.domains, shares_K, strict=True)
        if share >= 0.005
    }

    change = float(signs_S @ np.asarray(calibration.weights_S))
    at_home = float(shares_K @ known.facts_K4[:, 2])
    accuracy = float(np.clip(at_home + change, 0, 1))
    new = novelty(
        signs_S[None] / np.asarray(calibration.spread_S),
        np.asarray(calibration.seen_WS),
        np.asarray(calibration.kind_W),
    )[0]
    error = float(np.asarray(calibration.error_3) @ [1, signs_S[1], new])

    def half_width(images: int) -> float:
        drawn = float(_variance(accuracy, images, shares_K**2 @ known.facts_K4[:, 3]))
        return calibration.quantile * float(np.sqrt(drawn + error**2))

    # Written so that NaN, of features too large for squares, gets no answer.
    if not signs_S[1] <= calibration.farthest:
        away = f"{signs_S[1]:.1f}" if signs_S[1] < 1e6 else f"{signs_S[1]:.1e}"
        far = f"distance {away}, calibrated up to {calibration.farthest:.1f}"
        return _abstained(f"the images are too unlike those the model knows ({far})", nearest)
    if not new <= calibration.newest:
        return _abstained("the images differ in a way that was not calibrated", nearest)
    widest = 2 * half_width(WINDOW)
    if not widest <= WIDEST:
        text = f"the interval would be {100 * widest:.0f} points wide: {100 * WIDEST:.0f} are most"
        return _abstained(text, nearest)
    half = half_width(rows)
    low, high = max(0.0, accuracy - half), min(1.0, accuracy + half)
    return Estimate(accuracy, low, high, "", nearest, at_home)


def _variance(accuracy: float, window: int, few_W: np.ndarray) -> np.ndarray:
    """Of the accuracy on a window of images minus that on validation, by the chance of drawing.
    few_W: 1 / images of validation.

    With two right and two wrong images added (Agresti and Coull 1998): without them, an accuracy
    of 1 would have no width.
    """
    share = (accuracy * window + 2) / (window + 4)
    return share * (1 - share) * (1 / window + few_W)


def _abstained(why: str, nearest: dict[str, float] | None = None) -> Estimate:
    return Estimate(np.nan, np.nan, np.nan, why, nearest or {})


def _check_calibration(made: Calibration, where: str) -> None:
    domains, kinds = made.domains, made.kinds
    for names in (domains, kinds):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _refused(where, "names that are no text")
    if not domains:
        raise _refused(where, "no domain")

    given = {f.name: getattr(made, f.name) for f in fields(made)}
    del given["domains"], given["kinds"]
    arrays = {}
    for name, value in given.items():
        try:
            array = np.array(value)
        except ValueError:  # lists of several lengths
            raise _refused(where, f"{name} is no table") from None
        # Truth values, text and null are no numbers.
        if array.dtype.kind not in "iuf":
            raise _refused(where, f"{name} holds no numbers")
        if not np.isfinite(array.astype(np.float64)).all():
            raise _refused(where, f"{name} is not finite")
        arrays[name] = array

    length = {"K": len(domains), "S": 4, "3": 3, "4": 4}
    for name, array in arrays.items():
        letters = name.rpartition("_")[2] if name[-1].isupper() or name[-1].isdigit() else ""
        if array.ndim != len(letters) or 0 in array.shape:
            raise _refused(where, f"{name} has the shape {array.shape}")
        for letter, size in zip(letters, array.shape, strict=True):
            if length.setdefault(letter, size) != size:
                raise _refused(where, f"{name} has the shape {array.shape}")
    if length["C"] < 2 or length["N"] < LEAST_VALIDATION:
        raise _refused(where, f"{length['C']} classes and {length['N']} images")

    shares = np.concatenate([[made.accuracy], arrays["facts_K4"][:, 2], arrays["facts_K4"][:, 3]])
    if ((shares < 0) | (shares > 1)).any():
        raise _refused(where, "an accuracy that is not from 0 to 1")
    is_small = [made.quantile < 1.96, made.farthest < 0, made.newest < 0]
    is_small += [bool((arrays["spread_S"] <= 0).any()), bool((arrays["error_3"] < 0).any())]
    if any(is_small):
        raise _refused(where, "an error or a limit below what calibration gives")


def _refused(where: str, got: str) -> DataError:
    return DataError(
        f"The calibration of severity of {where} cannot be used",
        got=got,
        rule="It is what raypipe wrote when the model was registered",
        fix="Restore the package, or train and register again with another run.seed",
    )


def _check(scores_NC: np.ndarray, features_ND: np.ndarray, whose: str) -> None:
    for what, array in (("scores", scores_NC), ("features", features_ND)):
        if array.ndim != 2 or 0 in array.shape:
            raise DataError(f"The {what} of {whose} are no table of numbers", got=array.shape)
        if not np.isfinite(array).all():
            raise DataError(f"The {what} of {whose} hold numbers that are not finite")
    if len(scores_NC) != len(features_ND):
        raise DataError(
            f"Scores and features of {whose} differ in length",
            got=(len(scores_NC), len(features_ND)),
        )
    sums_N = scores_NC.sum(1)
    if scores_NC.shape[1] < 2 or (scores_NC < 0).any() or (np.abs(sums_N - 1) > 1e-2).any():
        raise DataError(
            f"The scores of {whose} are no probabilities of classes",
            rule="At least two columns, from 0 to 1, that sum up to 1: model.task=single_label",
        )


def _plain(array: np.ndarray) -> list[Any]:
    """Nested lists; six digits are enough for distances."""
    return [float(f"{x:.6g}") if np.ndim(x) == 0 else _plain(x) for x in array]
