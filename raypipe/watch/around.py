"""How a challenger is looked for: a small search around the champion's settings.

New data move what is best: twice the rows want another weight decay, a second domain another rate.
So a retrain tries the champion's own settings first, then some near them, and takes what the
validation split says is best. The test split is not looked at before the gate. Only settings of the
training are moved: backbone, transfer mode and resolution stay the champion's.

The search itself is the job's: its scheduler, soup, refit and limits hold as they did for `raypipe
tune`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from raypipe.config import replace, validate
from raypipe.errors import ConfigError
from raypipe.feed.dataset import parts
from raypipe.search.refit import splits
from raypipe.search.settings import SearchConfig
from raypipe.search.space.parse import left_out, parse
from raypipe.train.job import TrainJob
from raypipe.watch.settings import WatchConfig

log = logging.getLogger("raypipe")

NEAR = 2.0  # a rate is tried from half of the champion's to twice as much
DROPOUTS = (0.0, 0.2, 0.5)


def challenger(
    job: TrainJob,
    watch: WatchConfig,
    refit: dict[str, Any] | None,
    champions: TrainJob,
    version: int,
    sources: Collection[str],
) -> TrainJob:
    """The champion's settings on this version of the job's table, whose training rows are of these
    `sources`.

    What a refit changed is put back as the job has it: trained on validation rows, no trial could
    be judged. Where the job names no resolution, the champion's stays. `train.start_from` is left
    out: it may be gone, and know fewer classes. Where it is trained is the job's to say.

    refit: search.refit of the job. Raises ConfigError if a batch had fewer images than workers,
    and train.sync_bn is set.
    """
    changes: dict[str, Any] = {
        "table": job.table.model_dump() | {"version": version},
        "run": job.run.model_dump(),
        "cluster": job.cluster.model_dump(),
        "registry": job.registry.model_dump(),
        "train.workers": watch.retrain_workers,
        "train.launcher": job.train.launcher,
        "train.start_from": None,
        # Of the champion's own night, if raypipe wrote it (watch.replay).
        "feed.leave_out": job.feed.leave_out,
        # A budget's end was the champion's clock: no challenger should end by it.
        "train.anneal_s": job.train.anneal_s,
    }
    if set(parts(champions.feed.val)) <= set(parts(champions.feed.train)):
        changed = (
            *splits(job),
            "feed.val",
            *(refit or {}),
        )
        # A refit may repeat the job's table; the challenger's has a version, which stays.
        there = {name for name in changed if {name, name.partition(".")[0]} & changes.keys()}
        changes |= {name: _value(job, name) for name in changed if name not in there}
        if changes.get("model.side_px", "") is None:
            # null is the backbone's own resolution, which may be larger than the champion's.
            del changes["model.side_px"]
    found = replace(champions, changes | _sampling(job, watch, champions, sources))
    if found.train.newly_too_few(champions.train):
        size = found.train.batch_size
        raise ConfigError(
            "A batch of the challenger would have fewer images than workers",
            got=f"watch.retrain_workers={watch.retrain_workers}",
            rule=f"The champion has train.sync_bn=true and train.batch_size={size}",
            fix=f"Set watch.retrain_workers={size}, or fewer",
        )
    return found


def _sampling(
    job: TrainJob, watch: WatchConfig, champions: TrainJob, sources: Collection[str]
) -> dict[str, Any]:
    """How the challenger's training rows are drawn. A mix is the job's, else the champion's where
    it knows all the sources.
    """
    feed = champions.feed
    wanted = watch.retrain_sampling
    if wanted == "auto":
        # Several sources, and nobody has said how often each is drawn: equally often.
        several = feed.sampling == "natural" and len(sources) > 1
        wanted = "sources" if several else feed.sampling
    mix = None
    if wanted == "sources":
        knows_all = bool(feed.mix) and set(feed.mix or ()) == set(sources)
        mix = job.feed.mix or (feed.mix if knows_all else None)
    # No other sampling takes a column of weights, which the champion may have had.
    weights = (job.feed.weights or feed.weights) if wanted == "weighted" else None
    return {"feed.sampling": wanted, "feed.mix": mix, "feed.weights": weights}


def is_search(watch: WatchConfig, cfg: SearchConfig, is_head: bool = False) -> bool:
    """Is a challenger searched for? Of the champion's settings alone, too, if a refit follows.

    is_head: is the champion a head on frozen features?
    """
    return watch.retrain_samples > 1 or cfg.trains_again or (is_head and cfg.refit is not None)


def searched(
    cfg: SearchConfig, watch: WatchConfig, first: TrainJob
) -> tuple[TrainJob, SearchConfig]:
    """The search whose first trial is `first`; the others are drawn near it, or from
    watch.retrain_space.

    With a refit the trials are trained by one worker each, and the refit by all of `first`. Values
    by epoch are one training's; the trials have its last ones.
    """
    first, _ = first.stage(first.train.epochs)
    given = watch.retrain_space
    drawn = space(first) if given is None else _stated(given, first)
    # What nothing is drawn for is the champion's; a first answer would be of another backbone.
    changes = {
        "samples": watch.retrain_samples,
        "space": drawn,
        "start": _start(first, drawn),
        "first_answer": False,
    }
    if given is None and first.train.solver != "steps":
        # A head that is fitted at once depends on nothing that is drawn near.
        changes["samples"] = 1
    if changes["samples"] == 1 and given is None:
        # It has all of its epochs, as the refit that follows has: both are outside of a budget.
        changes["budget_s"] = None
    if cfg.populated:  # a population is as large as the machine; this is a small search
        changes["scheduler"] = "asha"
    if cfg.trains_again:
        changes["refit"] = {"train.workers": first.train.workers} | (cfg.refit_changes or {})
        first = replace(first, {"train.workers": 1})
    return first, validate(SearchConfig, cfg.model_dump() | changes)


def space(job: TrainJob) -> dict[str, str]:
    """What is drawn around the settings of this job, as search.space is written."""
    train, drawn = job.train, {}
    if train.lr != "auto":
        drawn["train.lr"] = f"loguniform({train.lr / NEAR!r}, {train.lr * NEAR!r})"
    decay = train.weight_decay or 1e-4
    drawn["train.weight_decay"] = f"loguniform({decay / NEAR**2!r}, {decay * NEAR**2!r})"
    known = sorted({*DROPOUTS, job.model.dropout})
    drawn["model.dropout"] = f"choice({', '.join(map(repr, known))})"
    return drawn


def _start(job: TrainJob, drawn: dict[str, str]) -> dict[str, Any]:
    """The champion's values, as far as a trial can have them. What no trial can is said here:
    the search would name its own settings, and nobody has set those.
    """
    start = {name: _value(job, name) for name in drawn}
    parsed = parse(drawn, job)
    missed = {name for name, value in start.items() if left_out({name: value}, parsed)}
    for name in sorted(missed):
        log.warning(
            "No trial of this retrain has the champion's %s=%s: it is not among what is drawn, %s "
            "(watch.retrain_space)",
            name,
            start[name],
            drawn[name],
        )
    return {name: value for name, value in start.items() if name not in missed}


def _stated(texts: dict[str, str], job: TrainJob) -> dict[str, str]:
    """watch.retrain_space, when the search can draw it. Raises ConfigError with its own name,
    before anything is trained.
    """
    try:
        parse(texts, job)
    except ConfigError as e:
        what = e.what.replace("search.space", "watch.retrain_space")
        raise ConfigError(what, got=e.got, rule=e.rule, fix=e.fix) from None
    return dict(texts)


def _value(job: TrainJob, name: str) -> Any:
    """What a job has under a dotted name."""
    found: Any = job
    for part in name.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found
