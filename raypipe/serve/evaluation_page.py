"""The report of an evaluation: how good, where worse, and which mistakes."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from raypipe import report
from raypipe.models.slices import Slice
from raypipe.models.tasks import NUMERIC
from raypipe.registry import card, tracking
from raypipe.serve.evaluation import Evaluation


def write(found: Evaluation, key: str, path: Path) -> Path:
    """Write the page of one evaluation to `path`; key: names the evaluation."""
    # What was not judged is said at the top: metrics of a part of a table are of that part.
    skipped = ", ".join(f"{count:,} {why}" for why, count in found.skipped.items())
    facts = (
        ("Model", found.model),
        ("Table", str(found.table)),
        ("Images", f"{found.images:,}"),
        ("Not judged", skipped or "none"),
        ("Code", (tracking.code_commit() or "no checkout")[:12]),
    )
    header = report.Header(
        f"Evaluation of {found.model}", headline(found), key, datetime.now(timezone.utc), facts
    )
    blocks = [_quality(found), _slices(found)]
    if found.mistakes:
        blocks.append(_mistakes(found))
    return report.write(report.Page(header, blocks=tuple(blocks)), path)


def headline(found: Evaluation) -> str:
    """The first metric with its interval, and the worst slice if one is worse."""
    whole = found.sliced
    name = "mae" if found.task.kind in NUMERIC else "accuracy"
    low, high = card.value(name, whole.low), card.value(name, whole.high)
    text = f"{name} {card.value(name, whole.value)} (95 % interval {low} to {high})"
    # Slices come worst first.
    for part in whole.slices:
        if part.worse:
            return f"{text}; worse where {called(part)}: {card.value(name, part.value)}"
    return text


def called(part: Slice) -> str:
    return f"{part.column} is {part.name}"


def _quality(found: Evaluation) -> report.Block:
    facts = [(name, card.value(name, value)) for name, value in found.metrics.items()]
    # Charts: what scores mean, and for numbers how far predictions are from their labels.
    plots = []
    if found.calibration is not None:
        facts.append(("Calibration error", card.percent(found.calibration.error)))
        bins = [(b.confidence, b.right) for b in found.calibration.bins]
        plots.append(report.Plot("Calibration", report.reliability(bins), "Score", "Right"))
    if found.numbers is not None:
        chart = report.residuals(*found.numbers)
        plots.append(report.Plot("Labels and predictions", chart, "Label", "Prediction"))
    # As on a model's card: all confusions of few classes, the most frequent ones of many.
    counts, tables = None, []
    if found.confusion_CC is not None and len(found.confusion_CC) <= card.MOST_CLASSES:
        counts = card.matrix(found.task, found.confusion_CC)
    elif found.confusion_CC is not None:
        tables.append(card.confusions(found.task, found.confusion_CC))
    if found.classes:
        tables.append(card.class_table(found.classes))
    return report.Block(
        "How good it is",
        facts=tuple(facts),
        plots=tuple(plots),
        matrix=counts,
        tables=tuple(tables),
    )


def _slices(found: Evaluation) -> report.Block:
    whole = found.sliced
    metric = "mae" if found.task.kind in NUMERIC else "accuracy"
    rows = []
    for part in whole.slices:
        low, high = card.value(metric, part.low), card.value(metric, part.high)
        verdict = "worse" if part.worse else "–"
        value = card.value(metric, part.value)
        images = f"{part.images:,}"
        rows.append((called(part), images, value, f"{low} to {high}", verdict))
    columns = (
        ("Images where", ""),
        ("Images", "num"),
        (metric, "num"),
        ("Interval", "num"),
        ("Than all images", ""),
    )
    # A sentence first, and below the table how its intervals were made.
    worse = sum(part.worse for part in whole.slices)
    says = f"{worse} of {len(whole.slices)} slices are worse than all images beyond chance."
    if not worse:
        says = f"None of {len(whole.slices)} slices is worse than all images beyond chance."
    unit = f"groups by {found.grouped_by}" if found.grouped_by else "images"
    note = (
        f"Bootstrap over {unit}. The intervals hold together with 95 %: with more slices each is "
        "wider. Worst first, by the better end."
    )
    if whole.left_out:
        note += f" {whole.left_out} slices with few images are left out."
    table = report.Table("Slices", columns, tuple(rows), note)
    return report.Block("Where it is worse", says, tables=(table,))


def _mistakes(found: Evaluation) -> report.Block:
    # Two lines below each picture: what the model says, and what the table says.
    pictures = []
    for mistake in found.mistakes:
        score = "off by" if found.task.kind in NUMERIC else "score"
        said = f"predicted {mistake.predicted or 'no tag'}, {score} {report.number(mistake.score)}"
        labelled = f"labelled {mistake.label or 'no tag'}; {mistake.image_id}"
        pictures.append(report.Picture(mistake.png, said, labelled))
    says = "The mistakes that the model is surest of: wrong labels and hard images are here."
    return report.Block("Mistakes", says, pictures=tuple(pictures), pictures_title="Surest first")
