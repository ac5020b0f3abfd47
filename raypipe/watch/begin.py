"""What a challenger begins with: the champion's weights, and old rows beside the new ones.

Old rows are those that the champion's weights have learned from; the package says which
(train/learned.py). All of them are trained on again (`watch.replay=all`), or a share of them that
is the same for every label, so that new rows are not drowned and old ones are not forgotten.

Weights and rows lie in the run's folder under names that are hashes of their content. So a rerun
finds them again, and another host's training has the same key.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.config import replace, validate
from raypipe.errors import ConfigError, DataError, RaypipeError, Unreachable
from raypipe.feed.dataset import Pinned, left_out, pin
from raypipe.files import write_atomic
from raypipe.registry.package import MANIFEST, Package
from raypipe.registry.versions import ModelVersion
from raypipe.search.settings import SearchConfig
from raypipe.tables import label_column, scan
from raypipe.train import learned, start
from raypipe.train.job import TrainJob
from raypipe.train.origin import Start
from raypipe.watch.settings import WatchConfig

log = logging.getLogger("raypipe")
REMEMBERS = "they have learned from validation images, which would choose between trials"
SHAPE = {"model.name", "model.mode", "model.options", "model.task", "train.start_from"}


def begin(
    job: TrainJob,
    watch: WatchConfig,
    champion: ModelVersion,
    package: Package,
    pinned: Pinned,
    say: Callable[[str], None],
) -> tuple[TrainJob, Start]:
    """The job, from the champion's weights and on the rows that watch.replay asks for; and what its
    package is to say of both.

    Raises DataError as tables do.
    """
    known_N2 = seen_by(package, pinned)
    weights, inherited_N2, version = "", learned.NONE_N2, None
    cold = _why_cold(job, watch, package, known_N2, pinned)
    if cold:
        say(f"Starting from {_fresh(job)}, not from the champion's weights: {cold}")
    else:
        folder = _placed(package, job.run.path / "champions")
        job = replace(job, {"train.start_from": str(folder)})
        weights, version = f"those of {champion}", champion
        inherited_N2 = learned.NONE_N2 if known_N2 is None else known_N2
        say(f"Starting from the weights of champion {champion}")
    replay: dict[str, Any] = {}
    # Nobody asked for this cold start: without the old rows it would know the new ones alone.
    if watch.replay != "all" and cold != REMEMBERS:
        job, replay = _replayed(job, float(watch.replay), known_N2, pinned, say)
    return job, Start(weights, version, inherited_N2, replay)


def seen_by(package: Package, pinned: Pinned) -> np.ndarray | None:
    """identities_N2 of the rows that the package's weights have learned from; None: nobody knows.

    An older package does not say. Its version of this table may, if it can still be read.
    """
    kept = learned.by(package)
    if kept is not None:
        return kept
    table = package.info["table"]
    made = package.info.get("made", {}).get("table_id") or pinned.version.table_id
    if (table["uri"], made) != (pinned.version.uri, pinned.version.table_id):
        return None
    try:
        theirs = validate(TrainJob, package.info["config"])
        named = theirs.table.model_copy(
            update={
                "uri": pinned.table.uri,
                "version": table["version"],
                "storage_options": pinned.table.storage_options,
            }
        )
        before = pin(named, theirs.feed, kind=theirs.model.task)
        where = before.rows_of(theirs.feed.train)
        return learned.united(learned.rows_of(before, before.version, where)[1])
    except Unreachable:
        raise
    except (DataError, ConfigError, KeyError) as e:
        log.warning("Nobody can tell which rows the champion has learned from: %s", e)
        return None


def _why_cold(
    job: TrainJob,
    watch: WatchConfig,
    package: Package,
    known_N2: np.ndarray | None,
    pinned: Pinned,
) -> str:
    """Why the challenger cannot start from the champion's weights; "" if it can."""
    if watch.retrain_from == "pretrained":
        return "watch.retrain_from=pretrained"
    if watch.retrain_from == "auto" and job.model.mode == "frozen":
        # Its loss has one minimum: the start only says how near to it a short training comes.
        return "a head on frozen features starts anew with watch.retrain_from=auto"
    if job.train.solver != "steps":
        return f"train.solver={job.train.solver} starts anew"
    drawn = sorted(SHAPE & set(watch.retrain_space or {}))
    if drawn and watch.retrain_samples > 1:
        return f"watch.retrain_space draws {drawn[0]}"
    if known_N2 is None:
        # Test rows that its weights know could not be told from others.
        return "nobody can tell which rows they have learned from"
    if watch.retrain_from == "auto" and learned.decides(pinned, job.feed.val, known_N2):
        # As after a refit. Epochs and trials would be chosen by what is remembered.
        return REMEMBERS
    try:
        start.require_same(package, job.model, Path(str(package.folder or package.seal)))
    except ConfigError as e:
        return e.rule
    return ""


def _fresh(job: TrainJob) -> str:
    return "pretrained weights" if job.model.pretrained else "random weights"


def _is_whole(folder: Path, seal: str) -> bool:
    try:
        Package(folder, seal)
    except (RaypipeError, OSError):
        return False
    return True


def _placed(package: Package, place: Path) -> Path:
    """The package's files in a folder that is named by its seal. The manifest comes last.

    What an earlier retrain has left there is checked: one bad byte would stop all that follow.
    """
    folder = place / package.seal
    if not _is_whole(folder, package.seal):
        for name, data in package.files.items():
            if name != MANIFEST:
                write_atomic(folder / name, bytes(data))
        write_atomic(folder / MANIFEST, bytes(package.files[MANIFEST]))
    return folder


def _replayed(
    job: TrainJob,
    per_new: float,
    known_N2: np.ndarray | None,
    pinned: Pinned,
    say: Callable[[str], None],
) -> tuple[TrainJob, dict[str, Any]]:
    """The job without the old rows that are not replayed, and the numbers for its package."""
    if known_N2 is None:
        say("All rows are trained on: nobody can tell which ones are new")
        return job, {}
    where = pinned.rows_of(job.feed.train)
    # What the job leaves out stays out.
    given = left_out(job.feed)
    ids, rows_N2 = learned.rows_of(pinned, pinned.version, where, given)
    # By image: in another table, or under another id, it is no new one.
    is_old_N = learned.is_old(rows_N2, known_N2)
    labels = _labels(pinned, where, given)
    is_kept_N = chosen(ids, labels, is_old_N, per_new, job.run.seed)
    # Rows of one id are left out together, and so with a new one none.
    news = {i for i, was in zip(ids, is_old_N.tolist(), strict=True) if not was}
    leave = {i for i, kept in zip(ids, is_kept_N.tolist(), strict=True) if not kept} - news
    out: list[str | None] = [*sorted(i for i in leave | given if i is not None)]
    out += [None] if None in leave | given else []
    new, old = int((~is_old_N).sum()), int(is_old_N.sum())
    replayed = sum(was and i not in leave for i, was in zip(ids, is_old_N.tolist(), strict=True))
    facts = {
        "per_new": per_new,
        "seed": job.run.seed,
        "new": new,
        "old": old,
        "replayed": replayed,
    }
    unclear = int(learned.is_unclear(rows_N2, known_N2).sum())
    also = f" ({unclear} of them have an id that the champion knows, and other bytes)"
    begins = f"Training on {new} new rows{also if unclear else ''}"
    if not leave:
        say(f"{begins} and all {old} old ones")
        return job, facts
    text = json.dumps(out).encode()
    digest = hashlib.sha256(text).hexdigest()
    file = job.run.path / "replay" / f"{digest}.json"
    write_atomic(file, text)
    say(f"{begins} and {replayed} of {old} old ones")
    return replace(job, {"feed.leave_out": str(file)}), facts | {"left_out_sha256": digest}


def _labels(
    pinned: Pinned, where: scan.Where, without: frozenset[str | None] = frozenset()
) -> list[str]:
    """Of the rows of learned.rows_of, in their order; "" for all of a task without classes."""
    name, kind, key = pinned.table.columns.label, pinned.task.kind, pinned.table.columns.id
    found: list[str] = []
    wanted = list(dict.fromkeys([key, name]))
    for part in scan.each(pinned.table, pinned.version, wanted, where):
        labels = label_column.read(part[name], kind, name).to_pylist()
        ids = part[key].cast(pa.string()).to_pylist()
        for label, one in zip(labels, ids, strict=True):
            if label is not None and one not in without:
                found.append(str(label))
    return found if kind in ("single_label", "multi_label") else [""] * len(found)


def chosen(
    ids: Sequence[str | None],
    labels: Sequence[str],
    is_old_N: np.ndarray,
    per_new: float,
    seed: int,
) -> np.ndarray:
    """bool (N,): the rows to train on: all new ones, and `per_new` old ones for each of them.

    Every label gets equally many old rows; what one lacks, the others get. Which ones depends on
    the seed and their ids alone, not on how the table is stored. Without new rows it is all rows,
    and so it is where there are fewer old rows than asked for. A row without an id is always kept.
    """
    is_old_N = is_old_N.astype(bool)
    new, old = int((~is_old_N).sum()), int(is_old_N.sum())
    wanted = round(per_new * new)
    if not new or wanted >= old:
        return np.ones(len(is_old_N), bool)
    by_label: dict[str, list[int]] = defaultdict(list)
    for row in np.flatnonzero(is_old_N).tolist():
        by_label[labels[row]].append(row)
    quotas = shares({label: len(rows) for label, rows in by_label.items()}, wanted)
    is_kept_N = ~is_old_N
    for label, rows in by_label.items():
        rows.sort(key=lambda row: (_draw(seed, ids[row]), row))
        is_kept_N[rows[: quotas[label]]] = True
    is_kept_N[[row for row, i in enumerate(ids) if i is None]] = True
    return is_kept_N


def shares(sizes: dict[str, int], wanted: int) -> dict[str, int]:
    """`wanted` split equally; a name gets at most its size, and the others what it lacks."""
    left, given = wanted, dict.fromkeys(sizes, 0)
    # From the smallest on: what it lacks is the others'. Ties in the order of names.
    order: Collection[str] = sorted(sizes, key=lambda name: (sizes[name], name))
    for place, name in enumerate(order):
        given[name] = min(sizes[name], -(-left // (len(sizes) - place)))
        left -= given[name]
    return given


def _draw(seed: int, name: str | None) -> bytes:
    return hashlib.blake2b(repr((seed, name)).encode(), digest_size=16).digest()


def within_budget(search: SearchConfig, left_h: float | None) -> SearchConfig:
    """The search, which ends after so many device hours; None: as it is."""
    if left_h is None:
        return search
    own = search.stopping.gpu_hours
    limit = left_h if own is None else min(own, left_h)
    stopping = search.stopping.model_copy(update={"gpu_hours": limit})
    return search.model_copy(update={"stopping": stopping})
