"""A search in the report's terms: its section of a page, and the page of `raypipe tune`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from raypipe import report
from raypipe.config import dump
from raypipe.registry import tracking
from raypipe.registry.promote import ModelVersion
from raypipe.search import refit
from raypipe.search.importance import importance
from raypipe.search.leaderboard import SearchResult, Trial
from raypipe.search.trials.epoch_result import metric_of


def section(found: SearchResult) -> report.Search:
    trials = tuple(_trial(rank, trial, found.metric) for rank, trial in enumerate(found.trials, 1))
    return report.Search(
        found.metric, trials, found.full_epochs, importance(found.trials, found.metric, found.mode)
    )


def _trial(rank: int, trial: Trial, metric: str) -> report.Trial:
    curve = tuple(metric_of(line, metric) for line in trial.history)
    worth = trial.metric if math.isfinite(trial.metric) else None
    return report.Trial(
        rank, f"trial {rank}", trial.changes, worth, trial.epochs, trial.stopped_early, curve
    )


def ranking(found: SearchResult) -> dict[str, str]:
    """What to say of the order: nothing where all trials had equally many epochs."""
    lengths = {t.epochs for t in found.trials if t.checkpoint is not None}
    if len(lengths) < 2:
        return {}
    said = f"by each trial's best epoch; trials had {min(lengths)} to {max(lengths)} epochs"
    leads = [
        f"{a.trial} after {a.epochs} ({a.metric:.4g}, the first one {a.first:.4g})"
        for a in found.ahead
    ]
    return {
        "order": said + (f". Ahead of the first one by then: {', '.join(leads)}" if leads else "")
    }


def write(
    found: SearchResult, version: ModelVersion, store: tracking.Store, tested: Mapping[str, float]
) -> Path:
    """The page of one search, in its folder; returns its path. `tested`: what the test split says of the registered model."""
    decoded = f"{found.decoded:,} images, for {len(found.trials)} trials together"
    again = tuple((name.capitalize(), how) for name, how in refit.told(found).items())
    judged = ", ".join(
        f"{name.removeprefix('test_')} {value:.4g}" for name, value in tested.items()
    )
    again += (("On the test split", judged),) if judged else ()
    again += tuple((name.capitalize(), said) for name, said in ranking(found).items())
    facts = (
        ("Model", str(version)),
        ("Table", str(found.best.version)),
        ("Decoded", decoded),
        *again,
    )
    page = report.Page(
        report.Header(
            f"Search over {found.job.model.name}",
            found.stopped or "",
            found.key,
            datetime.now(timezone.utc),
            facts,
        ),
        search=section(found),
        lineage=report.Lineage(
            (("Code", tracking.code_commit() or "no checkout"), ("MLflow", store.uri)),
            dump(found.job),
        ),
    )
    return report.write(page, found.folder / "report.html")
