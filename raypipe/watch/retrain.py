"""The loop: check -> decide -> train a challenger -> compare -> promote. Rerunnable at every point.

Each step leaves something with a key (drift row, training result, registered version, decision row)
and looks for it first. The decision is written before it is carried out, and carrying it out twice
does nothing: a run that is killed anywhere and started again ends in the same state, with no second
model version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.cluster import usage
from raypipe.config import RunConfig, key_of, validate
from raypipe.errors import DataError, RaypipeError, one_line
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
from raypipe.tables import between
from raypipe.tables import clean as cleaning
from raypipe.tables.clean import CleanConfig
from raypipe.tables.commits import rows_once
from raypipe.train import trainer
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.measure.utilisation import Utilisation, utilisation
from raypipe.train.origin import CalledFor
from raypipe.train.publish import publish
from raypipe.watch import around, decide, decisions, history, labels, policy
from raypipe.watch.check import CheckResult, now
from raypipe.watch.comparison import Comparison, compare
from raypipe.watch.cycle import Busy, Held, Journal, hold
from raypipe.watch.decide import Decision, GateConfig
from raypipe.watch.settings import WatchConfig

log = logging.getLogger("raypipe")
# Settings of watch that decide what a retrain makes.
RETRAIN_SETTINGS = {"retrain_samples", "retrain_space", "retrain_sampling", "clean"}


@dataclass(frozen=True)
class RetrainConfigs:
    """The sections of a retrain, beside those of its training."""

    search: SearchConfig
    watch: WatchConfig
    gate: GateConfig
    clean: CleanConfig = field(default_factory=CleanConfig)


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
    told: Callable[[str], None] = lambda state: None,
) -> RetrainResult:
    """Train a challenger if drift and labels call for it, compare it, and promote it if better.

    champion: the current one by default, and as long as it is current. pinned: the job's rows, if
    they are pinned already. told: called with each state that is reached and kept.
    """
    is_named = champion is not None
    options = cfg.watch.storage_options
    past = Journal(cfg.watch.place(job.run, "retrains"), f"{store.model}@{store.alias}", options)
    _finish(store, job.run, cfg.watch, past, say)
    champion = champion or promote.require_champion(store)
    package = promote.fetch(store, champion)
    pinned = pinned or pin(job.table, job.feed, kind=job.model.task)
    # First the decision to train at all. It needs no model, so it comes before anything costly.
    cycle = _cycle(past, _key(job, cfg, champion, pinned))
    known = history.checks(job.run, cfg.watch, str(champion), checked)
    wanted = policy.retrain(
        known,
        labels.new_labels(job, pinned, package),
        history.tried(past, cycle, cfg.watch, job.run),
        now(),
        cfg.watch.policy,
        cfg.watch.force,
    )
    say(wanted.reason)
    if not wanted.act:
        return RetrainResult(champion, None, wanted, ())
    done = _decided(store, job.run, cfg.watch, past.data(cycle, "ended"))
    if done is not None:
        say(done.decision.reason)
        return done
    failures = [e.at for e in past.events if e.cycle == cycle and e.event == "failed"]
    pause = "" if cfg.watch.force else policy.backed_off(failures, now())
    if pause:
        say(pause)
        return RetrainResult(champion, None, Decision(False, pause), ())
    with hold(past, cycle, say, told) as held:
        if isinstance(held, Busy):
            say(f"{held}: this run leaves it to that one")
            return RetrainResult(champion, None, Decision(False, str(held)), ())
        # Whoever held it before may have promoted. What was compared is carried out, or refused.
        current = promote.require_champion(store)
        begun = past.data(cycle, "compared") is not None
        if current.version != champion.version and not (is_named or begun):
            text = f"{current} has become champion meanwhile: the checks are of {champion}"
            return RetrainResult(champion, None, Decision(False, text), ())
        if cfg.watch.clean != "off":
            pinned = _cleaned(job, cfg, champion, pinned, held, say)
        asked = wanted.reason
        return _retrain(store, job, cfg, checked, champion, package, pinned, held, asked, say)


def _key(job: TrainJob, cfg: RetrainConfigs, champion: ModelVersion, pinned: Pinned) -> str:
    """Names a retrain: what it starts from, and what it is to do.

    By the table's rows, not by its version: a tag is a version, too.
    """
    state = between.state(pinned.table, pinned.version, job.table.where)
    rows = (pinned.version.uri, pinned.version.table_id, state, job.table.where)
    chosen = (job.table.sample_key, job.table.columns, job.feed)
    how = cfg.watch.model_dump(mode="json", include=RETRAIN_SETTINGS)
    by = (str(champion), champion.seal)
    return key_of("retrain", *by, *rows, *chosen, cfg.search, cfg.gate, how)


def _cycle(past: Journal, key: str) -> str:
    """The retrain with this key; where an earlier one has cleaned the table, that one."""
    for event in past.events:
        if event.event == "cleaned" and event.data.get("key") == key:
            return event.cycle
    return key


def _cleaned(
    job: TrainJob,
    cfg: RetrainConfigs,
    champion: ModelVersion,
    pinned: Pinned,
    held: Held,
    say: Callable[[str], None],
) -> Pinned:
    """The rows without those that raypipe clean drops.

    Where its engine cannot start, watch.clean says whether to stop, or go on with what ingest has
    checked.
    """
    say(f"Cleaning {pinned.version}")
    source = job.table.model_copy(update={"version": pinned.version.version})
    try:
        done = cleaning.clean(source, cfg.clean)
    except DataError:
        raise
    except RaypipeError as e:
        if cfg.watch.clean == "stop":
            raise
        say(f"Not cleaned ({e.what}): going on with what ingest has checked")
        held.reached("cleaned", how="ingest's own checks", why=one_line(e))
        return pinned
    cleaned = job.table.model_copy(update={"version": done.clean.version})
    again = pin(cleaned, job.feed, kind=job.model.task)
    key = _key(job, cfg, champion, again)
    held.reached("cleaned", how="fastdup", dropped=done.dropped, table=str(done.clean), key=key)
    say(f"Cleaned: {done.dropped} of {done.images} images dropped")
    return again


def _retrain(
    store: Store,
    job: TrainJob,
    cfg: RetrainConfigs,
    checked: CheckResult | None,
    champion: ModelVersion,
    package: Package,
    pinned: Pinned,
    held: Held,
    reason: str,
    say: Callable[[str], None],
) -> RetrainResult:
    """Train a challenger, compare it, and carry out what follows, holding the lease."""
    labelled = labels.labelled_by_source(job, pinned)
    # The package says how the champion was trained: a challenger starts from those settings.
    theirs = validate(TrainJob, package.info["config"])
    first = around.challenger(
        job, cfg.watch, cfg.search.refit, theirs, pinned.version.version, labelled
    )
    why = CalledFor("retrain", reason, champion, _evidence(checked))
    if cfg.watch.retrain_samples > 1:
        challenger, trained, device_s = _search(store, cfg, first, pinned, say, why)
    else:
        challenger, trained, device_s = _train(store, first, pinned, say, why)
    spent = {"training": trained, "device_s": device_s}
    held.reached("trained", challenger=str(challenger), **spent)
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
    key = key_of("decision", decisions.FORMAT, *named, champion.seal, challenger.seal, *said)

    def made() -> pa.Table:
        say(f"Comparing champion {champion} and challenger {challenger} on the same test rows")
        rows = _judge(store, job, challenger, package, pinned)
        _keep(rows, job.run.path / "reports" / f"judged-{key}.parquet")
        # The package is the champion's.
        slices, union = _compare(rows, package.info["table"]["sources"], _unit(package))
        return decisions.as_row(key, parts, slices, union, decide.gate(slices, union, cfg.gate))

    # The decision is written before it is carried out. A run that was killed in between finds it,
    # and does not look at the test rows again.
    place = cfg.watch.place(job.run, "decisions")
    options = cfg.watch.storage_options
    stored = rows_once(place, decisions.ROW, {"key": key}, made, f"gate {challenger}", options)
    slices, union, decision = decisions.decided(stored.to_pylist()[0])
    evidence = {"decision": key, "check": Path(checked.page).stem if checked else None}
    held.reached("compared", evidence=evidence, **spent)
    decision = _carry_out(store, champion, challenger, decision, slices, evidence)
    held.reached("ended", evidence=evidence, **spent)
    say(decision.reason)
    return RetrainResult(champion, challenger, decision, slices, union, trained, device_s)


def _finish(
    store: Store, run: RunConfig, watch: WatchConfig, past: Journal, say: Callable[[str], None]
) -> None:
    """Carry out the decision that a killed run has left behind, if there is one.

    Whatever this run is about: its check may find no drift, or the alias may have moved already.
    """
    compared = [event for event in past.events if event.event == "compared"]
    if not compared or past.data(compared[-1].cycle, "ended") is not None:
        return
    cycle = compared[-1].cycle
    with hold(past, cycle, say) as held:
        left = past.data(cycle, "compared")
        if isinstance(held, Busy) or left is None or past.data(cycle, "ended") is not None:
            return
        say("An earlier run ended before it had carried its decision out")
        lost = _lost(store, run, watch, left)
        if lost:
            # Else no retrain of this model could ever begin.
            held.reached("ended", **left)
            say(f"It is not carried out: {lost}")
            return
        done = _decided(store, run, watch, left)
        if done is not None:
            held.reached("ended", **left)
            say(done.decision.reason)


def _lost(store: Store, run: RunConfig, watch: WatchConfig, kept: Mapping[str, Any]) -> str:
    """What is not there any more of a decision, in words; "" if it can be carried out."""
    row = decisions.find(run, watch, kept["evidence"]["decision"])
    if row is None:
        return "the row of the decision was deleted"
    there = {version.version for version in promote.versions(store)}
    gone = [text for text in (row["champion"], row["challenger"]) if _number(text) not in there]
    return f"{gone[0]} was deleted" if gone else ""


def _number(version: str) -> int:
    """Of a version as a decision names it."""
    return int(version.rpartition("/")[2])


def _decided(
    store: Store, run: RunConfig, watch: WatchConfig, kept: Mapping[str, Any] | None
) -> RetrainResult | None:
    """The result of a retrain from its decision: nothing is trained or compared.

    kept: what its journal says. Carrying it out once more does nothing, or says what stands against
    it. None where there is no such decision.
    """
    row = decisions.find(run, watch, kept["evidence"]["decision"]) if kept else None
    if kept is None or row is None:
        return None
    slices, union, decision = decisions.decided(row)
    numbers = [_number(row[name]) for name in ("champion", "challenger")]
    fix = "It was deleted: a retrain for another version of the table makes a new one"
    champion, challenger = (promote.require_version(store, number, fix) for number in numbers)
    try:
        decision = _carry_out(store, champion, challenger, decision, slices, kept["evidence"])
    except promote.Lost as e:
        decision = Decision(False, str(e))
    training, device_s = str(kept["training"]), float(kept["device_s"])
    return RetrainResult(champion, challenger, decision, slices, union, training, device_s)


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
        "severity": str(found.severity),
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
