"""The loop: check -> decide -> train a challenger -> compare -> promote. Rerunnable at every point.

Each step leaves something with a key (drift row, training result, registered version, decision row)
and looks for it first. The decision is written before it is carried out, and carrying it out twice
does nothing: a run that is killed anywhere and started again ends in the same state, with no second
model version.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.config import key_of, to_json, validate
from raypipe.feed.dataset import Pinned, pin
from raypipe.registry import promote, tracking
from raypipe.registry.package import Package
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.search import refit, tuner
from raypipe.serve import evaluate
from raypipe.tables import label_column, scan
from raypipe.tables.commits import rows_once
from raypipe.train import trainer
from raypipe.train.job import TrainJob
from raypipe.train.publish import publish
from raypipe.watch import around, decide
from raypipe.watch.check import CheckResult, WatchJob, now
from raypipe.watch.comparison import Comparison, compare
from raypipe.watch.decide import Decision

log = logging.getLogger("raypipe")
_ROW = pa.schema(
    [
        (n, pa.string())
        for n in ("key", "champion", "challenger", "table", "slices", "reason", "decided_at")
    ]
    + [("promoted", pa.bool_()), ("format", pa.int32())]
)
# Of a row; a key of format 1 named fewer things, so its rows are not looked at and the comparison
# is made again.
FORMAT = 2


@dataclass(frozen=True)
class RetrainResult:
    """What was decided and why. Without a challenger, `challenger` and `slices` are empty."""

    champion: ModelVersion
    challenger: ModelVersion | None
    decision: Decision
    slices: tuple[Comparison, ...]
    union: Comparison | None = None  # all rows of all slices


def retrain(
    store: Store,
    job: WatchJob,
    checked: CheckResult | None,
    champion: ModelVersion | None = None,
    say: Callable[[str], None] = log.info,
    pinned: Pinned | None = None,
) -> RetrainResult:
    """Retrain `champion` (default: the current one) on the job's table when drift and labels call
    for it; gate the result. `pinned`: the job's rows, if they are pinned already.
    """
    champion = champion or promote.require_champion(store)
    package = promote.fetch(store, champion)
    pinned = pinned or pin(job.table, job.feed, kind=job.model.task)
    labelled = _labelled_by_source(job, pinned)
    wanted = decide.retrain(
        bool(checked and checked.report.is_drift),
        labelled,
        package.info["table"]["sources"],
        job.watch.force,
    )
    say(wanted.reason)
    if not wanted.act:
        return RetrainResult(champion, None, wanted, ())
    theirs = validate(TrainJob, package.info["config"])
    first = around.challenger(job, theirs, pinned.version.version, labelled)
    challenger = (
        _search(store, job, first, pinned, say)
        if job.watch.retrain_samples > 1
        else _train(store, first, pinned, say)
    )
    # Fields of a slice are part of the key: a row that lacks one of them could not be read.
    parts = (champion, challenger, pinned.version)
    said = (
        job.gate,
        job.table.where,
        job.table.sample_key,
        job.table.columns,
        job.feed.test,
        sorted(Comparison.__annotations__),
    )
    named = (str(champion), str(challenger), pinned.version.identity)
    key = key_of("decision", FORMAT, *named, champion.seal, challenger.seal, *said)

    def made() -> pa.Table:
        say(f"Comparing champion {champion} and challenger {challenger} on the same test rows")
        rows = _judge(store, job, challenger, package, pinned)
        _keep(rows, job.run.path / "reports" / f"judged-{key}.parquet")
        slices, union = _compare(rows, package)
        return _as_rows(key, parts, slices, union, decide.gate(slices, union, job.gate))

    stored = rows_once(
        str(job.run.path / "decisions"), _ROW, {"key": key}, made, f"gate {challenger}"
    ).to_pylist()[0]
    slices, union, decision = _decided(stored)
    _carry_out(store, champion, challenger, decision, slices, key)
    say(decision.reason)
    return RetrainResult(champion, challenger, decision, slices, union)


def _train(store: Store, job: TrainJob, opened: Pinned, say: Callable[[str], None]) -> ModelVersion:
    """The champion's settings and no others, on the new rows."""
    say(f"Training a challenger on {_table(job)} with {_workers(job)}")
    planned = trainer.plan(job, _pin(job, opened))
    result = trainer.run(planned, lambda m, s: say(f"epoch {s.epoch}: " + decide.headline(m)))
    return publish(store, planned, result, "challenger")


def _pin(job: TrainJob, opened: Pinned) -> Pinned:
    """The challenger's rows, of the version that is open: its splits may be named otherwise."""
    return pin(job.table, job.feed, kind=job.model.task, opened=opened)


def _search(
    store: Store, job: WatchJob, first: TrainJob, opened: Pinned, say: Callable[[str], None]
) -> ModelVersion:
    """The best of some trials around the champion's settings. Killed, it goes on where it was;
    finished, it is read again.
    """
    wanted = around.searched(job, first)
    say(
        f"Searching for a challenger on {_table(first)}: {wanted.search.samples} trials around "
        "the champion's settings"
    )
    if first.feed.sampling == "sources":
        say(
            "Sources are drawn "
            + ("equally often" if first.feed.mix is None else f"by {first.feed.mix}")
        )
    found = tuner.search(wanted, pinned=_pin(wanted, opened))
    best = found.trials[0]
    drawn = ", ".join(
        f"{n} {v:.3g}" if isinstance(v, float) else f"{n} {v}"
        for n, v in sorted(best.changes.items())
    )
    say(f"Best on validation: {best.name}, {found.metric} {best.metric:.4g} ({drawn})")
    if wanted.search.refit is not None:
        again = refit.job_of(wanted, found)
        say(f"Training {best.name} once more, on {again.feed.train}, with {_workers(again)}")
        found = refit.refit(again, found, lambda metrics, state: None, lambda position: None)
    children = [(t.name, t.changes, t.history) for t in found.trials]
    return publish(store, found.plan, found.best, "challenger", children)


def _table(job: TrainJob) -> str:
    return f"{job.table.uri}@v{job.table.version}"


def _workers(job: TrainJob) -> str:
    return f"{job.train.most_workers} worker{'s' * (job.train.most_workers > 1)}"


def _labelled_by_source(job: WatchJob, pinned: Pinned) -> dict[str, int]:
    """Labelled training rows of each source; a table without sources is one."""
    c = pinned.table.columns
    named = c.source in {f.name for f in pinned.table.at(pinned.version).schema().fields}
    columns = [c.label, *([c.source] if named else [])]
    rows = scan.rows(pinned.table, pinned.version, columns, pinned.rows_of(job.feed.train))
    labels = label_column.read(rows[c.label], pinned.task.kind, c.label)
    labelled = rows.filter(labels.is_valid())
    sources = labelled[c.source].to_pylist() if named else ["all"] * len(labelled)
    return dict(Counter(map(str, sources)))


def _judge(
    store: Store, job: WatchJob, challenger: ModelVersion, package: Package, pinned: Pinned
) -> pa.Table:
    """Which of the labelled test rows champion (model_0) and challenger (model_1) have right."""
    both = [package, promote.fetch(store, challenger)]
    return evaluate.judge(both, pinned.table, pinned.version, pinned.rows_of(job.feed.test))


def _keep(judged: pa.Table, file: Path) -> None:
    """Beside the report, for whoever asks on which images the two differ."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    pq.write_table(judged, partial)
    partial.replace(file)


def _compare(
    judged: pa.Table, package: Package
) -> tuple[tuple[Comparison, ...], Comparison | None]:
    known, unit = package.info["table"]["sources"], _unit(package)
    if not len(judged):
        return (), None

    def compared(name: str, rows: pa.Table, is_new: bool) -> Comparison:
        theirs, ours = (rows[f"model_{n}"].to_pylist() for n in range(2))
        return compare(name, theirs, ours, is_new, unit)

    slices = []
    for name in sorted(set(judged["group"].to_pylist())):
        slices.append(
            compared(name, judged.filter(pc.equal(judged["group"], name)), name not in known)
        )
    return tuple(slices), compared("all", judged, is_new=False)


def _unit(package: Package) -> float | None:
    """What absolute errors are counted in: for numbers the deviation of the champion's training
    labels. Hits have none.
    """
    if package.task.kind == "regression":
        return float(package.model.head.spread)
    return 1.0 if package.task.kind == "probability" else None


def _carry_out(
    store: Store,
    champion: ModelVersion,
    challenger: ModelVersion,
    decision: Decision,
    slices: tuple[Comparison, ...],
    key: str,
) -> None:
    def log_into(run_id: str) -> None:
        for s in slices:
            values = {"champion": s.champion, "challenger": s.challenger, "p_value": s.p_value}
            tracking.log_metrics(
                store, run_id, {f"gate.{s.slice}.{name}": v for name, v in values.items()}
            )
        tracking.log_text(store, run_id, decision.reason, "decision.txt")

    params = {"champion": str(champion), "challenger": str(challenger)}
    tracking.once(store, key, f"gate {challenger}", params, None, log_into)
    if decision.act:
        promote.promote(store, challenger, expected=champion.version)


def _as_rows(
    key: str,
    parts: tuple[Any, Any, Any],
    slices: tuple[Comparison, ...],
    union: Comparison | None,
    decision: Decision,
) -> pa.Table:
    champion, challenger, table = map(str, parts)
    row = {
        "key": key,
        "champion": champion,
        "challenger": challenger,
        "table": table,
        "promoted": decision.act,
    }
    judged = {"slices": [asdict(s) for s in slices], "union": asdict(union) if union else None}
    row |= {
        "reason": decision.reason,
        "slices": to_json(judged),
        "decided_at": now().isoformat(),
        "format": FORMAT,
    }
    return pa.Table.from_pylist([row], _ROW)


def _decided(row: dict[str, Any]) -> tuple[tuple[Comparison, ...], Comparison | None, Decision]:
    judged = json.loads(row["slices"])
    union = Comparison(**judged["union"]) if judged["union"] else None
    return (
        tuple(Comparison(**s) for s in judged["slices"]),
        union,
        Decision(row["promoted"], row["reason"]),
    )
