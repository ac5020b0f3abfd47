"""The quickstart's HTML page: what the story's results look like in the report's terms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raypipe import report
from raypipe.config import dump
from raypipe.job import Job
from raypipe.registry import fetching, made_by, promote
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.search import page as search_page
from raypipe.search.result import SearchResult
from raypipe.tables import scan, verdicts
from raypipe.tables.clean import CleanResult
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.watch.check import CheckResult
from raypipe.watch.evidence_row import now
from raypipe.watch.pictures import picture_of
from raypipe.watch.predicted import read_batch
from raypipe.watch.retrained import RetrainResult

SHOWN = 12  # verdicts of cleaning with a picture


def write(
    job: Job,
    steps: Sequence[report.Step],
    store: Store,
    found: SearchResult,
    cleaned: list[CleanResult],
    checks: dict[str, CheckResult],
    nights: dict[str, TableConfig],
    after: RetrainResult,
    first: ModelVersion,
) -> Path:
    """The page of the whole story; returns its path."""
    package = fetching.fetch(store, first)
    pictures = []
    for name, checked in checks.items():
        mine = read_batch(checked.table, *checked.predictions, nights[name].storage_options)
        pictures.append(
            picture_of(checked.report, name, package, mine, ImageTable.open(nights[name]))
        )
    winner = promote.require_champion(store)
    page = report.Page(
        report.Header(
            "Solar cells: from a table to a better champion",
            "ELPV electroluminescence images, mono- and polycrystalline",
            found.key,
            now(),
            (
                ("Champion", str(winner)),
                ("Model", f"{job.model.name}, {job.model.mode}"),
                ("Table", str(cleaned[-1].clean)),
            ),
        ),
        checks=tuple(pictures),
        gate=report.Gate(
            after.decision.act,
            after.decision.reason,
            after.champion.version,
            after.challenger.version if after.challenger else "–",
            tuple(
                report.Slice(s.slice, s.images, s.champion, s.challenger, s.difference, s.p_value)
                for s in after.slices
            ),
        ),
        search=search_page.section(found),
        cleaning=_cleaning(cleaned[-1]),
        timeline=report.Timeline(tuple(steps)),
        lineage=report.Lineage(
            (
                *(
                    (f"Tag {tag}", f"v{v}")
                    for tag, v in sorted(
                        ImageTable.open(job.table).tags().items(), key=lambda t: t[1]
                    )
                ),
                ("Code", made_by.commit() or "no checkout"),
                ("MLflow", store.uri),
            ),
            dump(job),
        ),
    )
    return report.write(page, job.run.path / "report.html")


def _cleaning(cleaned: CleanResult) -> report.Cleaning:
    """What cleaning found, with pictures of the first SHOWN verdicts."""
    verdict_rows = verdicts.read(cleaned.raw.uri, cleaned.raw, cleaned.policy) or []
    # Dropped images first. Then by value, only to have an order: each verdict measures something
    # else, so the values have no common scale.
    verdict_rows.sort(key=lambda row: (not row["dropped"], row["value"]))
    shown = verdict_rows[:SHOWN]
    images = _images(cleaned, shown)

    def picture(image_id: str, note: str = "") -> report.Picture:
        return report.Picture(images[image_id], image_id[:8], note)

    pictures = []
    for row in shown:
        measured = f"{row['value']:.4g}, limit {row['limit']:.4g}"
        dropped = report.Dropped(
            picture(row["image_id"], measured),
            reason=row["verdict"].replace("_", " "),
            partner=picture(row["partner"]) if row["partner"] else None,
            kept=not row["dropped"],
        )
        pictures.append(dropped)
    return report.Cleaning(
        kept=cleaned.images - cleaned.dropped,
        dropped=cleaned.dropped,
        verdict_counts=cleaned.counts,
        pictures=tuple(pictures),
    )


def _images(cleaned: CleanResult, rows: verdicts.Rows) -> dict[str, bytes]:
    """The images of these verdicts and their partners, by id."""
    ids: set[str] = set()
    for row in rows:
        ids.update(filter(None, (row["image_id"], row["partner"])))
    if not ids:
        return {}
    table = ImageTable(cleaned.raw.uri)
    found = scan.rows(table, cleaned.raw, ["image_id", "image"], {"image_id": sorted(ids)})
    names = found["image_id"].to_pylist()
    return dict(zip(names, found["image"].to_pylist(), strict=True))
