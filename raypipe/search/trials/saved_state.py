"""Tune's state of a search, as one file that a kill leaves whole: `tune/state.zip`.

Tune 2.60 saves the trials, the searcher and the callbacks as three files. It writes them into a
folder of its own and a thread copies them, one after the other, while the search goes on. After a
kill one of them may be half, or older than the others. Then Tune logs an error and starts the
search from nothing, with whatever it has restored so far: a searcher that has drawn six trials and
no trial, or trials that the searcher draws again (ray-project/ray #14667). Four changes:

1. As soon as Tune has written its files, they go into one archive, which is replaced in one step. A
   search is restored from that. An older version's search has none; Tune's own files serve then.
2. Tune saves every ten seconds. A kill makes it forget what happened since, and trials decide again
   what they had decided, perhaps otherwise. Here it is EVERY_S, or more where saving takes more
   than 5 % of the time.
3. A scheduler with `must_save` has the state saved at once, before Tune starts another trial, and
   all of it. Tune writes a trial again only after it started or reported. An exploit of PBT changes
   trials that wait: their new values and checkpoint would be missing in a state whose scheduler
   knows that the turn is over. Then a kill undid the exploit, or half of it.
4. `saved` is called after each save: what the state knows now, a kill does not undo.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.tune.execution import experiment_state, tune_controller

from raypipe.files import write_atomic

ARCHIVE = "state.zip"
EVERY_S = 1.0
SHARE = 0.05  # of the time, at most
# Tune names its files by these and by the time at which it started: the newest counts.
_PATTERNS = (
    "experiment_state-*.json",
    "searcher-state-*.pkl",
    "search_gen_state-*.json",
    "callback-states-*.pkl",
)


class _Manager(experiment_state._ExperimentCheckpointManager):  # type: ignore[misc]
    """Tune's, which decides when to save."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.auto_checkpoint_enabled:
            self._checkpoint_period = EVERY_S

    def _update_auto_checkpoint_time(self, time_taken: float) -> None:
        if self.auto_checkpoint_enabled:
            self._checkpoint_period = max(EVERY_S, time_taken * (1 / SHARE - 1))

    def sync_down_experiment_state(self) -> None:
        # On a cluster that outlived the search, the folder may hold files of the killed one.
        _delete_from(Path(self._storage.experiment_driver_staging_path))
        super().sync_down_experiment_state()


@contextmanager
def kept_whole(saved: Callable[[], None]) -> Iterator[None]:
    """Within this context, Tune saves its state as above.

    saved: called after each save.
    """
    controller = tune_controller.TuneController
    manager = tune_controller._ExperimentCheckpointManager
    plain_save, plain_checkpoint = controller.save_to_dir, controller.checkpoint

    def save_to_dir(self: Any) -> None:
        plain_save(self)
        _archive(self)
        saved()

    def checkpoint(self: Any, force: bool = False, wait: bool = False) -> None:
        scheduler = self._scheduler_alg
        must = getattr(scheduler, "must_save", False)
        if must:
            _write_all_again(self)
        plain_checkpoint(self, force=force or must, wait=wait)
        if must:
            scheduler.must_save = False

    controller.save_to_dir, controller.checkpoint = save_to_dir, checkpoint
    tune_controller._ExperimentCheckpointManager = _Manager
    try:
        yield
    finally:
        controller.save_to_dir, controller.checkpoint = plain_save, plain_checkpoint
        tune_controller._ExperimentCheckpointManager = manager


def _write_all_again(controller: Any) -> None:
    """Let Tune write all trials that have not ended as they are now, not as it wrote them last."""
    for trial in controller.get_live_trials():
        controller._mark_trial_to_checkpoint(trial)
        # An exploit changes the trial's checkpoint past the setters that would do this.
        trial.run_metadata.invalidate_cache()


def unpack(folder: Path) -> bool:
    """Put the saved state in the place of Tune's own files in `folder`; False if there is none.

    A search that was killed before Tune saved for the first time has none. Tune would restore it
    all the same, with one trial in total: it takes their number from the state. A search that an
    older version began has Tune's own files alone. Raises for a state that cannot be read.
    """
    archive = folder / ARCHIVE
    if archive.exists():
        with zipfile.ZipFile(archive) as files:
            # Tune's own may be newer, and half.
            _delete_from(folder)
            files.extractall(folder)
    states = sorted(folder.glob(_PATTERNS[0]))
    return bool(states) and bool(json.loads(states[-1].read_text())["trial_data"])


def _delete_from(folder: Path) -> None:
    for pattern in _PATTERNS:
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


def _archive(controller: Any) -> None:
    """Pack the files that Tune has just written into its folder of the search."""
    storage = controller._storage
    written = Path(storage.experiment_driver_staging_path)
    session = controller._session_str
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as files:
        for pattern in _PATTERNS:
            file = written / pattern.replace("*", session)
            if file.exists():
                files.write(file, file.name)
    write_atomic(Path(storage.experiment_fs_path) / ARCHIVE, content.getvalue())
