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

from raypipe.config import key_of, validate
from raypipe.errors import DataError, RaypipeError, one_line
from raypipe.feed.dataset import Pinned, pin
from raypipe.monitor.monitor import Monitor
from raypipe.registry import fetching, of_task, promote
from raypipe.registry.package import Package
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.search.settings import SearchConfig
from raypipe.tables import between, cleaned
from raypipe.tables import clean as cleaning
from raypipe.tables.clean import CleanConfig
from raypipe.tables.commits import rows_once
from raypipe.train.job import TrainJob
from raypipe.train.origin import CalledFor
from raypipe.watch import (
    around,
    challenge,
    decide,
    decisions,
    heads,
    history,
    judging,
    labels,
    limited,
    policy,
    retrained,
)
from raypipe.watch.begin import begin, within_budget
from raypipe.watch.check import CheckResult
from raypipe.watch.comparison import Comparison
from raypipe.watch.cycle import Busy, Held, Journal, hold
from raypipe.watch.decide import Decision, GateConfig
from raypipe.watch.evidence_row import now
from raypipe.watch.retrained import RetrainResult
from raypipe.watch.settings import WatchConfig

log = logging.getLogger("raypipe")
# Settings of watch that decide what a retrain makes.
RETRAIN_SETTINGS = {
    "retrain_samples",
    "retrain_space",
    "retrain_sampling",
    "retrain_from",
    "replay",
    "clean",
}
FASTDUP = "fastdup"  # how a table was cleaned
LEAST_H = 1 / 60  # device hours of a retrain that has begun: it is finished


@dataclass(frozen=True)
class RetrainConfigs:
    """The sections of a retrain, beside those of its training."""

    search: SearchConfig
    watch: WatchConfig
    gate: GateConfig
    clean: CleanConfig = field(default_factory=CleanConfig)


@dataclass(frozen=True)
class Request:
    """One call of `retrain`: what it is about, and who is told of it."""

    store: Store
    job: TrainJob
    cfg: RetrainConfigs
    checked: CheckResult | None
    past: Journal
    say: Callable[[str], None]
    told: Callable[[str], None]
    decided: Callable[[Decision], None]
    monitors: Sequence[Monitor]


@dataclass(frozen=True)
class Wanted:
    """A challenger is wanted: against which champion, why, and after how many device hours of
    earlier ones."""

    champion: ModelVersion
    package: Package
    reason: str
    spent_h: float


def retrain(
    store: Store,
    job: TrainJob,
    cfg: RetrainConfigs,
    checked: CheckResult | None,
    champion: ModelVersion | None = None,
    say: Callable[[str], None] = log.info,
    pinned: Pinned | None = None,
    told: Callable[[str], None] = lambda state: None,
    decided: Callable[[Decision], None] = lambda decision: None,
    monitors: Sequence[Monitor] = (),
) -> RetrainResult:
    """Train a challenger if drift and labels call for it, compare it, and promote it if better.

    champion: the current one by default, and as long as it is current. pinned: the job's rows, if
    they are pinned already. told: called with each state that is reached and kept. decided: called
    with the decision to train or not, before anything is trained. monitors: get the epochs.
    """
    options = cfg.watch.storage_options
    past = Journal(cfg.watch.place(job.run, "retrains"), f"{store.model}@{store.alias}", options)
    left = retrained.finish(store, job.run, cfg.watch, past, say, retrained.limits_of(cfg.gate))
    request = Request(store, job, cfg, checked, past, say, told, decided, monitors)
    done = _asked_for(request, champion, pinned)
    return done if left is None else replace(done, left=left)


def _asked_for(
    request: Request, champion: ModelVersion | None, pinned: Pinned | None
) -> RetrainResult:
    """As `retrain`, where nothing is left behind."""
    store, job, cfg, past, say = request.store, request.job, request.cfg, request.past, request.say
    is_named = champion is not None
    champion = champion or promote.require_champion(store)
    if request.checked is not None and not _is_of(request.checked, champion):
        # Somebody has moved the alias since the check: that one's drift says nothing of this one.
        checked = request.checked.model
        text = f"{champion} has become champion meanwhile: the check is of {checked}"
        if not cfg.watch.force:
            return RetrainResult(champion, None, Decision(False, text), ())
        say(f"{text}, and is not what called for this retrain")
        request = replace(request, checked=None)
    package = fetching.fetch(store, champion)
    # Both are compared on the same labels, and the challenger would not be promoted.
    of_task.require_same("The challenger", job.model.task, str(champion), package.task.kind)
    pinned = pinned or pin(job.table, job.feed, kind=job.model.task)
    # First the decision to train at all. It needs no model, so it comes before anything costly.
    asked = _asked(job, cfg, champion)
    cycle = _cycle(past, _key(job, cfg, champion, pinned), asked, pinned)
    known = history.checks(job.run, cfg.watch, str(champion), request.checked, champion.seal)
    tried = history.tried(past, cycle, cfg.watch, job.run, now())
    wanted = policy.retrain(
        known,
        labels.new_labels(job, pinned, package),
        tried,
        now(),
        cfg.watch.policy,
        cfg.watch.force,
    )
    say(wanted.reason)
    request.decided(wanted)
    if not wanted.act:
        return RetrainResult(champion, None, wanted, ())
    done = retrained.decided(store, job.run, cfg.watch, past.data(cycle, "ended"))
    if done is not None:
        say(done.decision.reason)
        return done
    failures = [e.at for e in past.events if e.cycle == cycle and e.event == "failed"]
    pause = "" if cfg.watch.force else policy.backed_off(failures, now())
    if pause:
        say(pause)
        return RetrainResult(champion, None, Decision(False, pause), ())
    judging.require_shared(package, pinned, job.feed.test)
    count = history.count(cfg.watch, job.run)
    with hold(past, cycle, say, request.told, {"checks": count}) as held:
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
        # `asked` is a hash: what called for the challenger is told in words.
        called = Wanted(champion, package, wanted.reason, policy.spent_h(tried, now()))
        return _retrain(request, called, pinned, held)


def _is_of(checked: CheckResult, champion: ModelVersion) -> bool:
    """By name, number and package. An older raypipe kept no seal."""
    seals = {checked.seal, champion.seal} - {None}
    return checked.model == str(champion) and len(seals) < 2


def _key(job: TrainJob, cfg: RetrainConfigs, champion: ModelVersion, pinned: Pinned) -> str:
    """Names a retrain: what it starts from, and what it is to do.

    By the table's rows, not by its version: a tag is a version, too.
    """
    state = between.state(pinned.table, pinned.version, job.table.where)
    rows = (pinned.version.uri, pinned.version.table_id, state, job.table.where)
    return key_of("retrain", rows, _asked(job, cfg, champion))


def _asked(job: TrainJob, cfg: RetrainConfigs, champion: ModelVersion) -> str:
    """Names what a retrain is to do, whatever the rows."""
    chosen: list[Any] = [job.table.sample_key, job.table.columns, job.feed]
    if job.registry.group is not None:
        # One test image of each group is compared.
        chosen.append(("group", job.registry.group))
    how = cfg.watch.model_dump(mode="json", include=RETRAIN_SETTINGS)
    return key_of(
        "retrain", str(champion), champion.seal, *chosen, cfg.search, decide.key_part(cfg.gate), how
    )


def _cycle(past: Journal, key: str, asked: str, pinned: Pinned) -> str:
    """The retrain with this key; where an earlier one has cleaned the table, that one.

    A kill may come between the commit of the cleaning and the state `cleaned`. Then the state
    `cleaning` says which version was to be cleaned, and the table's log that it was.
    """
    for event in past.events:
        if event.event == "cleaned" and event.data.get("key") == key:
            return event.cycle
    for event in reversed(past.events):
        if event.event != "cleaning" or event.data.get("asked") != asked:
            continue
        if past.data(event.cycle, "cleaned") is None and _is_clean_of(pinned, event.data):
            return event.cycle
    return key


def _is_clean_of(pinned: Pinned, begun: Mapping[str, Any]) -> bool:
    """Are the pinned rows those that a cleaning has left, which `begun` with this version?"""
    if begun.get("table_id") != pinned.version.table_id:
        return False
    said = cleaned.of(pinned.table, pinned.version)
    return said.state == "cleaned" and said.judged.endswith(f"@v{begun['version']}")


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
    checked. A rerun goes on with what the first run has decided: else there were two challengers.
    """
    kept = held.data("cleaned")
    if kept is not None:
        if kept.get("key") == _key(job, cfg, champion, pinned):
            return pinned
        if kept["how"] != FASTDUP:
            say(f"Not cleaned ({kept['why']}): going on with what ingest has checked")
            return pinned
    begun, number = held.data("cleaning"), pinned.version.version
    if begun is not None and _is_clean_of(pinned, begun):
        # Its commit is found again.
        number = int(begun["version"])
    elif begun is None:
        named = {"version": number, "table_id": pinned.version.table_id}
        held.reached("cleaning", **named, asked=_asked(job, cfg, champion))
    say(f"Cleaning {pinned.table.uri}@v{number}")
    source = job.table.model_copy(update={"version": number})
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
    clean_table = job.table.model_copy(update={"version": done.clean.version})
    again = pin(clean_table, job.feed, kind=job.model.task)
    key = _key(job, cfg, champion, again)
    held.reached("cleaned", how=FASTDUP, dropped=done.dropped, table=str(done.clean), key=key)
    say(f"Cleaned: {done.dropped} of {done.images} images dropped")
    return again


def _retrain(request: Request, wanted: Wanted, pinned: Pinned, held: Held) -> RetrainResult:
    """Train a challenger, compare it, and carry out what follows, holding the lease."""
    store, job, cfg, say = request.store, request.job, request.cfg, request.say
    champion, package = wanted.champion, wanted.package
    checked, monitors = request.checked, request.monitors
    labelled = labels.labelled_by_source(job, pinned)
    # A slice of a column that is not there must not cost a training.
    parts_of = limited.rows_of(cfg.gate, job, pinned)
    # The package says how the champion was trained: a challenger starts from those settings.
    theirs = validate(TrainJob, package.info["config"])
    first = around.challenger(
        job, cfg.watch, cfg.search.refit_changes, theirs, pinned.version.version, labelled
    )
    first, start = begin(first, cfg.watch, champion, package, pinned, say)
    why = CalledFor("retrain", wanted.reason, champion, _evidence(checked), start=start)
    members = heads.of_champion(package, first, cfg.watch)
    if members:
        challenger, trained, device_s = challenge.of_heads(
            store, members, cfg.search, first, pinned, say, why, monitors
        )
    elif around.is_search(cfg.watch, cfg.search, first.model.mode == "frozen"):
        if package.members:
            say(
                f"The champion is an ensemble of {len(package.members)}: the settings are those of "
                "its first member"
            )
        search = within_budget(cfg.search, _left_h(cfg.watch, held, wanted.spent_h))
        challenger, trained, device_s = challenge.search(
            store, search, cfg.watch, first, pinned, say, why, monitors
        )
    else:
        challenger, trained, device_s = challenge.train(store, first, pinned, say, why, monitors)
    spent = {"training": trained, "device_s": device_s}
    held.reached("trained", challenger=str(challenger), **spent)
    if challenger.version == champion.version:
        # Compared with itself, the champion would be called refused.
        text = (
            f"The same settings on the same rows give {champion} again: there is no challenger. "
            "Wait for new images, or set another run.seed"
        )
        held.reached("ended", evidence={"decision": "", "check": None}, **spent)
        say(text)
        stays = Decision(False, text)
        return RetrainResult(champion, None, stays, (), key=trained, device_s=device_s)
    belonging = judging.group_column(job.registry, package, pinned)
    # Fields of a slice are part of the key: a row that lacks one of them could not be read.
    parts = (champion, challenger, pinned.version)
    said = (
        decide.key_part(cfg.gate),
        job.table.where,
        job.table.sample_key,
        job.table.columns,
        job.feed.test,
        belonging,
        sorted(Comparison.__annotations__),
    )
    which = (str(champion), str(challenger), pinned.version.identity)
    key = key_of("decision", decisions.FORMAT, *which, champion.seal, challenger.seal, *said)

    def made() -> pa.Table:
        say(f"Comparing champion {champion} and challenger {challenger} on the same test rows")
        both = [package, fetching.fetch(store, challenger)]
        rows = judging.judge(both, pinned, job.feed.test, belonging, say)
        limited.require_own_ids(rows, parts_of)
        rows = judging.independent(rows, job.run.seed, say)
        judging.keep(rows, job.run.path / "reports" / f"judged-{key}.parquet")
        # The package is the champion's.
        # A table without sources is one.
        trained_on = package.info["table"]["sources"] or [labels.ALL]
        unit = judging.unit(package)
        slices, union = judging.by_slice(rows, trained_on, unit)
        named = limited.compared(rows, parts_of, unit)
        measured = limited.measured(both, cfg.gate, job, pinned, say)
        not_finite = judging.not_finite(rows, champion, challenger)
        decision = decide.gate(slices, union, cfg.gate, named, measured, not_finite)
        seals = (champion.seal, challenger.seal)
        return decisions.as_row(key, parts, slices, union, decision, named, measured, seals)

    # The decision is written before it is carried out. A run that was killed in between finds it,
    # and does not look at the test rows again.
    place = cfg.watch.place(job.run, "decisions")
    options = cfg.watch.storage_options
    stored = rows_once(place, decisions.ROW, {"key": key}, made, f"gate {challenger}", options)
    row = stored.to_pylist()[0]
    slices, union, decision = decisions.decided(row)
    evidence = {"decision": key, "check": Path(checked.page).stem if checked else None}
    held.reached("compared", evidence=evidence, gate=retrained.limits_of(cfg.gate), **spent)
    decision = retrained.carry_out(store, champion, challenger, decision, slices, evidence)
    held.reached("ended", evidence=evidence, **spent)
    say(decision.reason)
    done = RetrainResult(champion, challenger, decision, slices, union, trained, device_s)
    return replace(done, **decisions.limited(row))


def _left_h(watch: WatchConfig, held: Held, spent_h: float) -> float | None:
    """Device hours that this retrain's search may take; None: any number.

    It is kept with the lease: a rerun that counted anew would make another search of it.
    """
    budget_h = watch.policy.budget_h
    if budget_h is None:
        return None
    kept = held.data("budgeted")
    if kept is None:
        held.reached("budgeted", left_h=max(LEAST_H, budget_h - spent_h))
        kept = held.data("budgeted")
    return float(kept["left_h"]) if kept else None


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
