"""The result of a search, or of a search and its refit: its trials, and the model it came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypipe.cluster import usage
from raypipe.feed.dataset import Pinned
from raypipe.models.zoo import ModelConfig
from raypipe.search.leaderboard import Ahead, Spared, Trial, ahead, spared, standings
from raypipe.search.trials.standing import Reached, Standing
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.measure.utilisation import Utilisation, utilisation
from raypipe.train.stopping import Mode
from raypipe.train.trainer import Plan, prepare
from raypipe.train.worker import Prepared

# A trial's name, values, metrics by epoch, and what it took.
Run = tuple[str, dict[str, Any], tuple[dict[str, float], ...], dict[str, float]]


@dataclass(frozen=True)
class SearchResult:
    """What a search, or a search and its refit, came to."""

    key: str
    """The name of the search's folder."""

    job: TrainJob
    """The best trial's job; after a refit, the refit's."""

    best: TrainResult
    """The best trial's training; after a refit, the refit's.

    A refit's has no validation metrics, because it was trained on validation images too.
    """

    trials: tuple[Trial, ...]
    """From best to worst."""

    metric: str

    seconds: float
    """Duration of this call: short if the search was finished before."""

    stopped: str | None = None
    """Why the search ended before its last trial."""

    notes: tuple[str, ...] = ()
    """What the search was to make and did not, as an ensemble, and why; a refit is not among it."""

    decoded: int = 0
    """How many images were decoded, for all trials together."""

    full_epochs: int = 0
    """How many epochs all trials would have run to their ends."""

    members: tuple[str, ...] = ()
    """The trials whose weights (soup.py) or scores (together.py) the model averages; () if it is
    that of one trial."""

    shares: tuple[float, ...] = ()
    """The weights of an ensemble's members; () for any other model."""

    checked: tuple[int, int] | None = None
    """Of how many validation images the chosen ensemble said itself what judged it, and how many
    there are; None: of all, or it is no ensemble."""

    refitted: bool = False

    again: tuple[str, ...] = ()
    """The trials that were trained again for the model of a refit. `job` is that of the first."""

    searched: TrainJob | None = field(default=None, repr=False, compare=False)
    """The job of the search, before any trial's values; None only in tests."""

    reached: tuple[Reached, ...] = ()
    """When its trials became better than all before; () in results of older versions."""

    models: Mapping[str, ModelConfig] = field(default_factory=dict, repr=False, compare=False)
    """Each trial's model, by its name."""

    ran_s: float = 0.0
    """Seconds that its first answer and its trials took, kills included; 0: not known."""

    pinned: Pinned | None = field(default=None, repr=False, compare=False)
    """The rows that its model was trained on; None only in tests."""

    @property
    def is_of_one_refit(self) -> bool:
        """Was its model made by one training after the search? Then that training has reported how
        it ended."""
        return self.refitted and len(self.again) == 1 and not self.stay

    @property
    def stay(self) -> tuple[str, ...]:
        """The members that a refit left as they were."""
        return tuple(name for name in self.members if self.again and name not in self.again)

    @property
    def plan(self) -> Plan:
        """The training of its model, for whoever publishes or tests it."""
        job, pinned = self.job, self.pinned
        assert pinned is not None
        return Plan(job, pinned, self.best.key, self.kept, Prepared(lambda: prepare(job, pinned)))

    @property
    def trials_of_members(self) -> list[Trial]:
        """The trials of `members`. For a soup among them: the best trial, which is as fast."""
        by_name = {trial.name: trial for trial in self.trials}
        return [by_name.get(name, self.trials[0]) for name in self.members]

    @property
    def checked_on(self) -> str:
        """On which sample the choice of the ensemble was checked, in words; "": on all images."""
        if self.checked is None:
            return ""
        sample, images = self.checked
        return f"on {sample:,} of {images:,} validation images"

    @property
    def folder(self) -> Path:
        return self.job.run.path / "search" / self.key

    @property
    def kept(self) -> Path:
        """The folder for the registered model's metrics on the test split.

        Each refit has its own: one search may have any number of refits.
        """
        if self.refitted:
            return self.job.folder(self.best.key)
        return self.folder

    @property
    def used(self) -> Utilisation | None:
        """How busy the nodes were while the trials ran."""
        epochs = [metrics for trial in self.trials for metrics in trial.history]
        return utilisation(usage.read(self.folder / usage.FILE), epochs)

    @property
    def drawn(self) -> int:
        """How many trials ran; heads of a first answer are none."""
        return sum(trial.drawn for trial in self.trials)

    @property
    def heads(self) -> int:
        """How many heads of a first answer were fitted."""
        return len(self.trials) - self.drawn

    @property
    def epochs(self) -> int:
        """How many epochs all trials ran together; heads of a first answer have none."""
        return sum(trial.epochs for trial in self.trials if trial.drawn)

    @property
    def trials_s(self) -> float:
        """Seconds from the beginning of the first answer, or of the first trial, to the end of the
        last one, or to the last time that the best became better."""
        return max([self.ran_s, *(one.seconds for one in self.reached)])

    @property
    def device_s(self) -> float:
        """Seconds times devices of all trials, and of the refit after them."""
        # Older results know the trials' seconds alone.
        workers = self.job.train.most_workers
        held = [trial.device_s or trial.seconds * workers for trial in self.trials]
        return sum(held) + (self.best.device_s if self.refitted else 0.0)

    def runs(self, usd_per_device_s: float | None = None) -> list[Run]:
        """The trials as MLflow gets them, with what each took."""
        runs = []
        for trial in self.trials:
            hours = trial.device_s / 3600
            cost = {"cost.seconds": trial.seconds, "cost.device_hours": hours}
            if usd_per_device_s is not None:
                cost["cost.usd"] = trial.device_s * usd_per_device_s
            runs.append((trial.name, trial.changes, trial.history, cost))
        return runs

    @property
    def spared(self) -> Spared:
        """What ending trials early has saved."""
        # After a refit, `job` is its own: it may train for longer than a trial.
        job = self.searched or self.job
        return spared(self.trials, job.train.epochs, self.full_epochs)

    @property
    def mode(self) -> Mode:
        return self.job.train.stopping.mode

    @property
    def standings(self) -> list[Standing]:
        return standings(self.trials, self.metric, self.mode)

    @property
    def ahead(self) -> list[Ahead]:
        return ahead(self.trials, self.metric, self.mode)
