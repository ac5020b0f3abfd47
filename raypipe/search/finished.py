"""The result of a search whose trials have ended, read from its folder; and its last file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace as with_
from pathlib import Path

from raypipe.config import key_of, replace, save
from raypipe.errors import ConfigError, DataError
from raypipe.feed.dataset import Pinned
from raypipe.models.zoo import ModelConfig
from raypipe.search import kept, soup, together, trial_files, tune_run
from raypipe.search.leaderboard import Trial
from raypipe.search.result import SearchResult
from raypipe.search.schedulers import mutations
from raypipe.search.space.space import Space
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob

BEST = "best.yaml"


def close(result: SearchResult) -> Path:
    """The model of a search is registered: write the best trial's job, on the table's version that
    was searched, for `raypipe train`. Returns the file.

    Only with this file a search counts as finished (left.py).
    """
    table = result.job.table.model_copy(update={"version": result.best.version.version})
    return save(result.job.model_copy(update={"table": table}), result.folder / BEST)


def result_of(folder: Path, key: str, space: Space, pinned: Pinned, seconds: float) -> SearchResult:
    """The result of a finished search, read from its folder."""
    job = space.job
    trials, stopped, decoded, notes = trial_files.read(folder / "result.json")
    # A kill may have come right after result.json.
    kept.clear(folder, trials)
    best = trials[0]
    if best.checkpoint is None:  # an older version may have kept such a search
        raise tune_run.nothing_usable(len(trials), folder)
    # The model is that of the best trial, the average of several, or their ensemble.
    average, ensemble = soup.read(folder), together.read(folder)
    if ensemble is not None:
        # Its first member's job; a soup is of the best trial's.
        best = next((trial for trial in trials if trial.name == ensemble.members[0]), best)
    model = ensemble or average
    # Beside a mean of several, that of the best trial may be damaged or gone.
    _require_whole(folder, str(best.checkpoint) if model is None else model.checkpoint)
    trained = trial_files.training_result(key, pinned.version, pinned.classes, best)
    if model is not None:
        trained = with_(trained, metrics=model.metrics, checkpoint=model.checkpoint)
    # Clocks decide in a search, and another folder may have come to another model: its registered
    # version is not this one's.
    made_of = checkpoint.weights_digest(Path(trained.checkpoint))
    shares = ensemble.shares if ensemble is not None else ()
    trained = with_(trained, key=key_of(key, made_of, *shares))
    checked = None
    if ensemble is not None and ensemble.checked is not None:
        checked = (ensemble.checked, pinned.counts[job.feed.val])
    reached, ran_s = trial_files.read_reached(folder)
    return SearchResult(
        key=key,
        job=mutations.job_of(job, best.changes, best.schedule),
        best=trained,
        trials=trials,
        metric=job.train.stopping.metric,
        seconds=seconds,
        stopped=stopped,
        notes=notes,
        decoded=decoded,
        full_epochs=sum(trial.whole(job.train.epochs) for trial in trials if trial.drawn),
        members=model.members if model else (),
        shares=shares,
        checked=checked,
        pinned=pinned,
        models=_models(job, trials),
        searched=job,
        reached=reached,
        ran_s=ran_s,
    )


def _require_whole(folder: Path, path: str) -> None:
    """Raise DataError if the model in a checkpoint is not what was written."""
    problem = checkpoint.verify(Path(path), model_only=True)
    if problem is not None:
        raise DataError(
            "The search has ended, and the weights of its model are damaged",
            got=f"{path}: {problem}",
            rule="Nothing altered is loaded",
            fix=f"Remove {folder / 'result.json'}, and run the same command again: it chooses "
            "among the trials whose weights are whole (search.keep says how many are kept)",
        )


def _models(job: TrainJob, trials: Sequence[Trial]) -> dict[str, ModelConfig]:
    """Each trial's model, by its name; without those of older searches that are refused today."""
    found = {}
    for trial in trials:
        with suppress(ConfigError):
            found[trial.name] = replace(job, trial.changes).model
    return found
