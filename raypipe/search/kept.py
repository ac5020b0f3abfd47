"""Which trials keep their checkpoints (`search.keep`).

A checkpoint of a trial is three times its weights, and a trial has two. A thousand trials of a
large network would fill a disk with models that nobody reads again. What is read later: the best
trials' weights, for the model and for a soup.

1. A trial that ended, and that is not among the best that ended, loses its checkpoints when Tune
   has saved that it ended (`saved`): before, a kill would make Tune train it again. Its line of the
   leaderboard goes into `ended.json` first.
2. Only the checkpoints that it has reported go: a group of several workers may still write the next
   one. The rest goes when the search has ended.
3. A trial that failed keeps its checkpoints until the search has ended, because a restored search
   tries it again. So does every trial of a population, whose weights others may take over.
4. When all trials have ended, result.json says who keeps weights. Then the others' go.
"""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raypipe.config import replace as changed
from raypipe.config import to_json
from raypipe.errors import RaypipeError
from raypipe.files import write_atomic
from raypipe.search import leaderboard, trial_files
from raypipe.search.leaderboard import Trial
from raypipe.search.settings import SearchConfig
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.trial import data_key
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob

log = logging.getLogger("raypipe")


class Kept:
    """The trials of a search that ended and still have their checkpoints."""

    def __init__(self, job: TrainJob, cfg: SearchConfig, folder: Path) -> None:
        """folder: of the search."""
        self._job, self._cfg = job, cfg
        self._trials = folder / "trials"
        self._ended: list[Trial] = []
        self._folders: dict[str, Path] = {}  # of their checkpoints, by trial
        self._unneeded: list[tuple[Trial, Path]] = []  # until Tune's state is saved

    def saved(self) -> None:
        """Tune has saved its state: delete what it cannot ask for any more.

        Nothing is deleted if that fails: the end of the search tries again.
        """
        while self._unneeded:
            trial, folder = self._unneeded.pop()
            try:
                _forget(trial, folder)
            except Exception:
                log.debug("The checkpoints of %s stay for now", trial.name, exc_info=True)

    def ended(self, trial: Any) -> None:
        """A trial of Tune's has ended well: note what none of those that ended needs now."""
        if self._cfg.populated or trial.checkpoint is None:
            return
        try:
            pointed = trial_checkpoints.pointed_checkpoint(trial.checkpoint.path, self._trials)
            assert pointed is not None
            line = self._line(trial, check_weights=False)
            marked = self._with(line)
            # Others must not lose theirs for weights that turn out to be damaged at the end.
            if any(is_kept for one, is_kept in marked if one is line):
                marked = self._with(self._line(trial, check_weights=True))
            self._folders[line.name] = pointed.parent
            self._ended = []
            for one, is_kept in marked:
                if is_kept:
                    self._ended.append(one)
                else:
                    self._unneeded.append((one, self._folders.pop(one.name)))
        except Exception:
            log.debug("The checkpoints of %s stay for now", trial.path, exc_info=True)

    def result(self, ranked: Sequence[Trial]) -> list[Trial]:
        """The same trials; each says whether it keeps its weights. The first one does.

        ranked: from best to worst. Raises RaypipeError if nobody has weights any more.
        """
        has_weights = [trial for trial in ranked if trial.kept and trial.checkpoint is not None]
        keeps = {trial.name for trial, is_kept in self._marked(has_weights) if is_kept}
        marked = [
            replace(trial, kept=trial.checkpoint is None or trial.name in keeps) for trial in ranked
        ]
        if not keeps:
            raise _all_damaged(ranked, self._trials.parent)
        # A better one may be gone, if those that were better still turned out to be damaged.
        first = next(trial for trial in marked if trial.name in keeps)
        if first is not marked[0]:
            log.warning("%s is the best trial whose weights are there", first.name)
        return [first, *(trial for trial in marked if trial is not first)]

    def _marked(self, ranked: Sequence[Trial]) -> list[tuple[Trial, bool]]:
        """Each trial, and whether its weights may be read later.

        A soup averages trials of the backbone and resolution of the best one. During a search any
        may become that. An ensemble has a choice among twice as many as it has members, without
        copies, and among the heads of a first answer; the best trial of each backbone, mode and
        resolution is kept anyway.
        """
        cfg = self._cfg
        of_kind: dict[str, int] = defaultdict(int)
        tried: set[str] = set()
        found = []
        for place, trial in enumerate(ranked):
            kind = data_key(changed(self._job, trial.changes))
            of_kind[kind] += 1
            in_soup = of_kind[kind] <= cfg.soup
            is_choice = trial.values not in tried and len(tried) < 2 * cfg.ensemble
            tried.add(trial.values)
            joins = cfg.ensemble > 1 and (is_choice or not trial.drawn)
            usable = trial.checkpoint is not None
            found.append((trial, usable and (place < cfg.keep or in_soup or joins)))
        return found

    def _with(self, line: Trial) -> list[tuple[Trial, bool]]:
        """Those that ended and this one, marked."""
        train = self._job.train
        rule = train.stopping
        ended = [*self._ended, line]
        return self._marked(leaderboard.ranked(ended, rule.metric, rule.mode, train.result))

    def _line(self, trial: Any, check_weights: bool) -> Trial:
        """Of the leaderboard."""
        train = self._job.train
        rule = train.stopping
        ended = SimpleNamespace(
            path=trial.path, config=trial.config, checkpoint=trial.checkpoint, error=None
        )
        return trial_files.trial_of(
            ended, rule.metric, rule.mode, train, self._trials, check_weights
        )


def _all_damaged(trials: Sequence[Trial], folder: Path) -> RaypipeError:
    return RaypipeError(
        f"No trial of {len(trials)} has weights that can be read",
        got=str(folder),
        rule="search.keep had the others' deleted when they ended",
        fix="Check the disk, delete this folder, and search again with a larger search.keep",
    )


def _forget(trial: Trial, folder: Path) -> None:
    """Delete the checkpoints of a trial that has ended, up to the last one it reported."""
    _say_ended(trial, folder)
    last = (trial.epochs, 0)
    _delete(path for path in folder.glob("epoch-*") if checkpoint.place(path) <= last)


def _say_ended(trial: Trial, folder: Path) -> None:
    """Leave the trial's line of the leaderboard where its checkpoints were."""
    file = folder / trial_checkpoints.ENDED
    if folder.exists() and not file.exists():
        write_atomic(file, to_json(asdict(replace(trial, kept=False))))


def clear(folder: Path, trials: Iterable[Trial]) -> None:
    """Delete the checkpoints of the trials that keep none, after result.json has said so.

    folder: of the search. Repeats are harmless.
    """
    for trial in trials:
        of_trial = folder / "trials" / trial.name
        if trial.checkpoint is None:
            _delete(of_trial.glob("*/epoch-*"))
        elif not trial.kept:
            # Not the path as it stands there: the run's folder may have been moved.
            _say_ended(trial, of_trial / Path(trial.checkpoint).parent.name)
            _delete(of_trial.glob("*/epoch-*"))


def _delete(checkpoints: Iterable[Path]) -> None:
    """The manifest goes first, so that a kill leaves none that looks complete."""
    for path in checkpoints:
        (path / checkpoint.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
