"""A search as part of a report page, and the page of `raypipe tune`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from raypipe import report
from raypipe.config import dump
from raypipe.registry import made_by
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.report.formats import begun
from raypipe.search import refit
from raypipe.search.importance import importance
from raypipe.search.leaderboard import Trial
from raypipe.search.result import SearchResult
from raypipe.search.trials.epoch_result import metric_of
from raypipe.train.stopping import FITTED, IN_TIME

_MODES = {"frozen": "frozen", "finetune": "fine-tuned"}


def section(result: SearchResult, usd_per_device_s: float | None = None) -> report.Search:
    """The part of a page that shows all trials and how much each field mattered.

    usd_per_device_s: what a second of a device costs; None: not known.
    """
    trials = []
    for rank, trial in enumerate(result.trials, 1):
        trials.append(_trial(rank, trial, result.metric, usd_per_device_s))
    shares = importance(result.trials, result.metric, result.mode)
    epochs, whole = result.epochs, result.full_epochs
    return report.Search(result.metric, tuple(trials), whole, shares, epochs)


def _trial(rank: int, trial: Trial, metric: str, usd_per_device_s: float | None) -> report.Trial:
    # A failed trial has NaN, which a page cannot show.
    value = trial.metric if math.isfinite(trial.metric) else None
    curve = tuple(metric_of(line, metric) for line in trial.history)
    return report.Trial(
        rank,
        trial.name,
        trial.changes,
        value,
        trial.epochs,
        trial.stopped_early or trial.stopped not in (None, FITTED, IN_TIME),
        curve,
        seconds=trial.seconds,
        device_s=trial.device_s,
        fitted=trial.stopped == FITTED,
        usd=None if usd_per_device_s is None else trial.device_s * usd_per_device_s,
    )


def combined(result: SearchResult) -> dict[str, str]:
    """A line about a model that is of several trials; {} if it is of one."""
    count = len(result.members)
    if result.shares:
        parts = zip(result.members, result.shares, strict=True)
        return {"ensemble": f"of {count}: {', '.join(f'{n} {share:.2f}' for n, share in parts)}"}
    if result.members:
        return {"mean of weights": f"of {count} trials: {', '.join(result.members)}"}
    return {}


def first_answer(result: SearchResult) -> dict[str, str]:
    """A line about what trials had to beat; {} if there was nothing."""
    fitted = [trial for trial in result.trials if not trial.drawn and trial.checkpoint]
    if not fitted:
        return {}
    # They stand in the leaderboard's order.
    best = fitted[0]
    beaten = "beaten"
    if best is result.trials[0]:
        beaten = "no trial beat it" if result.drawn else "no trial finished an epoch"
    values = " ".join(str(value) for value in best.changes.values())
    return {"first answer": f"{result.metric} {best.metric:.4g} ({values}): {beaten}"}


def validated(result: SearchResult) -> dict[str, str]:
    """A line about models that validation has not judged as they predict; {} if there is none.

    A trial is validated with one view of an image, at its own resolution. A model that was trained
    again is not validated, and search.refit may have changed both, or the network.
    """
    if said := _before_refit(result):
        return {"validated": said}
    views = max((model.views for model in result.models.values()), default=1)
    if views == 1:
        return {}
    said = "each trial with one view of an image"
    if not result.refitted and result.shares:
        said += ", the ensemble as it predicts"
    elif not result.refitted and result.job.model.views == 1:
        said += ", as the registered model predicts"
    return {"validated": f"{said}; fine-tuned trials predict over {views}"}


def _before_refit(result: SearchResult) -> str:
    """How the trial was validated that a refit has trained again with more views, other pixels or
    another network; "" if there is none."""
    if not result.refitted:
        return ""
    # The job is that of the first member.
    name, now = (result.members or result.again)[0], result.job.model
    before = result.models.get(name)
    if before is None or name in result.stay:
        return ""
    seen, sees = f"at {before.pixels} px", f"at {now.pixels} px"
    if max(before.views, now.views) > 1:
        seen = f"with one view of an image {seen}"
        sees = f"over {now.views} view{'s' * (now.views > 1)} {sees}"
    if before.mode != now.mode:
        seen, sees = f"{_MODES[before.mode]}, {seen}", f"{_MODES[now.mode]}, {sees}"
    if before.name != now.name:
        seen, sees = f"with {before.name}, {seen}", f"with {now.name}, {sees}"
    if seen == sees:
        return ""
    return f"{name} {seen}, before it was trained again; as registered, {sees}, it is not validated"


def ranking(result: SearchResult) -> dict[str, str]:
    """A line about the order of the trials; {} if all had equally many epochs."""
    # Failed trials have no place in the order, and a first answer has no epochs.
    drawn = [trial for trial in result.trials if trial.drawn]
    lengths = {trial.epochs for trial in drawn if trial.checkpoint is not None}
    if len(lengths) < 2:
        return {}
    # A refit's own job says `last`, whatever the trials' said.
    which = (result.searched or result.job).train.result
    order = f"by each trial's {which} epoch; trials had {min(lengths)} to {max(lengths)} epochs"
    ahead = []
    for one in result.ahead:
        values = f"{one.metric:.4g}, the first one {one.first:.4g}"
        ahead.append(f"{one.trial} after {one.epochs} ({values})")
    if ahead:
        order += f". Ahead of the first one by then: {', '.join(ahead)}"
    return {"order": order}


def not_made(notes: Sequence[str]) -> dict[str, str]:
    """A line about what was asked for and did not come; {} if nothing is missing.

    notes: of the ledger. "No WHAT: WHY" says of something that it was not made.
    """
    said = [note.removeprefix("No ") for note in notes if note.startswith("No ")]
    return {"not made": ". ".join(one[:1].upper() + one[1:] for one in said)} if said else {}


def write(
    result: SearchResult,
    version: ModelVersion,
    store: Store,
    tested: Mapping[str, float],
    usd_per_device_s: float | None = None,
    parts: tuple[report.Block, ...] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Write the page of one search into its folder; returns its path.

    version: the registered model's. tested: its metrics on the test split. usd_per_device_s: what a
    second of a device costs; None: not known. parts: of `outcome.blocks`. notes: see `not_made`.
    """
    header = report.Header(
        f"Search on {Path(result.best.version.uri).name}",
        result.stopped or "",
        result.key,
        datetime.now(timezone.utc),
        _facts(result, version, tested, usd_per_device_s, notes),
    )
    # Where the model comes from: commit, registry and the whole job.
    sources = (("Code", made_by.commit() or "no checkout"), ("MLflow", store.uri))
    lineage = report.Lineage(sources, dump(result.job))
    trials = section(result, usd_per_device_s)
    page = report.Page(header, search=trials, blocks=parts, lineage=lineage)
    return report.write(page, result.folder / "report.html")


def _facts(
    result: SearchResult,
    version: ModelVersion,
    tested: Mapping[str, float],
    usd_per_device_s: float | None,
    notes: Sequence[str] = (),
) -> tuple[tuple[str, str], ...]:
    """(name, text) of the lines at the page's head."""
    began = begun(result.drawn, result.heads)
    facts = [
        ("Model", str(version)),
        ("Table", str(result.best.version)),
        ("Decoded", f"{result.decoded:,} images, for {began}"),
    ]
    lines = first_answer(result) | combined(result) | refit.summary(result)
    lines |= not_made(notes) | validated(result)
    for name, text in lines.items():
        facts.append((name.capitalize(), text))
    if result.shares and result.checked_on:
        facts.append(("Checked", f"when it was chosen, {result.checked_on}"))
    if tested:
        metrics = [f"{name.removeprefix('test_')} {value:.4g}" for name, value in tested.items()]
        facts.append(("On the test split", ", ".join(metrics)))
    for name, text in ranking(result).items():
        facts.append((name.capitalize(), text))
    facts.append(("Took", _hours(result.device_s, usd_per_device_s)))
    if result.spared.share > 0:
        hours = _hours(result.spared.device_s, usd_per_device_s)
        facts.append(
            ("Saved by early stopping", f"{result.spared.share:.0%} of the epochs, {hours}")
        )
    if result.used is not None:
        facts.append(("Nodes", result.used.text()))
    return tuple(facts)


def _hours(device_s: float, usd_per_device_s: float | None) -> str:
    text = f"{device_s / 3600:.4f} device hours"
    return text if usd_per_device_s is None else f"{text}, ${device_s * usd_per_device_s:,.2f}"
