"""A search in the report's terms: its section of a page, and the page of `raypipe tune`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from raypipe.config import dump
from raypipe.registry import tracking
from raypipe.registry.promote import ModelVersion
from raypipe.search import refit
from raypipe.search.importance import importance
from raypipe.search.leaderboard import SearchResult
from raypipe.watch import report


def section(found: SearchResult) -> report.Search:
    trials = (
        report.Trial(i, f"trial {i}", t.changes, t.metric, t.epochs, t.stopped_early, tuple(h[found.metric] for h in t.history))
        for i, t in enumerate(found.trials, 1)
    )
    return report.Search(found.metric, tuple(trials), found.full_epochs, importance(found.trials))


def write(found: SearchResult, version: ModelVersion, store: tracking.Store, tested: Mapping[str, float]) -> Path:
    """The page of one search, in its folder; returns its path. `tested`: what the test split says of the registered model."""
    decoded = f"{found.decoded:,} images, for {len(found.trials)} trials together"
    again = tuple((name.capitalize(), how) for name, how in refit.told(found).items())
    judged = ", ".join(f"{name.removeprefix('test_')} {value:.4g}" for name, value in tested.items())
    again += (("On the test split", judged),) if judged else ()
    facts = (("Model", str(version)), ("Table", str(found.best.version)), ("Decoded", decoded), *again)
    page = report.Page(
        report.Header(f"Search over {found.job.model.name}", found.stopped or "", found.key, datetime.now(timezone.utc), facts),
        search=section(found),
        lineage=report.Lineage((("Code", tracking.code_commit() or "no checkout"), ("MLflow", store.uri)), dump(found.job)),
    )
    return report.write(page, found.folder / "report.html")
