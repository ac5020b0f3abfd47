"""Eight answers as one page: a verdict, then each question with its sources and its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import yaml

from raypipe import report
from raypipe.registry.quality_parts import percent
from raypipe.registry.quality_parts import value as shown
from raypipe.work.proof.answers import Answer, Status, overall
from raypipe.work.proof.gather import Found

MARKS: dict[Status, tuple[report.Tone, str]] = {
    "proven": ("good", "Checked now"),
    "recorded": ("fact", "Recorded"),
    "unknown": ("quiet", "Not known"),
    "contradicted": ("alert", "Contradicted"),
}
MEANING = {
    "proven": "Every record was compared with what it is about, and agrees.",
    "recorded": "No record contradicts another; what cannot be checked now is marked as recorded.",
    "unknown": "Not everything was recorded when this version was made.",
    "contradicted": "A record does not say what it is about. Do not rely on this version.",
}


def page(found: Found, answers: Sequence[Answer]) -> report.Page:
    """The page of a version."""
    version, status = found.version, overall(answers)
    answered = sum(1 for answer in answers if answer.text)
    header = report.Header(
        f"Model {version}",
        f"{len(answers)} questions about where it comes from, and whether the answers are true now",
        found.info.get("key") or version.tags.get("raypipe.key", "–"),
        datetime.now(timezone.utc),
        (
            (f"The {found.store.alias} now", _in_use(found)),
            ("Registry", found.store.uri),
            ("Seal", version.seal or "none"),
        ),
    )
    tone, _ = MARKS[status]
    top = [
        report.Verdict(tone, f"{answered} of {len(answers)} answered", MEANING[status], "block-1")
    ]
    for i, answer in enumerate(answers, 1):
        if answer.status == "contradicted":
            wrong = next(check for check in answer.checks if check.ok is False)
            top.append(
                report.Verdict(
                    "alert", answer.question, _said(wrong.what, wrong.found), f"block-{i}"
                )
            )
    blocks = tuple(_block(answer) for answer in answers)
    config = found.info.get("config")
    lineage = None
    if config:
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        facts = (("Table", answers[0].facts.get("table") or "–"), ("Package", found.package))
        lineage = report.Lineage(facts, text)
    return report.Page(header, blocks=blocks, verdicts=tuple(top), lineage=lineage)


def _in_use(found: Found) -> str:
    if found.in_use is None:
        return "none"
    named = f"version {found.in_use}"
    return f"{named}, this one" if found.in_use == found.version.version else named


def _block(answer: Answer) -> report.Block:
    notes = []
    if answer.sources:
        notes.append(f"Said by {'; '.join(answer.sources)}")
    if answer.why:
        notes.append(f"Not known: {answer.why}" if answer.text else answer.why)
    tables = [*_EXTRA.get(answer.name, _none)(answer.facts)]
    if answer.checks:
        tables.append(_checks(answer))
    text = answer.text or "Not known."
    return report.Block(
        answer.question, text, tables=tuple(tables), chip=MARKS[answer.status], notes=tuple(notes)
    )


def _checks(answer: Answer) -> report.Table:
    words = {True: "true", False: "not true", None: "cannot be checked"}
    rows = []
    # What is wrong first.
    for check in sorted(answer.checks, key=lambda one: one.ok is not False):
        rows.append((check.what, words[check.ok], check.found))
    return report.Table("Checked now", (("What", ""), ("Result", ""), ("Found", "")), tuple(rows))


def _said(what: str, found: str) -> str:
    return f"{what}: {found}" if found else what


def _none(facts: Mapping[str, Any]) -> Sequence[report.Table]:
    return ()


def _rows(facts: Mapping[str, Any]) -> Sequence[report.Table]:
    rows = []
    for role, part in (facts.get("rows") or {}).items():
        rows.append((role, part["split"], report.number(part["rows"]), part["ids_sha256"]))
    if not rows:
        return ()
    columns = (("Used as", ""), ("Split", ""), ("Rows", "num"), ("sha256 of the ids", ""))
    note = "The hash is that of the JSON list of the sorted ids."
    return (report.Table("Labelled rows", columns, tuple(rows), note),)


def _packages(facts: Mapping[str, Any]) -> Sequence[report.Table]:
    rows = tuple((facts.get("packages") or {}).items())
    if not rows:
        return ()
    columns = (("Package", ""), ("Version", ""))
    return (report.Table("Packages", columns, rows, open_rows=4),)


def _quality(facts: Mapping[str, Any]) -> Sequence[report.Table]:
    tables = []
    judged = facts.get("judged") or {}
    if judged:
        parts = [{"name": "all", "images": judged["images"], "metrics": judged["metrics"]}]
        parts += judged["slices"]
        names = list(judged["metrics"])
        rows = []
        for part in parts:
            values = (_value(name, part["metrics"].get(name)) for name in names)
            rows.append((str(part["name"]), report.number(part["images"]), *values))
        columns = (("Slice", ""), ("Images", "num"), *((name, "num") for name in names))
        title = f"On the split {judged['split']}, by source"
        tables.append(report.Table(title, columns, tuple(rows)))
    compared = facts.get("compared") or ()
    if compared:
        tables.append(_compared(compared))
    return tables


def _compared(slices: Sequence[Mapping[str, Any]]) -> report.Table:
    rows = []
    for part in slices:
        is_share = part.get("unit") is None
        values = [part.get("champion"), part.get("challenger")]
        texts = [percent(v) if is_share and v is not None else report.number(v) for v in values]
        p_value = part.get("p_value")
        p_text = "–" if p_value is None else report.chance(p_value)
        rows.append((str(part.get("slice")), report.number(part.get("images")), *texts, p_text))
    columns = (
        ("Slice", ""),
        ("Images", "num"),
        ("The champion then", "num"),
        ("This one", "num"),
        ("p-value", "num"),
    )
    return report.Table("Compared on the pinned test rows", columns, tuple(rows))


def _value(name: str, value: float | None) -> str:
    return "–" if value is None else shown(name, value)


_EXTRA = {"rows": _rows, "packages": _packages, "quality": _quality}
