"""The quickstart's HTML page: what the story's results look like in the report's terms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raypipe import report
from raypipe.config import dump
from raypipe.job import Job
from raypipe.registry import promote, tracking
from raypipe.registry.promote import ModelVersion
from raypipe.search import page as search_page
from raypipe.search.leaderboard import SearchResult
from raypipe.tables import scan, verdicts
from raypipe.tables.clean import CleanResult
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.watch.check import CheckResult, now, read_batch
from raypipe.watch.pictures import picture_of
from raypipe.watch.retrain import RetrainResult


def write(
    job: Job,
    steps: Sequence[report.Step],
    store: tracking.Store,
    found: SearchResult,
    cleaned: list[CleanResult],
    checks: dict[str, CheckResult],
    nights: dict[str, TableConfig],
    after: RetrainResult,
    first: ModelVersion,
) -> Path:
    """The page of the whole story; returns its path."""
    package = promote.fetch(store, first)
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
                ("Code", tracking.code_commit() or "no checkout"),
                ("MLflow", store.uri),
            ),
            dump(job),
        ),
    )
    return report.write(page, job.run.path / "report.html")


def _cleaning(cleaned: CleanResult) -> report.Cleaning:
    rows = verdicts.read(cleaned.raw.uri, cleaned.raw, cleaned.policy) or []
    shown = sorted(rows, key=lambda r: (not r["dropped"], r["value"]))[:12]
    table = ImageTable(cleaned.raw.uri)
    ids = sorted({i for r in shown for i in (r["image_id"], r["partner"]) if i})
    found = scan.rows(table, cleaned.raw, ["image_id", "image"], {"image_id": ids}) if ids else None
    images = (
        dict(zip(found["image_id"].to_pylist(), found["image"].to_pylist(), strict=True))
        if found is not None
        else {}
    )

    def picture(image_id: str, note: str = "") -> report.Picture:
        return report.Picture(images[image_id], image_id[:8], note)

    return report.Cleaning(
        cleaned.images - cleaned.dropped,
        cleaned.dropped,
        cleaned.counts,
        tuple(
            report.Dropped(
                picture(r["image_id"], f"{r['value']:.4g}, limit {r['limit']:.4g}"),
                r["verdict"].replace("_", " "),
                picture(r["partner"]) if r["partner"] else None,
                kept=not r["dropped"],
            )
            for r in shown
        ),
    )
