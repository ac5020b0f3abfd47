"""Eight questions about a version, each answered from what was gathered. Pure: nothing is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raypipe.costs.spent import duration
from raypipe.errors import one_line
from raypipe.registry.moves import Move
from raypipe.registry.runs import KEY, allowed_name
from raypipe.report.formats import begun, cell, chance
from raypipe.tables.cleaned import Cleaning
from raypipe.watch import records
from raypipe.work.proof.answers import NOT_RECORDED, Answer, Check
from raypipe.work.proof.gather import Found

SHOWN = 12  # hex digits of a hash, where people read it


def answers(found: Found) -> tuple[Answer, ...]:
    """The eight answers, in the order in which they are asked."""
    return tuple(_answered(ask, found) for ask in ASKED)


def _answered(ask: Callable[[Found], Answer], found: Found) -> Answer:
    """A package may hold anything: a record that cannot be read is one that is not known."""
    try:
        return ask(found)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        why = f"The record cannot be read: {type(e).__name__} {one_line(e)}"
        name, question = ask.__name__, (ask.__doc__ or "").partition("\n")[0]
        return Answer(name, question, "", {}, (found.package,), (found.seal,), why)


def rows(found: Found) -> Answer:
    """Which rows is it made of?"""
    table, made = found.info.get("table", {}), found.made
    name, question = "rows", "Which rows is it made of?"
    if not table:
        return _sealed(found, name, question)
    version = f"{table.get('uri')}@v{table.get('version')}"
    parts: Mapping[str, Any] = made.get("rows", {})
    counts = []
    for role, part in parts.items():
        ids = part["ids_sha256"][:SHOWN]
        some = f"{part['used']:,} of the " if "used" in part else ""
        counts.append(f"{some}{part['rows']:,} rows of {part['split']} ({role}, ids {ids})")
    checks = [found.seal, *_rows_again(found)]
    said = found.version.tags.get("raypipe.table")
    if said is not None:
        checks.append(Check("MLflow's tag names the same version", said == version, said))
    text = f"Version {table.get('version')} of {table.get('uri')}"
    return Answer(
        name,
        question,
        f"{text}: {', '.join(counts)}" if counts else text,
        {
            "table": version,
            "table_id": made.get("table_id"),
            "where": table.get("where"),
            "sources": table.get("sources"),
            "prepared_from": table.get("prepared_from"),
            "rows": dict(parts),
        },
        (found.package, f"Delta table {version}"),
        tuple(checks),
        "" if parts else f"How many rows, and which ids. {NOT_RECORDED}",
    )


def _rows_again(found: Found) -> list[Check]:
    """The recorded version, looked up now."""
    table, made = found.table, found.made
    what = "The version can still be read"
    if table.error:
        return [Check(what, None, table.error)]
    checks = [Check(what, True, f"Delta id {table.table_id}")]
    if made.get("table_id"):
        same = made["table_id"] == table.table_id
        checks.append(Check("It is the same table, not one made again there", same, table.table_id))
    for role, part in made.get("rows", {}).items():
        now = table.rows.get(role)
        what = f"Number and ids of the {role} rows, read again"
        if now is None:
            checks.append(Check(what, None, "Not tried: --quick reads no rows"))
            continue
        same = all(now[key] == part[key] for key in ("rows", "ids_sha256"))
        checks.append(Check(what, same, f"{now['rows']:,} rows, ids {now['ids_sha256'][:SHOWN]}"))
    return checks


def cleaning(found: Found) -> Answer:
    """How was it cleaned?"""
    name, question = "cleaning", "How was it cleaned?"
    said = found.made.get("cleaning")
    now = found.table.cleaning
    if not found.info:
        return _sealed(found, name, question)
    if said is None:
        # An older package does not say; the log of its table may.
        if now is None or now.state == "unknown":
            reason = now.source if now else found.table.error
            return _unknown(name, question, f"{NOT_RECORDED}; and {reason}")
        why = f"What the log said then. {NOT_RECORDED}; this is what it says now"
        return Answer(name, question, now.text(), vars(now), (now.source,), (), why)
    was = Cleaning(**said)
    if was.state == "unknown":
        return _unknown(name, question, was.source, (found.package,))
    what = "Log and verdicts say the same now"
    if now is None or now.state == "unknown":
        again = Check(what, None, now.source if now else found.table.error)
    else:
        keys = ("state", "judged", "policy", "images", "dropped", "verdicts")
        same = all(getattr(was, key) == getattr(now, key) for key in keys)
        again = Check(what, same, now.text())
    facts = {key: value for key, value in said.items() if key != "source"}
    return Answer(
        name, question, was.text(), facts, (found.package, was.source), (found.seal, again)
    )


def code(found: Found) -> Answer:
    """Which configuration and code made it?"""
    name, question = "code", "Which configuration and code made it?"
    config, made = found.info.get("config"), found.made.get("code")
    if not config:
        return _sealed(found, name, question)
    ran = made or {"commit": found.info.get("code_commit")}
    commit, dirty = ran.get("commit"), ran.get("dirty")
    named = f"commit {commit}" if commit else "no checkout"
    files = "and nobody knows whether files were changed"
    if dirty is not None:
        files = "with changed files" if dirty else "without changed files"
    text = f"Training {found.info.get('key')} by raypipe {ran.get('raypipe', '')}".rstrip()
    text += f", {named}, {files}"
    if ran.get("sha256"):
        text += f"; its files have the sha256 {ran['sha256'][:SHOWN]}"
    checks = [found.seal, *_logged_code(found, ran)]
    missing = []
    if made is None:
        missing.append(f"Whether files were changed, and their hash. {NOT_RECORDED}")
    elif dirty is None:
        missing.append("Whether files were changed: there was no checkout of that commit to ask")
    facts = {**ran, "training": found.info.get("key"), "config": config}
    sources = [found.package]
    if found.mlflow:
        sources.append(found.mlflow.source)
    return Answer(name, question, text, facts, tuple(sources), tuple(checks), "; ".join(missing))


def _logged_code(found: Found, ran: Mapping[str, Any]) -> list[Check]:
    """MLflow kept the commit and the key apart from the package."""
    if found.mlflow is None:
        reason = found.errors.get("mlflow", "The MLflow run is not there")
        return [Check("The MLflow run says the same", None, reason)]
    tags = found.mlflow.tags
    key, logged = found.info.get("key"), tags.get("mlflow.source.git.commit")
    checks = [Check("The MLflow run is of the same training", tags.get(KEY) == key, f"key {key}")]
    if logged and ran.get("commit"):
        checks.append(Check("It names the same commit", logged == ran["commit"], logged))
    return checks


def packages(found: Found) -> Answer:
    """Which packages and hardware made it?"""
    name, question = "packages", "Which packages and hardware made it?"
    made = found.made
    if not made:
        return _sealed(found, name, question)
    machine, nodes, installed = made["machine"], made.get("nodes", []), made["packages"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    chosen = [f"{one} {installed[one]}" for one in ("torch", "ray", "numpy") if one in installed]
    text = (
        f"Python {machine['python']} on {machine['system']} with {len(installed)} packages "
        f"({', '.join(chosen)}); {machine['cpus']} x {machine['cpu']}, {gpus}"
    )
    missing = ""
    if nodes:
        text += f"; trained on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    else:
        missing = "The nodes of the training: it was too short to record them"
    facts = {"machine": machine, "nodes": nodes, "packages": installed}
    return Answer(name, question, text, facts, (found.package,), (found.seal,), missing)


def quality(found: Found) -> Answer:
    """How good is it, by slice, and on which rows?"""
    name, question = "quality", "How good is it, by slice, and on which rows?"
    judged, info = found.made.get("judged"), found.info
    if not info:
        return _sealed(found, name, question)
    tested: dict[str, float] = {}
    if found.mlflow:
        metrics = found.mlflow.metrics.items()
        tested = {key: value for key, value in metrics if key.startswith("test_")}
    compared = records.slices_of(found.decision or {})
    facts: dict[str, Any] = {"training": info.get("metrics"), "judged": judged, "test": tested}
    facts["compared"] = compared
    facts |= records.limits_of(found.decision or {})
    if judged is None:
        said = info.get("metrics") or {}
        val = {key: value for key, value in said.items() if key.startswith("val_")}
        why = f"Metrics by slice, and which rows were judged. {NOT_RECORDED}"
        return Answer(name, question, cell(val), facts, (found.package,), (found.seal,), why)
    table = info.get("table", {})
    text = (
        f"{cell(judged['metrics'])} on {judged['images']:,} rows of {judged['split']} in "
        f"{table.get('uri')}@v{table.get('version')} (ids {judged['ids_sha256'][:SHOWN]}). "
        f"{judged['caution']}"
    )
    sources = [found.package]
    if compared:
        sources.append(f"{found.decisions.place}, key {(found.decision or {}).get('key')}")
    if tested and found.mlflow:
        text += f" On the test split: {cell(tested)}."
        sources.append(found.mlflow.source)
    why = "" if judged["slices"] or compared else "No slices: the rows have one source, or none"
    checks = (found.seal, *found.judged, *(_decision_checks(found) if compared else ()))
    return Answer(name, question, text, facts, tuple(sources), checks, why)


def replaced(found: Found) -> Answer:
    """Which model did it replace, and by what comparison?"""
    name, question = "replaced", "Which model did it replace, and by what comparison?"
    alias = f"{found.store.model}@{found.store.alias}"
    if "moves" in found.errors:
        return _unknown(name, question, found.errors["moves"], (found.store.moves,))
    move, decision = found.move, found.decision
    facts: dict[str, Any] = {"in_use": found.in_use, "move": _move_facts(move)}
    facts["decision"] = _decision_facts(decision)
    sources, checks = [], []
    number = found.version.version
    # Somebody may have set the alias in MLflow before there was a table of moves.
    is_named = found.in_use == number or any(one.version_from == number for one in found.moves)
    before = []
    if move is not None:
        before = [one for one in found.moves if one.number < move.number and one.version_to]
    if move is None and is_named:
        text = f"Not known: {alias} names it, or has named it, and no move to it is recorded"
        checks.append(Check("The move to it is recorded", None, found.store.moves))
    elif move is None:
        text = f"None: {alias} never named it"
    elif move.version_from is None and before:
        last = f"{found.store.model}/{before[-1].version_to}"
        text = f"None: {alias} named no version then. The last one before was {last}"
    elif move.version_from is None:
        text = f"None: it was the first {alias}"
    else:
        text = f"{found.store.model}/{move.version_from}, by {_of(move)}"
    if move is not None:
        sources.append(f"{found.store.moves}, move {move.number}")
    checks.append(
        Check(
            "By its log, the table of moves was only appended to",
            not found.moves_altered,
            found.moves_altered or found.store.moves,
        )
    )
    missing = ""
    if decision is not None:
        text += f". Compared with {decision.get('champion')}: {decision.get('reason')}"
        sources.append(f"{found.decisions.place}, key {decision.get('key')}")
        checks += _decision_checks(found)
    elif move is not None and (key := move.evidence.get("decision")):
        missing = f"The comparison {key}: it has no row in {found.decisions.place or 'run.dir'}"
        checks.append(Check("The decision's row is there", None, missing))
    elif (other := found.challenged[0]) is not None:
        missing = (
            f"Whether the comparison {other.get('key')} in {found.decisions.place} is its own: it "
            "names this model and version, and nothing in this registry names it"
        )
    elif move is not None and move.version_from is not None:
        text += ", without a comparison"
    if move is not None and decision is not None and move.version_from is not None:
        named = f"{found.store.model}/{move.version_from}"
        if move.evidence.get("decision") == decision.get("key"):
            same = decision.get("champion") == named
            checks.append(Check("The move replaced the model that was compared", same, named))
    return Answer(name, question, text, facts, tuple(sources), tuple(checks), missing)


def why(found: Found) -> Answer:
    """Why was it made?"""
    name, question = "why", "Why was it made?"
    called = found.made.get("called_for")
    if not called:
        return _sealed(found, name, question)
    text, parent, evidence = called["reason"], called["parent"], called["evidence"]
    sources, checks, missing = [found.package], [found.seal], ""
    if parent:
        text += f". It is to replace {parent}, and starts from its settings{_start(found)}"
    if key := str(evidence.get("check", "")):
        row = found.check_row(key)
        p_text = chance(evidence["p_value"], row.get("alpha") if row else None)
        text += f". Drift check {key} of {evidence.get('batch')}: p {p_text}"
        sources.append(f"{found.checks.place or found.run.path}, key {key}")
        checks += _check_checks(found, evidence, row)
        if row is None:
            missing = f"What else the check {key} said: it has no row in {found.checks.place}"
    move = found.move
    if move is not None and move.note:
        text += f". Note of its promotion: {move.note}"
        sources.append(f"{found.store.moves}, move {move.number}")
    facts = {**called, "start": found.made.get("start"), "move": _move_facts(move)}
    return Answer(name, question, text, facts, tuple(sources), tuple(checks), missing)


def _start(found: Found) -> str:
    """Whose weights and which old rows it began with, in words; "" for an older package."""
    start = found.made.get("start")
    if not start:
        return ""
    # Not the number of rows: hashes alone do not say which two of them are one row.
    behind = f"{start['inherited']:,} row identities behind them, two for a row of a prepared table"
    text = f" and its weights ({behind})"
    if not start["version"]:
        text = f", with other weights ({start['weights']})"
    replay = start["replay"]
    if replay:
        text += (
            f"; trained on {replay['new']:,} new rows and {replay['replayed']:,} of "
            f"{replay['old']:,} old ones"
        )
    return text


def cost(found: Found) -> Answer:
    """What did it cost?"""
    name, question = "cost", "What did it cost?"
    spent = found.made.get("spent")
    logged: dict[str, float] = {}
    if found.mlflow:
        metrics = found.mlflow.metrics.items()
        logged = {key: value for key, value in metrics if key.startswith("cost.")}
    if not spent and not logged:
        return _sealed(found, name, question)
    parts, sources = [], []
    if spent:
        sources.append(found.package)
        held = spent["all_device_s"] or spent["device_s"]
        # A model of a search that was not trained again has no training of its own.
        if spent["seconds"] or not held:
            parts.append(f"its training {duration(spent['seconds'])}")
        if held:
            # Older packages count heads as trials.
            trials, heads = spent["trials"], spent.get("heads", 0)
            some = f", in {begun(trials, heads)}" if trials or heads else ""
            parts.append(f"{held / 3600:.4f} device hours of all that led to it{some}")
    if logged and found.mlflow:
        sources.append(found.mlflow.source)
    if "cost.seconds" in logged:
        parts.append(f"the whole command {duration(logged['cost.seconds'])}")
    usd = logged.get("cost.usd")
    if usd is not None:
        parts.append(f"${usd:,.2f}")
    text = "; ".join(parts)
    missing = []
    if usd is None:
        missing.append("Money: no price was logged. cost.node names the type of the nodes")
    if not spent:
        missing.append(f"Seconds of its training. {NOT_RECORDED}")
    checks = (found.seal,) if spent else ()
    facts = {"spent": spent, "logged": logged, "usd": usd}
    why = "; ".join(missing)
    text = text[:1].upper() + text[1:]
    return Answer(name, question, text, facts, tuple(sources), checks, why)


def _decision_checks(found: Found) -> list[Check]:
    """A decision's row, against what MLflow kept of it, and against the table's own history."""
    row, gate = found.decision, found.gate
    checks = []
    altered = found.decisions.altered
    what = "By its log, the table of decisions was only appended to"
    checks.append(Check(what, not altered, altered or found.decisions.place))
    if row is None:
        return checks
    checks.append(_only(found.decisions.rows, row))
    what = "MLflow's run of the comparison says the same"
    if gate is None or found.gate_reason is None:
        reason = found.errors.get("gate", "It is not there")
        return [*checks, Check(what, None, reason)]
    same = found.gate_reason.strip() == str(row.get("reason", "")).strip()
    differ = []
    for part in records.slices_of(row):
        for side in ("champion", "challenger", "p_value"):
            logged = _metric(gate.metrics, f"gate.{part.get('slice')}.{side}")
            if logged is not None and abs(logged - float(part.get(side) or 0.0)) > 1e-9:
                differ.append(f"{part.get('slice')} {side}")
    said = "; ".join(differ) or found.gate_reason.strip()
    return [*checks, Check(what, same and not differ, said)]


def _only(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Check:
    """A key is written once: of two rows with one key, somebody else wrote one."""
    same = [one for one in rows if one.get("key") == row.get("key")]
    said = f"{len(same)} row{'s' * (len(same) > 1)} with the key {row.get('key')}"
    return Check("One row has its key", len(same) == 1, said)


def _metric(metrics: Mapping[str, float], name: str) -> float | None:
    return metrics.get(allowed_name(name))


def _check_checks(
    found: Found, evidence: Mapping[str, Any], row: Mapping[str, Any] | None
) -> list[Check]:
    """A drift check, as the package, its own table and MLflow say it."""
    checks = []
    p_value, is_drift = evidence.get("p_value"), evidence.get("is_drift")
    if row is None:
        reason = found.errors.get("checks", "It is not there")
        checks.append(Check("The check's row is there", None, reason))
    else:
        same = (row.get("p_value"), row.get("is_drift")) == (p_value, is_drift)
        said = f"p {row.get('p_value')}, drift {row.get('is_drift')}"
        checks += [
            Check("The check's row says the same", same, said),
            _only(found.checks.rows, row),
        ]
        altered = found.checks.altered
        what = "By its log, the table of drift checks was only appended to"
        checks.append(Check(what, not altered, altered or found.checks.place))
    what = "MLflow's run of the check says the same"
    if found.drift is None:
        reason = found.errors.get("drift", "It is not there")
        return [*checks, Check(what, None, reason)]
    logged = found.drift.metrics.get("drift.p_value")
    same = logged is not None and p_value is not None and abs(logged - p_value) < 1e-9
    return [*checks, Check(what, same, f"p {logged}")]


def _move_facts(move: Move | None) -> dict[str, Any] | None:
    if move is None:
        return None
    return {
        "number": move.number,
        "from": move.version_from,
        "to": move.version_to,
        "at": move.at.isoformat(),
        "who": move.who,
        "why": move.why,
        "note": move.note,
        "evidence": dict(move.evidence),
    }


def _decision_facts(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    names = ("key", "champion", "challenger", "table", "promoted", "reason", "decided_at")
    said = {name: row.get(name) for name in names}
    return {**said, "slices": records.slices_of(row), **records.limits_of(row)}


def _of(move: Move) -> str:
    return f"a {move.why} of {move.who}" if move.why != "by hand" else f"hand, {move.who}"


def _sealed(found: Found, name: str, question: str) -> Answer:
    """The answer that only the package could give, and it does not."""
    if found.info:
        return _unknown(name, question, NOT_RECORDED, (found.package,))
    why = f"The package says it, and is not believed: {found.seal.found}"
    return Answer(name, question, "", {}, (found.package,), (found.seal,), why)


def _unknown(name: str, question: str, why: str, sources: tuple[str, ...] = ()) -> Answer:
    return Answer(name, question, "", {}, sources, (), why)


ASKED: tuple[Callable[[Found], Answer], ...] = (
    rows,
    cleaning,
    code,
    packages,
    quality,
    replaced,
    why,
    cost,
)
