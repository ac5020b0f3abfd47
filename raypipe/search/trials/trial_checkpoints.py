"""Where a trial's checkpoints are, and how a clone takes over those of another trial.

Layout, below the search's folder:

    trials/TRIAL/KEY/epoch-…        checkpoints, written by the trial's Saver
    trials/TRIAL/KEY/schedule.json  the values by epoch that these weights were trained with
    trials/TRIAL/KEY/ended.json     what the leaderboard says of it, once its checkpoints are gone

1. The checkpoint that Tune stores with a result is a pointer: a file of 100 bytes that names one of
   the trial's own checkpoints. So Tune copies no weights. Population based training (PBT) needs the
   pointer: without a checkpoint Tune clones nothing and reports no error.
2. KEY is a hash of the trial's values and of the checkpoint it began from. So each exploit of PBT
   gets a folder of its own, and a restarted trial finds its own folder again.
3. A clone's folder begins with hard links to the donor's checkpoint and to the donor's best one so
   far (with copies where the file system has no links). The links are made when the exploit is
   decided, because the donor may delete its own files at the next epoch.
4. The clone's schedule is the donor's up to the exploit, then the clone's own values. It is stored
   beside the weights, so it stays true whatever a killed search repeats or forgets.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raypipe.config import key_of
from raypipe.files import write_atomic
from raypipe.search.trials.epoch_result import EPOCH
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState

log = logging.getLogger("raypipe")
POINTER = "pointer.json"
SCHEDULE = "schedule.json"
ENDED = "ended.json"

# Lines {"epoch": N, field: value, …}: the values from epoch N on. N counts finished epochs, so the
# first line has N = 0.
Schedule = tuple[dict[str, Any], ...]


def name_of(folder: str | Path) -> str:
    """The name of the trial to which Tune gave this folder.

    Tune appends `_` and letters when the folder exists already. That happens when a kill made Tune
    forget the trial. It is the same trial, and it continues from its own checkpoints.
    """
    return Path(folder).name.partition("_")[0]


def write_pointer(folder: Path, target: Path, epoch: int) -> None:
    """Make `folder` a Tune checkpoint that names our checkpoint `target`.

    epoch: the last epoch that was reported to Tune.
    """
    pointer = {"checkpoint": str(target), "epoch": epoch}
    (folder / POINTER).write_text(json.dumps(pointer))


def pointed_checkpoint(folder: str | Path | None, trials: Path) -> Path | None:
    """Our checkpoint that a Tune checkpoint names; None without a Tune checkpoint.

    trials: the folder of all trials' checkpoints. The pointer has the path that the checkpoint was
    written under, and the run's folder may have been moved since.
    """
    if not folder:
        return None
    return below(trials, _read_pointer(folder)["checkpoint"])


def below(trials: Path, checkpoint: str) -> Path:
    """The checkpoint in this folder of all trials, wherever it was written."""
    return trials.joinpath(*Path(checkpoint).parts[-3:])


def reported_epoch(folder: str | Path | None) -> int:
    """The last epoch that was reported to Tune when it stored this checkpoint.

    Our checkpoint may contain later epochs, which the trial had no time to report before a kill.
    """
    if not folder:
        return 0
    return int(_read_pointer(folder)["epoch"])


def lacks_last(trial: Any) -> bool:
    """Does Tune know of an epoch of this trial, and not of its checkpoint?

    Tune hears of them one after the other. A search that was killed in between has such a trial. It
    has to start again, and then reports the epoch from its own checkpoint.
    """
    given = trial.checkpoint
    return reported_epoch(given.path if given else None) < trial.last_result.get(EPOCH, 0)


def _read_pointer(folder: str | Path) -> dict[str, Any]:
    return dict(json.loads((Path(folder) / POINTER).read_text()))


def folder_of(trials: Path, trial: str, values: dict[str, Any], pointed: Path | None) -> Path:
    """The folder of a trial that continues from the checkpoint `pointed` with `values`.

    It does not exist yet for a new trial, nor right after an exploit.
    """
    own = trials / trial
    # It continues from its own checkpoint: same folder.
    if pointed is not None and pointed.parent.parent == own:
        return pointed.parent
    return own / key_of(values, str(pointed))


def prepare_folder(trials: Path, trial: str, values: dict[str, Any], pointed: Path | None) -> Path:
    """The trial's folder (see `folder_of`), created with what a clone of `pointed` begins with.

    A folder that exists is left as it is.
    """
    folder = folder_of(trials, trial, values, pointed)
    if folder.exists():
        # A killed search may have forgotten that the trial had ended: it trains again.
        (folder / ENDED).unlink(missing_ok=True)
        return folder
    _delete_old_folders(folder.parent)
    if pointed is None or not _copy_donor(folder, pointed, values):
        folder.mkdir(parents=True, exist_ok=True)
        _write_schedule(folder, ({"epoch": 0, **values},))
    return folder


def read_schedule(folder: Path) -> Schedule:
    """The values by epoch of a trial's folder; () if an older version made the folder."""
    file = folder / SCHEDULE
    if not file.exists():
        return ()
    return tuple(json.loads(file.read_text()))


def _write_schedule(folder: Path, lines: Schedule) -> None:
    write_atomic(folder / SCHEDULE, json.dumps(lines))


def _schedule_of_clone(donor: Schedule, epoch: int, values: dict[str, Any]) -> Schedule:
    """The donor's values up to the exploit at `epoch`, and `values` from there on."""
    before = [line for line in donor if line["epoch"] < epoch]
    return (*before, {"epoch": epoch, **values})


def unreported(state: LoopState, reported: int) -> Iterator[tuple[int, dict[str, float]]]:
    """(epoch, metrics) of every epoch after `reported`.

    These epochs were trained and saved, and the trial was killed before it reported them.
    """
    for epoch in range(reported + 1, state.epoch + 1):
        yield epoch, state.history[epoch - 1]


def state_of(verified: Path) -> LoopState:
    """The loop's state in a checkpoint that `checkpoint.verify` accepted."""
    return checkpoint.read(verified, verified=True).state


def epoch_checkpoints(folder: Path) -> dict[int, tuple[LoopState, Path]]:
    """By epoch: state and path of each complete checkpoint that was saved at an epoch's end.

    Weights are not hashed here: that took as long as reading them all, for each trial. The
    optimizer is not looked at: whoever trains on verifies it.
    """
    checkpoints = {}
    for path in sorted(folder.glob("epoch-*")) if folder.exists() else []:
        if checkpoint.verify(path, hashes=False, model_only=True) is not None:
            continue
        state = state_of(path)
        if state.step == 0:
            checkpoints[state.epoch] = (state, path)
    return checkpoints


def _copy_donor(folder: Path, pointed: Path, values: dict[str, Any]) -> bool:
    """Create `folder` with the donor's checkpoints and schedule; False if its weights are gone.

    A rename at the end makes it all or nothing.
    """
    problem = checkpoint.verify(pointed)
    if problem is not None:
        log.warning(
            "The donor's weights are gone (%s: %s): the trial starts from the beginning",
            pointed,
            problem,
        )
        return False
    state = state_of(pointed)
    # The clone keeps the donor's best epoch, which may become its own best.
    best = pointed.with_name(checkpoint.name(state.best_epoch + 1))
    # A kill may have left half a folder.
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for source in {pointed, best}:
        if source.exists():
            shutil.copytree(source, partial / source.name, copy_function=_link)
    schedule = read_schedule(pointed.parent)
    # A donor of an older version has none. mutations.jsonl then tells the values (pbt.schedules).
    if schedule:
        _write_schedule(partial, _schedule_of_clone(schedule, state.epoch, values))
    partial.rename(folder)
    return True


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _delete_old_folders(own: Path) -> None:
    """Delete all of a trial's folders but the newest.

    The newest is kept because a restored Tune may continue from the state before the last exploit.
    """
    folders = [path for path in own.glob("*") if path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime)
    for folder in folders[:-1]:
        shutil.rmtree(folder, ignore_errors=True)
