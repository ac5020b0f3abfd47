"""The report of an evaluation: how good, where worse, and which mistakes."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from raypipe import report
from raypipe.models.slices import Slice, Sliced
from raypipe.models.tasks import NUMERIC
from raypipe.registry import made_by, quality_parts
from raypipe.registry.quality_parts import value
from raypipe.serve.evaluation import Evaluation, in_words, unknown_in_words


def write(found: Evaluation, key: str, path: Path, caution: str = "") -> Path:
    """Write the page of one evaluation to `path`; key: names the evaluation. caution: why its
    numbers may be too good."""
    # What was not judged is said at the top: metrics of a part of a table are of that part.
    skipped, unknown = in_words(found.skipped), unknown_in_words(found.unknown)
    facts = (
        ("Model", found.model),
        ("Table", str(found.table)),
        ("Images", f"{found.quality.images:,}"),
        ("Not judged", skipped or "none"),
        *((("Unknown classes", unknown),) if unknown else ()),
        *((("Caution", caution),) if caution else ()),
        ("Code", (made_by.commit() or "no checkout")[:12]),
    )
    header = report.Header(
        f"Evaluation of {found.model}", headline(found), key, datetime.now(timezone.utc), facts
    )
    blocks = [quality_parts.block(found.quality), _slices(found)]
    if found.mistakes:
        blocks.append(_mistakes(found))
    return report.write(report.Page(header, blocks=tuple(blocks)), path)


def headline(found: Evaluation) -> str:
    """The first metric with its interval, and the worst slice if one is worse."""
    whole = found.sliced
    name = metric(found)
    text = f"{name} {value(name, whole.value)} (95 % interval {interval(found, whole)})"
    # Slices come worst first.
    for part in whole.slices:
        if part.worse:
            return f"{text}; worse where {called(part)}: {value(name, part.value)}"
    return text


def metric(found: Evaluation) -> str:
    """What slices are compared by."""
    return "mae" if found.task.kind in NUMERIC else "accuracy"


def interval(found: Evaluation, part: Slice | Sliced) -> str:
    name = metric(found)
    return f"{value(name, part.low)} to {value(name, part.high)}"


def called(part: Slice) -> str:
    return f"{part.column} is {part.name}"


def _slices(found: Evaluation) -> report.Block:
    whole = found.sliced
    name = metric(found)
    rows = []
    for part in whole.slices:
        verdict = "worse" if part.worse else "–"
        images = f"{part.images:,}"
        shown = value(name, part.value)
        rows.append((called(part), images, shown, interval(found, part), verdict))
    columns = (
        ("Images where", ""),
        ("Images", "num"),
        (name, "num"),
        ("Interval", "num"),
        ("Than all images", ""),
    )
    # A sentence first, and below the table how its intervals were made.
    worse = sum(part.worse for part in whole.slices)
    says = f"{worse} of {len(whole.slices)} slices are worse than all images beyond chance."
    if not worse:
        says = f"None of {len(whole.slices)} slices is worse than all images beyond chance."
    if not whole.slices:
        says = f"There is no slice of {whole.least} images or more."
    unit = f"groups by {found.grouped_by}" if found.grouped_by else "images"
    note = (
        f"Bootstrap over {unit}. The intervals hold together with 95 %: with more slices each is "
        "wider. Worst first, by the better end."
    )
    if whole.left_out:
        note += (
            f" {whole.left_out} with fewer than {whole.least} images, or rare texts, are left out."
        )
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
