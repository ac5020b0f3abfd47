"""raypipe report: what is known of a registered version, and what happened to a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from raypipe import report
from raypipe.config import load, to_json
from raypipe.errors import ConfigError
from raypipe.files import in_name, is_there, write_atomic
from raypipe.job import Job
from raypipe.registry import follow, moves, promote, recorded, versions
from raypipe.registry.store import Store
from raypipe.tables import appended
from raypipe.watch import records
from raypipe.work import find
from raypipe.work.proof import gather, questions, timeline
from raypipe.work.proof import page as proof_page
from raypipe.work.proof.answers import Answer, overall
from raypipe.work.proof.gather import Found
from raypipe.work.proof.timeline import Happened
from raypipe.work.result import Facts, Result
from raypipe.work.tables import Table
from raypipe.yaml_scalars import quoted

PREFIX = "models:/"


@dataclass(frozen=True, repr=False)
class Proven(Result):
    """The eight answers about a version, and their page."""

    found: Found
    answers: tuple[Answer, ...]
    page: Path

    @property
    def status(self) -> str:
        return overall(self.answers)

    def tables(self) -> list[Table]:
        rows = []
        for answer in self.answers:
            said = answer.text or f"Not known: {answer.why}"
            rows.append([answer.question, proof_page.MARKS[answer.status][1], said])
        return [Table(f"Model {self.found.version}", ["question", "", "answer"], rows)]

    def facts(self) -> Facts:
        wrong = []
        for answer in self.answers:
            wrong += [check.what for check in answer.checks if check.ok is False]
        facts: Facts = {"answered": f"{self._answered} of {len(self.answers)}"}
        if wrong:
            facts["not true"] = list(dict.fromkeys(wrong))
        return {**facts, "report": self.page, "json": self.page.with_suffix(".json")}

    @property
    def _answered(self) -> int:
        return sum(1 for answer in self.answers if answer.text)

    def summary(self) -> Facts:
        found = self.found
        return {
            "model": str(found.version),
            "alias": found.store.alias,
            "in_use": found.in_use,
            "seal": found.version.seal,
            "status": self.status,
            "answered": self._answered,
            "questions": len(self.answers),
            "answers": [answer.summary() for answer in self.answers],
            "report": str(self.page),
        }

    def report_page(self) -> str:
        return str(self.page)

    def key(self) -> str:
        return self.page.stem


@dataclass(frozen=True, repr=False)
class Told(Result):
    """What happened to a model, oldest first, and its page."""

    store: Store
    rows: tuple[Happened, ...]
    altered: tuple[str, ...]
    in_use: int | None
    page: Path
    others: str = ""
    """Records that are of another registry's model of this name, in words."""

    def facts(self) -> Facts:
        counts = Counter(row.kind for row in self.rows)
        held = "none" if self.in_use is None else f"{self.store.model}/{self.in_use}"
        facts: Facts = {self.store.alias: held}
        facts |= {name: counts[kind] for kind, name in _PLURAL.items()}
        if self.altered:
            facts["changed afterwards"] = list(self.altered)
        if self.others:
            facts["left out"] = self.others
        return {**facts, "report": self.page, "json": self.page.with_suffix(".json")}

    def summary(self) -> Facts:
        return {
            "model": self.store.model,
            "alias": self.store.alias,
            "in_use": self.in_use,
            "altered": list(self.altered),
            "left_out": self.others,
            "events": [row.summary() for row in self.rows],
            "report": str(self.page),
        }

    def report_page(self) -> str:
        return str(self.page)

    def key(self) -> str:
        return self.page.stem


_PLURAL: dict[timeline.Kind, str] = {
    "check": "drift checks",
    "call": "decisions to retrain or not",
    "decision": "comparisons",
    "move": "moves",
}


def job_of(
    model: str, config: Path | None, overrides: Sequence[str], number: int | None
) -> tuple[Job, int | None]:
    """The job that says which model is meant and where, and the version; None: its alias.

    model: NAME@ALIAS, NAME/N, the same behind models:/, or a configuration, whose own model and
    alias are meant. number: a version of it. Raises ConfigError for a text that is none of these.
    """
    if is_there(model) and Path(model).is_file():
        if config is not None:
            raise ConfigError(
                "Two configurations were named",
                got=f"{model}, {config}",
                fix="raypipe report model CONFIG, or raypipe report model NAME@champion CONFIG",
            )
        return load(Job, Path(model), overrides), number
    named = find.MODEL.fullmatch(model if model.startswith(PREFIX) else PREFIX + model)
    if named is None:
        raise find.unknown(model, "NAME@ALIAS, NAME/VERSION, or a YAML configuration")
    version = named["version"]
    if version is not None and number is not None:
        raise ConfigError(
            "Two versions were named",
            got=f"{model}, --version {number}",
            fix="Leave out --version",
        )
    number = int(version) if version is not None else number
    given = [f"registry.model={quoted(named['name'])}"]
    if named["alias"]:
        given.append(f"registry.alias={quoted(named['alias'])}")
    if config is not None:
        return load(Job, config, [*given, *overrides]), number
    # Without a configuration it is looked for as `raypipe evaluate` does: in runs/NAME.
    name = named["name"]
    given += [f"run.name={quoted(name)}", f"run.dir={quoted(f'runs/{name}')}"]
    given.append(f"table.uri={quoted(f'runs/{name}')}")
    return load(Job, None, [*given, *overrides]), number


def model(job: Job, number: int | None, reread: bool = True) -> Proven:
    """The eight answers about version `number`, None: the job's alias; and their page and JSON.

    Raises DataError where there is no such version.
    """
    store = find.looked_at(job)
    if number is None:
        version = promote.require_champion(store)
    else:
        fix = "raypipe promote CONFIG --history shows versions that were in use"
        version = versions.require(store, number, fix)
    found = gather.gather(store, version, job.run, job.watch, reread, job.table.storage_options)
    answers = questions.answers(found)
    page = job.run.path / "reports" / f"model-{in_name(store.model)}-{version.version}.html"
    report.write(proof_page.page(found, answers), page)
    done = Proven(found, answers, page)
    _keep(done, page)
    return done


def tell(job: Job) -> Told:
    """What happened to the job's model: its checks, comparisons and alias moves, and the page."""
    store = find.looked_at(job)
    held = follow.held(store)
    checks = records.checks(job.run, job.watch)
    decisions = records.decisions(job.run, job.watch)
    calls = records.calls(job.run, job.watch)
    mine = f"{store.model}/"
    # One folder may hold records of several models, and of another registry's model of this name.
    named = [row for row in checks.rows if str(row.get("model")).startswith(mine)]
    seals = {str(version): version.seal for version in versions.every(store)}
    foreign = {
        str(row.get("key")) for row in named if not _is_of(row.get("model"), row.get("seal"), seals)
    }
    of_checks = [row for row in named if str(row.get("key")) not in foreign]
    compared = [row for row in decisions.rows if str(row.get("champion")).startswith(mine)]
    moved = moves.read(store).moves
    carried_out = {str(move.evidence.get("decision")) for move in moved}
    of_decisions = [row for row in compared if _is_compared_here(store, row, seals, carried_out)]
    # Those of checks that are left out are not counted again.
    called = [
        row
        for row in calls.rows
        if row.get("model") == store.model and str(row.get("about")) not in foreign
    ]
    of_calls = [row for row in called if _is_of(row.get("champion"), row.get("seal"), seals)]
    log = appended.read(store.moves, store.moves_options)
    altered = []
    tables = {"drift checks": checks, "decisions to retrain or not": calls}
    tables |= {"comparisons": decisions, "moves": log}
    for name, table in tables.items():
        if table.altered:
            altered.append(f"The table of {name}: {table.altered}")
    rows = timeline.merge(
        [timeline.check(row) for row in of_checks],
        [timeline.call(row) for row in of_calls],
        [timeline.decision(row) for row in of_decisions],
        [timeline.move(one, store.alias) for one in moved],
    )
    page = job.run.path / "reports" / f"timeline-{in_name(store.model)}.html"
    left_out = {
        "check": len(foreign),
        "decision": len(called) - len(of_calls),
        "comparison": len(compared) - len(of_decisions),
    }
    others = " and ".join(_times(count, noun) for noun, count in left_out.items() if count)
    if others:
        others += " of packages that this registry does not have"
    told = Told(store, tuple(rows), tuple(altered), held.version, page, others)
    places = tuple(table.place for table in tables.values())
    report.write(_timeline_page(told, places), page)
    _keep(told, page)
    return told


def _is_of(version: Any, seal: Any, seals: Mapping[str, str | None]) -> bool:
    """Is what a record names a version of this registry? seals: of its versions, by NAME/N.

    An older raypipe kept no seal; of a version that was deleted, nobody knows it any more.
    """
    known = seals.get(str(version))
    return not seal or not known or seal == known


def _is_compared_here(
    store: Store,
    row: Mapping[str, Any],
    seals: Mapping[str, str | None],
    carried_out: Collection[str],
) -> bool:
    """Was a comparison made between versions of this registry? seals: as `_is_of` has them.

    carried_out: the comparisons that its moves name.
    """
    known = {name: seal for name, seal in records.seals_of(row).items() if seals.get(name)}
    if known:
        return all(seals[name] == seal for name, seal in known.items())
    # An older raypipe kept no seals. But it has carried each comparison out, and left a run of it.
    key = str(row.get("key"))
    return key in carried_out or recorded.of_key(store, key) is not None


def _timeline_page(told: Told, places: Sequence[str]) -> report.Page:
    store, rows = told.store, told.rows
    drifted = sum(1 for row in rows if row.kind == "check" and row.is_alert)
    promoted = sum(1 for row in rows if row.kind == "decision" and row.is_up)
    counts = Counter(row.kind for row in rows)
    top = [
        report.Verdict(
            "up" if told.in_use else "quiet",
            f"{store.alias}: {f'version {told.in_use}' if told.in_use else 'none'}",
            _times(counts["move"], "move"),
            "events",
        ),
        report.Verdict(
            "alert" if drifted else "good",
            f"{drifted} of {counts['check']} checks found drift"
            if counts["check"]
            else "No checks yet",
            f"{_times(counts['decision'], 'comparison')}, {promoted} for the challenger",
            "events",
        ),
    ]
    top += [report.Verdict("alert", "Changed afterwards", text, "events") for text in told.altered]
    back = sum(1 for row in rows if row.is_back)
    text = "Newest first, in the order of commits; times are those of the writers' clocks."
    if back:
        text += f" {back} of them say earlier than the row before."
    if told.others:
        text += f" Left out: {told.others}, under the same names and numbers."
    if not rows:
        text = "Nothing has happened yet: no check, no comparison, no move of the alias."
    header = report.Header(
        f"Timeline of {store.model}",
        f"Drift checks, decisions, comparisons, and moves of {store.alias}",
        store.model,
        datetime.now(timezone.utc),
        tuple(zip(("Checks", "Retrain or not", "Comparisons", "Moves"), places, strict=True)),
    )
    events = report.Events("What happened", text, timeline.events(rows))
    return report.Page(header, verdicts=tuple(top), events=events)


def _keep(result: Result, page: Path) -> None:
    """Write what --json prints beside the page."""
    write_atomic(page.with_suffix(".json"), to_json(result.summary(), indent=2))


def _times(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
