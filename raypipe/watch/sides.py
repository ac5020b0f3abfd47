"""The two sides of a drift check, the reference and the batch, as the tests see them.

`check` refuses sides that cannot be compared. `pairs` samples and projects both in the same way, or
says why something is missing: a test that looks at it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypipe.errors import DataError
from raypipe.images.measure import SEEN
from raypipe.watch import groups, projection
from raypipe.watch.detectors.detector import Night, Pair
from raypipe.watch.domains import Rows
from raypipe.watch.settings import LEAST_ROWS


@dataclass(frozen=True)
class Seen:
    """What else is known of the images of one side, row by row; None: not known.

    labels_N: predicted classes. looks_NK: the columns of `measure.SEEN`; NaN where an image was not
    looked at. domains: of reference images, as by_domain.names gives them. groups: images of one
    name belong together. arrived_N: of a batch, when each image came, in any unit; NaN: unknown.
    """

    labels_N: Sequence[str] | None = None
    looks_NK: np.ndarray | None = None
    domains: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    arrived_N: Sequence[float] | None = None


NOTHING = Seen()


@dataclass(frozen=True)
class Side:
    """The images of the reference or of the batch. Row i of each array is image i."""

    embedding_ND: np.ndarray
    scores_NC: np.ndarray
    seen: Seen


def check(reference: Side, batch: Side) -> None:
    """Raise DataError for sides that cannot be compared."""
    for side, one in (("ref", reference), ("batch", batch)):
        _check_array(f"{side}_embedding", one.embedding_ND)
        _check_array(f"{side}_scores", one.scores_NC)
    for what, ours, theirs in (
        ("embedding", reference.embedding_ND, batch.embedding_ND),
        ("scores", reference.scores_NC, batch.scores_NC),
    ):
        if ours.shape[1] != theirs.shape[1]:
            fix = (
                "Compute both with the same model version: the reference is kept in the "
                "champion's package"
            )
            raise DataError(
                f"The batch's {what} is {theirs.shape[1]} wide and the reference's {ours.shape[1]}",
                fix=fix,
            )
    for side, one in (("ref", reference), ("batch", batch)):
        others = (
            ("scores", one.scores_NC),
            ("labels", one.seen.labels_N),
            ("looks", one.seen.looks_NK),
            ("domains", one.seen.domains),
            ("groups", one.seen.groups),
            ("arrived", one.seen.arrived_N),
        )
        for what, rows in others:
            if rows is not None and len(rows) != len(one.embedding_ND):
                raise DataError(
                    f"{side}_embedding has {len(one.embedding_ND)} rows and {side}_{what} "
                    f"{len(rows)}",
                    rule="Row i of both is image i",
                )
        if one.seen.looks_NK is not None and one.seen.looks_NK.shape[1:] != (len(SEEN),):
            raise DataError(
                f"{side}_looks has the shape {one.seen.looks_NK.shape}",
                rule=f"Its columns are {', '.join(SEEN)}",
            )


def _check_array(name: str, array: np.ndarray) -> None:
    side = "reference" if name.startswith("ref") else "batch"
    if array.ndim != 2 or array.shape[1] == 0:
        raise DataError(
            f"{name} is not a table of numbers",
            got=array.shape,
            rule="It has the shape (images, width)",
        )
    if len(array) < LEAST_ROWS:
        fix = f"Wait until the {side} has {LEAST_ROWS} images, or check several batches together"
        raise DataError(
            f"The {side} has too few images for a drift test",
            got=len(array),
            rule=f"At least {LEAST_ROWS}",
            fix=fix,
        )
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array).all(axis=1)).sum())
        fix = (
            "Look at these images: raypipe clean marks broken ones; or the model overflows in "
            "half precision"
        )
        raise DataError(
            f"{name} holds numbers that are not finite in {bad} of {len(array)} rows", fix=fix
        )


def pairs(
    reference: Side, batch: Side, max_rows: int, seed: int, with_arrival: bool
) -> tuple[dict[str, Pair], dict[str, str]]:
    """(both sides of what tests look at, why the others are missing), by the name of what it is.

    max_rows: images of each side whose embeddings are compared. with_arrival: does a test look at
    the order in which the images came?
    """
    rng = np.random.default_rng(seed)
    # float32 first, as a package and a table of predictions keep them.
    rows = [side.embedding_ND.astype(np.float32) for side in (reference, batch)]
    units = None
    if reference.seen.groups is None or batch.seen.groups is None:
        sides = [projection.subsample(one, max_rows, rng) for one in rows]
    else:
        of = [groups.codes(reference.seen.groups), groups.codes(batch.seen.groups)]
        size = min(groups.median_size(one) for one in of)
        kept = [groups.at_most(one, size, rng) for one in of]
        kept = [
            one[groups.whole(of_side[one], max_rows, rng)]
            for one, of_side in zip(kept, of, strict=True)
        ]
        units = groups.Units.of(*(o[one] for o, one in zip(of, kept, strict=True)))
        sides = [side[one].astype(np.float64) for side, one in zip(rows, kept, strict=True)]
    ours, theirs = (
        projection.columns(side.scores_NC.astype(np.float32)) for side in (reference, batch)
    )
    embedding = Pair(*projection.project(*sides), units=units)
    found = {"embedding": embedding, "scores": Pair(ours, theirs)}
    missing = {}
    why_none = "nobody asks for it"
    for on, pair in (
        ("classes", _classes(reference, batch)),
        ("looks", _looks(reference, batch)),
        ("arrival", _arrival(reference, batch, max_rows, seed) if with_arrival else why_none),
    ):
        if isinstance(pair, str):
            missing[on] = pair
        else:
            found[on] = pair
    return found, missing


def _classes(reference: Side, batch: Side) -> Pair | str:
    """The number of each image's predicted class; or why not."""
    ours, theirs = reference.seen.labels_N, batch.seen.labels_N
    if ours is None or theirs is None:
        return "the model predicts no classes"
    # Not an array of text: one long name would make all of them as long.
    names = tuple(sorted({*ours, *theirs}))
    number = {name: place for place, name in enumerate(names)}
    ours_N1 = np.array([[number[name]] for name in ours], np.int64)
    theirs_M1 = np.array([[number[name]] for name in theirs], np.int64)
    return Pair(ours_N1, theirs_M1, names)


def _looks(reference: Side, batch: Side) -> Pair | str:
    """What images look like: the columns that vary, of images that were looked at; or why not."""
    both = []
    for name, side in (("champion's package", reference), ("batch", batch)):
        if side.seen.looks_NK is None:
            return f"the {name} does not say what its images look like; an older raypipe wrote it"
        seen_NK = np.asarray(side.seen.looks_NK, np.float64)
        seen_NK = seen_NK[np.isfinite(seen_NK).all(axis=1)]
        if len(seen_NK) < LEAST_ROWS:
            return f"only {len(seen_NK)} images of the {name} were looked at"
        both.append(seen_NK)
    pooled_LK = np.concatenate(both)
    varies = np.flatnonzero(np.ptp(pooled_LK, axis=0) > 0)
    if not len(varies):
        return "all images look the same"
    names = tuple(SEEN[k] for k in varies)
    return Pair(both[0][:, varies], both[1][:, varies], names)


def _arrival(reference: Side, batch: Side, max_rows: int, seed: int) -> Pair | str:
    """The batch in the order in which its images came; or why not."""
    if batch.seen.arrived_N is None:
        return "nothing says in which order the images came: name their column in watch.arrived"
    if reference.seen.groups is not None and batch.seen.groups is not None:
        return "images come in groups (watch.group), and neighbours of one group are alike"
    arrived_M = np.asarray(batch.seen.arrived_N, np.float64)
    order_M = np.argsort(arrived_M, kind="stable")
    order_M = order_M[np.isfinite(arrived_M[order_M])]
    if len(order_M) < LEAST_ROWS:
        return f"only {len(order_M)} images of the batch say when they came"
    rng = np.random.default_rng(seed)
    most = min(max_rows, projection.MOST_ONLINE)
    ours_ND = projection.subsample(reference.embedding_ND.astype(np.float32), most, rng)
    places_M = projection.drawn(len(order_M), most, rng)
    theirs_MD = batch.embedding_ND[order_M[places_M]].astype(np.float32).astype(np.float64)
    night = Night(places_M, len(order_M))
    return Pair(*projection.project(ours_ND, theirs_MD), night=night)


def rows_of(side: Side) -> Rows:
    """The side as the detector mixture takes it."""
    return Rows(side.embedding_ND, side.scores_NC, side.seen.domains, side.seen.groups)
