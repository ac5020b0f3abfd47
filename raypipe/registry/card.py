"""The model card: what a model was made from, what it is for, and how good it is, on one page.

After Mitchell et al. 2019, "Model Cards for Model Reporting". It is part of the package, as
`card.html` and `card.md`, and is logged to MLflow, as `card-KEY.html` and `card-KEY.md`. Whoever
publishes a model fills in a `Card`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from raypipe import report
from raypipe.models.quality import Quality
from raypipe.models.tasks import NUMERIC, Task
from raypipe.registry import quality_parts

HTML, MARKDOWN = "card.html", "card.md"


def of_package(page: str, key: str) -> str:
    """The name of a page in an MLflow run. Several packages of one training share its run, as with
    and without calibration, so a page is named by the package's key there."""
    stem, dot, kind = page.partition(".")
    return f"{stem}-{key}{dot}{kind}"


UNKNOWN_USE = (
    "Not stated. The model knows images like those of its training table, and nothing says how it "
    "does on others. Set registry.intended_use."
)
UNKNOWN_LICENCE = "Not stated. Set registry.data_licence."


@dataclass(frozen=True)
class SliceMetrics:
    """The metrics of some of the judged images."""

    name: str
    images: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Judged:
    """How good the model is on images that its weights have not seen."""

    split: str
    caution: str
    """What the split was used for besides, which makes the numbers too good."""

    quality: Quality
    slices: tuple[SliceMetrics, ...]
    left_out: int = 0
    """Sources beside those of `slices`."""
    unclear: int = 0
    """Images of no source that is known: other images have their id, or they have none."""


@dataclass(frozen=True)
class Card:
    """Everything that a card says."""

    name: str
    task: Task
    made_at: datetime
    facts: report.Facts
    """Backbone, resolution, code, key."""

    data: report.Facts
    """Table, version, condition, splits, sources."""

    balance: tuple[tuple[str, int], ...]
    """Training images by class, most first; () for numbers."""

    quantiles: tuple[tuple[str, float], ...]
    """Of the training labels, where they are numbers, by their names; () for classes."""

    judged: Judged
    calibrated: str
    intended_use: str
    data_licence: str
    licences: tuple[tuple[str, str, str], ...]
    """(package, version, licence) of what the model needs."""

    environment: report.Facts

    trained: int | None = None
    """Training images, of which `balance` shows shares. None: its sum, one class an image."""


def html(card: Card) -> str:
    """The card as one HTML page, in the looks of the other reports."""
    # The page's head has a place of its own for the key.
    key = dict(card.facts).get("Key", "")
    facts = tuple(fact for fact in card.facts if fact[0] != "Key")
    # What the model predicts, in a line.
    subtitle = _kind(card.task)
    if card.task.kind not in NUMERIC:
        what = "tags" if card.task.kind == "multi_label" else "classes"
        subtitle += f", {len(card.task.classes):,} {what}"
    header = report.Header(f"Model card: {card.name}", subtitle, key, card.made_at, facts)
    blocks = (_use(card), _quality(card), _data(card), _needs(card))
    return report.render(report.Page(header, blocks=blocks))


def _use(card: Card) -> report.Block:
    return report.Block("Intended use", card.intended_use or UNKNOWN_USE)


def _quality(card: Card) -> report.Block:
    judged = card.judged
    facts = [("Images", report.number(judged.quality.images))]
    if card.calibrated:
        facts.append(("Calibrated", card.calibrated))
    return quality_parts.block(
        judged.quality,
        f"On the split {judged.split}. {judged.caution}",
        tuple(facts),
        (_by_source(judged),) if judged.slices else (),
    )


def _by_source(judged: Judged) -> report.Table:
    names = list(judged.slices[0].metrics)
    rows = []
    for part in judged.slices:
        values = (quality_parts.value(name, part.metrics[name]) for name in names)
        rows.append((part.name, report.number(part.images), *values))
    columns = (("Source", ""), ("Images", "num"), *((name, "num") for name in names))
    more, unclear = judged.left_out, judged.unclear
    notes = []
    if more:
        notes.append(
            f"{more:,} more source{'s' * (more > 1)}, later in the alphabet, are left out."
        )
    if unclear:
        notes.append(f"{unclear:,} more image{'s' * (unclear > 1)} without an id of their own.")
    return report.Table("By source", columns, tuple(rows), " ".join(notes))


def _data(card: Card) -> report.Block:
    licence = card.data_licence or UNKNOWN_LICENCE
    # How many images of each class the model learned from.
    tables: list[report.Table] = []
    columns: tuple[tuple[str, str], ...]
    if card.balance:
        # An image has several tags, or none: their sum is not its number.
        total = card.trained or sum(count for _, count in card.balance)
        rows = []
        for name, count in card.balance:
            rows.append((name, report.number(count), quality_parts.percent(count / total)))
        columns = (("Class", ""), ("Images", "num"), ("Share", "num"))
        tables.append(report.Table("Training images by class", columns, tuple(rows)))
    # Of numbers, between which values they lie, and how many of them where.
    if card.quantiles:
        lines = [(name, report.number(value)) for name, value in card.quantiles]
        columns = (("Part of the images", ""), ("Label up to", "num"))
        tables.append(report.Table("Training labels", columns, tuple(lines)))
    facts: report.Facts = (*card.data, ("Licence of the images", licence))
    return report.Block("What it was made from", facts=facts, tables=tuple(tables))


def _needs(card: Card) -> report.Block:
    columns = (("Package", ""), ("Version", ""), ("Licence", ""))
    table = report.Table("Packages and weights", columns, card.licences)
    return report.Block("What it needs", facts=card.environment, tables=(table,))


def markdown(card: Card) -> str:
    """The card as Markdown: the same numbers, without charts."""
    lines = [f"# Model card: {_plain(card.name)}", "", _kind(card.task), ""]
    lines += _listed(card.facts)
    # The same sections as on the page; a chart has no place in text.
    for block in (_use(card), _quality(card), _data(card), _needs(card)):
        lines += ["", f"## {block.title}", ""]
        if block.text:
            lines += [_paragraph(block.text), ""]
        lines += _listed(block.facts)
        if block.matrix is not None:
            lines += ["", *_written(_as_table(block.matrix))]
        for table in block.tables:
            lines += ["", *_written(table)]
    return "\n".join(lines) + "\n"


def _listed(facts: report.Facts) -> list[str]:
    return [f"- {name}: {_plain(value)}" for name, value in facts]


def _as_table(matrix: report.Matrix) -> report.Table:
    numbers = [(name, "num") for name in matrix.names]
    columns = (("label \\ predicted", ""), *numbers)
    rows = []
    for name, counts in zip(matrix.names, matrix.counts, strict=True):
        texts = [str(count) for count in counts]
        rows.append((name, *texts))
    return report.Table(matrix.title, columns, tuple(rows), matrix.note)


def _written(table: report.Table) -> list[str]:
    lines = [f"### {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    lines.append(_row(name for name, _ in table.columns))
    lines.append("|" + "---|" * len(table.columns))
    lines += [_row(row) for row in table.rows]
    return lines


def _row(values: Iterable[str]) -> str:
    escaped = [_plain(value) for value in values]
    return f"| {' | '.join(escaped)} |"


def _paragraph(text: str) -> str:
    """Text of users on a line of its own, where the first character may make a heading of it."""
    escaped = _plain(text).lstrip()
    return "\\" + escaped if escaped[:1] in set("#>-+=") else escaped


def _plain(text: str) -> str:
    """Text of users in a line of Markdown: a class may be called `a|b` or `<script>`."""
    # The backslash first: it stands before each of the others.
    for mark in ("\\", "|", "`", "[", "*", "~"):
        text = text.replace(mark, "\\" + mark)
    # Within a word an underscore is text: small_cnn stays readable in a file that nobody renders.
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
    return " ".join(text.replace("<", "&lt;").splitlines())


def _kind(task: Task) -> str:
    return {
        "single_label": "One class an image",
        "multi_label": "Several tags an image",
        "probability": "A number from 0 to 1",
        "regression": "A number",
    }[task.kind]
