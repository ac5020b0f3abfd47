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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.cluster import usage
from raypipe.config import key_of, to_json, validate
from raypipe.feed.dataset import Pinned, pin
from raypipe.files import write_atomic
from raypipe.registry import promote, tracking
from raypipe.registry.package import Package
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.report.formats import cell
from raypipe.search import refit, tuner
from raypipe.search.settings import SearchConfig
from raypipe.serve import evaluate
from raypipe.tables import label_column, scan
from raypipe.tables.commits import rows_once
from raypipe.train import trainer
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.measure.utilisation import Utilisation, utilisation
from raypipe.train.origin import CalledFor
from raypipe.train.publish import publish
from raypipe.watch import around, decide
from raypipe.watch.check import CheckResult, now
from raypipe.watch.comparison import Comparison, compare
from raypipe.watch.decide import Decision, GateConfig
from raypipe.watch.settings import WatchConfig

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
class RetrainConfigs:
    """The sections of a retrain, beside those of its training."""

    search: SearchConfig
    watch: WatchConfig
    gate: GateConfig


@dataclass(frozen=True)
class RetrainResult:
    """What was decided and why. Without a challenger, `challenger` and `slices` are empty."""

    champion: ModelVersion
    challenger: ModelVersion | None
    decision: Decision
    slices: tuple[Comparison, ...]
    union: Comparison | None = None  # all rows of all slices
    key: str | None = None  # of the challenger's training
    device_s: float = 0.0  # that the challenger's trainings held devices


def retrain(
    store: Store,
    job: TrainJob,
    cfg: RetrainConfigs,
    checked: CheckResult | None,
    champion: ModelVersion | None = None,
    say: Callable[[str], None] = log.info,
    pinned: Pinned | None = None,
) -> RetrainResult:
    """Train a challenger if drift and labels call for it, compare it, and promote it if better.

    champion: the current one by default. pinned: the job's rows, if they are pinned already.
    """
    champion = champion or promote.require_champion(store)
    package = promote.fetch(store, champion)
    pinned = pinned or pin(job.table, job.feed, kind=job.model.task)
    # First the decision to train at all. It needs no model, so it comes before anything costly.
    labelled = labelled_by_source(job, pinned)
    wanted = decide.retrain(
        bool(checked and checked.report.is_drift),
        labelled,
        package.info["table"]["sources"],
        cfg.watch.force,
    )
    say(wanted.reason)
    if not wanted.act:
        return RetrainResult(champion, None, wanted, ())
    # The package says how the champion was trained: a challenger starts from those settings.
    theirs = validate(TrainJob, package.info["config"])
    first = around.challenger(
        job, cfg.watch, cfg.search.refit, theirs, pinned.version.version, labelled
    )
    why = CalledFor("retrain", wanted.reason, champion, _evidence(checked))
    if cfg.watch.retrain_samples > 1:
        challenger, trained, device_s = _search(store, cfg, first, pinned, say, why)
    else:
        challenger, trained, device_s = _train(store, first, pinned, say, why)
    # Fields of a slice are part of the key: a row that lacks one of them could not be read.
    parts = (champion, challenger, pinned.version)
    said = (
        cfg.gate,
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
        # The package is the champion's.
        slices, union = _compare(rows, package.info["table"]["sources"], _unit(package))
        return _as_rows(key, parts, slices, union, decide.gate(slices, union, cfg.gate))

    # The decision is written before it is carried out. A run that was killed in between finds it,
    # and does not look at the test rows again.
    place = str(job.run.path / "decisions")
    stored = rows_once(place, _ROW, {"key": key}, made, f"gate {challenger}").to_pylist()[0]
    slices, union, decision = _decided(stored)
    evidence = {"decision": key, "check": Path(checked.page).stem if checked else None}
    decision = _carry_out(store, champion, challenger, decision, slices, evidence)
    say(decision.reason)
    return RetrainResult(champion, challenger, decision, slices, union, trained, device_s)


# The challenger, the key of its training, and the device seconds of all that led to it.
Challenger = tuple[ModelVersion, str, float]


def _evidence(checked: CheckResult | None) -> dict[str, Any]:
    """The drift check that called for a challenger, as its package keeps it."""
    if checked is None:
        return {}
    found = checked.report
    return {
        "check": Path(checked.page).stem.rpartition("-")[2],
        "batch": str(checked.table),
        "is_drift": found.is_drift,
        "p_value": found.p_value,
        "alpha": found.alpha,
    }


def _train(
    store: Store, job: TrainJob, opened: Pinned, say: Callable[[str], None], why: CalledFor
) -> Challenger:
    """The champion's settings and no others, on the new rows."""
    say(f"Training a challenger on {_table(job)} with {_workers(job)}")
    planned = trainer.plan(job, _pin(job, opened))

    def told(metrics: dict[str, float], state: LoopState) -> None:
        say(f"epoch {state.epoch}: {decide.headline(metrics)}")

    result = trainer.run(planned, told)
    _tell(utilisation(usage.read(planned.folder / usage.FILE), result.history), say)
    version = publish(store, planned, result, "challenger", called_for=why)
    return version, result.key, result.device_s


def _tell(used: Utilisation | None, say: Callable[[str], None]) -> None:
    """How busy the nodes were; nothing where the training was too short to say."""
    if used is not None:
        say(f"Nodes: {used.text()}")


def _pin(job: TrainJob, opened: Pinned) -> Pinned:
    """The challenger's rows, of the version that is open: its splits may be named otherwise."""
    return pin(job.table, job.feed, kind=job.model.task, opened=opened)


def _search(
    store: Store,
    cfg: RetrainConfigs,
    first: TrainJob,
    opened: Pinned,
    say: Callable[[str], None],
    why: CalledFor,
) -> Challenger:
    """The best of some trials around the champion's settings.

    A killed search goes on where it was; a finished one is read again.
    """
    base, search = around.searched(cfg.search, cfg.watch, first)
    trials = search.samples
    where = _table(first)
    say(f"Searching for a challenger on {where}: {trials} trials around the champion's settings")
    if first.feed.sampling == "sources":
        how = "equally often" if first.feed.mix is None else f"by {first.feed.mix}"
        say(f"Sources are drawn {how}")
    found = tuner.search(base, search, pinned=_pin(base, opened))
    best = found.trials[0]
    drawn = cell(dict(sorted(best.changes.items())))
    _tell(found.used, say)
    say(f"Best on validation: {best.name}, {found.metric} {best.metric:.4g} ({drawn})")
    # The best settings once more, on validation images too, if the job says so.
    if search.refit is not None:
        again = refit.job_of(base, search.refit, found)
        say(f"Training {best.name} once more, on {again.feed.train}, with {_workers(again)}")
        found = refit.refit(again, found, lambda metrics, state: None, lambda position: None)
    why = replace(why, device_s=found.device_s)
    folders = [found.folder]
    version = publish(store, found.plan, found.best, "challenger", found.runs(), folders, why)
    return version, found.best.key, found.device_s


def _table(job: TrainJob) -> str:
    return f"{job.table.uri}@v{job.table.version}"


def _workers(job: TrainJob) -> str:
    return f"{job.train.most_workers} worker{'s' * (job.train.most_workers > 1)}"


def labelled_by_source(job: TrainJob, pinned: Pinned) -> dict[str, int]:
    """Labelled training rows of each source; a table without sources is one."""
    names = pinned.table.columns
    fields = {field.name for field in pinned.table.at(pinned.version).schema().fields}
    has_sources = names.source in fields
    wanted = [names.label]
    if has_sources:
        wanted.append(names.source)
    trained_on = pinned.rows_of(job.feed.train)
    _, parts = scan.numbered(pinned.table, pinned.version, wanted, trained_on)
    by_source: Counter[str] = Counter()
    for rows, _ in parts:
        # A row whose label is blank teaches nothing.
        labels = label_column.read(rows[names.label], pinned.task.kind, names.label)
        labelled = rows.filter(labels.is_valid())
        if has_sources:
            by_source.update(str(source) for source in labelled[names.source].to_pylist())
        elif len(labelled):
            by_source["all"] += len(labelled)
    return dict(by_source)


def _judge(
    store: Store, job: TrainJob, challenger: ModelVersion, package: Package, pinned: Pinned
) -> pa.Table:
    """The labelled test rows: the slice of each (group), and whether champion (model_0) and
    challenger (model_1) have it right, or their absolute errors.
    """
    both = [package, promote.fetch(store, challenger)]
    return evaluate.judge(both, pinned.table, pinned.version, pinned.rows_of(job.feed.test))


def _keep(judged: pa.Table, file: Path) -> None:
    """Write the judged rows beside the report: they say on which images the two models differ."""
    content = pa.BufferOutputStream()
    pq.write_table(judged, content)
    write_atomic(file, content.getvalue().to_pybytes())


def _compare(
    judged: pa.Table, trained_on: Sequence[str], unit: float | None
) -> tuple[tuple[Comparison, ...], Comparison | None]:
    """Both models on each slice, and on all rows together; ((), None) without rows.

    judged: from `_judge`. trained_on: the champion's sources; a slice of another one is new.
    """
    if not len(judged):
        return (), None

    def compared(name: str, rows: pa.Table, is_new: bool) -> Comparison:
        champion, challenger = rows["model_0"].to_pylist(), rows["model_1"].to_pylist()
        return compare(name, champion, challenger, is_new, unit)

    slices = []
    for name in sorted(set(judged["group"].to_pylist())):
        rows = judged.filter(pc.equal(judged["group"], name))
        slices.append(compared(name, rows, is_new=name not in trained_on))
    return tuple(slices), compared("all", judged, is_new=False)


def _unit(package: Package) -> float | None:
    """The unit of absolute errors; None where rows are right or wrong.

    For a regression it is the standard deviation of the champion's training labels.
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
    evidence: dict[str, Any],
) -> Decision:
    """Log the decision, and move the alias if it says so. Both do nothing the second time.

    Returns the decision; where a rollback stands against it, one not to promote.
    """

    def log_into(run_id: str) -> None:
        for s in slices:
            values = {"champion": s.champion, "challenger": s.challenger, "p_value": s.p_value}
            named = {f"gate.{s.slice}.{name}": value for name, value in values.items()}
            tracking.log_metrics(store, run_id, named)
        tracking.log_text(store, run_id, decision.reason, "decision.txt")

    params = {"champion": str(champion), "challenger": str(challenger)}
    tracking.once(store, evidence["decision"], f"gate {challenger}", params, None, log_into)
    promote.tag_decision(store, challenger, evidence["decision"], decision.act)
    if not decision.act:
        return decision
    # Only if the alias still points at the champion that was compared.
    try:
        promote.promote(store, challenger, champion.version, evidence=evidence)
    except promote.Barred as e:
        return Decision(False, str(e))
    return decision


def _as_rows(
    key: str,
    parts: tuple[Any, Any, Any],
    slices: tuple[Comparison, ...],
    union: Comparison | None,
    decision: Decision,
) -> pa.Table:
    """The decision as its row of the table `decisions`; `_decided` reads it."""
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
    """(slices, all rows together, decision) from a row that `_as_rows` wrote."""
    judged = json.loads(row["slices"])
    slices = tuple(Comparison(**fields) for fields in judged["slices"])
    # Without any row there was nothing to compare.
    union = None
    if judged["union"]:
        union = Comparison(**judged["union"])
    decision = Decision(row["promoted"], row["reason"])
    return slices, union, decision
