"""Population based training (Jaderberg et al. 2017), on top of Ray Tune's PBT and PB2 schedulers.

Every `search.pbt.every` epochs all trials of the population pause and are compared. A weak trial
takes over the weights and optimizer of a strong one, its donor, and continues with other values.
This is an exploit. Each turn costs each trial a pause (20 s for a group of workers on two cores)
and waits for the slowest trial; without waiting, trials that started late would meet no other one.

Tune decides which trial takes over from which. We override the rest:

1. Which weights: the donor's checkpoint, linked into a folder of the clone's own, when the exploit
   is decided (trial_checkpoints.py). Tune would only pass on a name.
2. Which values: they stay within the search space (explore.py); Tune's own would leave a range
   after a few steps. Every exploit changes a value if the job accepts any other one.
3. Random numbers depend on the seed, the trial, the donor and the epoch alone, so a restored search
   repeats them.
4. A trial whose weights are not finite ranks last. It is no donor, and it takes over weights at the
   next turn. Tune would leave it as it is for ever.
5. Tune restores a search without its scheduler's state: turns would come at other epochs, and PB2
   would know no gain. So the state is saved with the search (`state`), and right after each turn:
   a donor that went on has deleted the weights that the turn before needs.

PB2 (Parker-Holder et al. 2020) chooses the values by a Gaussian process of the gains so far, on a
linear scale and for ranges only. It needs scikit-learn, which MLflow brings.
"""

from __future__ import annotations

import logging
import math
import random
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining

from raypipe.config import replace
from raypipe.errors import ConfigError
from raypipe.search.schedulers import mutations
from raypipe.search.schedulers.explore import Draw, draw_of, explore
from raypipe.search.settings import PbtConfig, SearchConfig
from raypipe.search.space.samplers import Steps
from raypipe.search.space.space import Space
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import ENDED, EPOCH, UNUSABLE
from raypipe.train import checkpoint
from raypipe.train.job import MUTABLE, TrainJob

log = logging.getLogger("raypipe")
TRIES = 16  # to find values that the job accepts
# What Tune's PBT knows of a trial, and a turn needs. A donor's checkpoint is looked up at the turn.
_OF_TRIAL = (
    "orig_tag",
    "last_score",
    "last_train_time",
    "last_perturbation_time",
    "last_result",
)


def check(cfg: SearchConfig, space: Space) -> None:
    """Raise ConfigError for a space or settings that a population cannot have."""
    _check_space(cfg.scheduler, space)
    if cfg.searcher != "random":
        raise ConfigError(
            f"search.scheduler={cfg.scheduler} chooses its values itself",
            got=f"search.searcher={cfg.searcher}",
            fix="Set search.searcher=random",
        )
    if cfg.samples * len(space.cells) < 2:
        raise ConfigError(
            f"search.scheduler={cfg.scheduler} needs at least two trials",
            got=f"search.samples={cfg.samples}",
            fix="Set search.samples=8",
        )
    if cfg.pbt.every >= space.most_epochs:
        epochs = space.most_epochs
        fewer = f"search.pbt.every={epochs // 2} or " if epochs > 1 else ""
        raise ConfigError(
            f"The trials of search.scheduler={cfg.scheduler} would end before their first exchange",
            got=f"search.pbt.every={cfg.pbt.every}, train.epochs={epochs}",
            rule="At an exchange, weak trials copy weights and train on with other values",
            fix=f"Set {fewer}train.epochs={2 * cfg.pbt.every}",
        )
    if cfg.concurrent is not None:
        raise ConfigError(
            f"With search.scheduler={cfg.scheduler} all trials are started at once",
            got=f"search.concurrent={cfg.concurrent}",
            fix="Remove it, or set search.samples",
        )


def _check_space(scheduler: str, space: Space) -> None:
    # Three kinds of field that a population cannot draw.
    # Fields of the model's shape or the data cannot change in a running training.
    fixed = [field.name for field in space.fields if field.name not in MUTABLE]
    if fixed:
        mutable = ", ".join(name for name in MUTABLE if not name.startswith("augment."))
        raise ConfigError(
            f"search.scheduler={scheduler} changes values while a trial trains",
            got=", ".join(fixed),
            rule=f"It can change {mutable} and augment.*",
            fix="Take them out of search.space, or search them with search.scheduler=asha first",
        )
    conditional = [field.name for field in space.fields if field.conditional]
    if conditional:
        raise ConfigError(
            f"search.scheduler={scheduler} draws values without conditions",
            got=", ".join(conditional),
            fix="Remove the conditions",
        )
    many = [
        field.name
        for field in space.fields
        if any(isinstance(b.sampler, Steps) and b.sampler.finite is None for b in field.branches)
    ]
    if many:
        raise ConfigError(
            f"search.scheduler={scheduler} moves a value to its neighbour, and there are too many",
            got=", ".join(many),
            fix="Use uniform(…) or loguniform(…), or a larger step",
        )
    choices = [field.name for field in space.fields if space.values(field.name)]
    if scheduler == "pb2" and choices:
        raise ConfigError(
            "search.scheduler=pb2 chooses within ranges",
            got=", ".join(choices),
            fix="Set search.scheduler=pbt",
        )


def population(job: TrainJob, cfg: SearchConfig, space: Space, folder: Path) -> Any:
    """Tune's scheduler for `search.scheduler: pbt` or `pb2`.

    It writes mutations.jsonl and the clones' checkpoints into the search's `folder`.
    """
    draws = {field.name: draw_of(field.branches[0].sampler) for field in space.fields}
    common: dict[str, Any] = {
        "time_attr": EPOCH,
        "perturbation_interval": cfg.pbt.every,
        "quantile_fraction": cfg.pbt.quantile,
        "log_config": False,
        "synch": True,
    }
    if cfg.scheduler == "pb2":
        bounds = {name: list(draw[:2]) for name, draw in draws.items()}
        made = _pb2()(hyperparam_bounds=bounds, **common)
    else:
        # Tune wants a function for each field. It never calls them: `_get_new_config` is ours.
        unused = {name: lambda: None for name in draws}
        made = Pbt(hyperparam_mutations=unused, **common)
    # Tune's constructor takes no arguments of ours.
    made.job = job
    made.settings = cfg.pbt
    made.draws = draws
    made.folder = folder
    made.remembered = {}
    return made


class _Population:
    """What PBT and PB2 do differently here than in Tune; mixed in before Tune's class."""

    job: TrainJob
    settings: PbtConfig
    draws: dict[str, Draw]
    folder: Path

    must_save = False
    """After a turn: Tune's state is to be saved before a trial goes on (saved_state.py)."""

    remembered: dict[str, dict[str, Any]]  # by Tune's id: what was known before a kill

    def state(self) -> dict[str, Any]:
        """What a restored search needs, to be pickled."""
        trials = {}
        for trial, known in self._trial_state.items():  # type: ignore[attr-defined]
            trials[trial.trial_id] = {name: getattr(known, name) for name in _OF_TRIAL}
        return {"own": {name: getattr(self, name) for name in self._names()}, "trials": trials}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; the trials are added afterwards."""
        self.__dict__.update(state["own"])
        self.remembered = state["trials"]

    def _names(self) -> tuple[str, ...]:
        """Of the attributes of Tune's that change."""
        return ("_next_perturbation_sync", "_num_perturbations", "_num_checkpoints")

    def on_trial_add(self, controller: Any, trial: Any) -> None:
        """Add a trial, also one of before a kill, and hide the searcher.

        Tune refuses searchers that learn from finished trials. Ours has drawn all values before the
        first trial starts.
        """
        hidden = SimpleNamespace(search_alg=None)
        super().on_trial_add(hidden, trial)  # type: ignore[misc]
        known = self._trial_state[trial]  # type: ignore[attr-defined]
        for name, value in self.remembered.get(trial.trial_id, {}).items():
            setattr(known, name, value)
        if known.last_train_time < self._next_perturbation_sync or trial.is_finished():
            return
        # It waits for its turn. Tune would start it again, and a turn takes no weights of a trial
        # that it thinks is running.
        if trial_checkpoints.lacks_last(trial):
            self._take_back(trial, known)
        else:
            trial.set_status(Trial.PAUSED)

    def _take_back(self, trial: Any, known: Any) -> None:
        """Forget the trial's last report: it will report it again."""
        known.last_train_time = known.last_perturbation_time

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> Any:
        """Tune's decision; Tune draws the donor from a generator seeded by our seed and epoch."""
        if result.get(ENDED):
            # It has no epoch left, and its weights were offered at its last turn.
            return PopulationBasedTraining.CONTINUE
        before = random.getstate()
        random.seed(f"{self.job.run.seed} {result[EPOCH]}")
        turn = self._next_perturbation_sync
        try:
            return super().on_trial_result(controller, trial, result)  # type: ignore[misc]
        finally:
            random.setstate(before)
            self.must_save = self.must_save or self._next_perturbation_sync > turn

    def choose_trial_to_run(self, controller: Any) -> Any:
        """Tune's choice. If all trials wait for some that have ended, the next turn is opened.

        Tune does not notice that trials ended, and would wait for ever.
        """
        # A restored search has its trials in another order: those that reported last come first.
        in_order = SimpleNamespace(get_trials=lambda: sorted(controller.get_trials(), key=_number))
        chosen = super().choose_trial_to_run(in_order)  # type: ignore[misc]
        live = [trial for trial in controller.get_trials() if not trial.is_finished()]
        waiting = live and all(trial.status == Trial.PAUSED for trial in live)
        if chosen is None and waiting:
            states = self._trial_state  # type: ignore[attr-defined]
            # The next turn is one interval after the trial that is furthest.
            furthest = max(states[trial].last_train_time for trial in live)
            self._next_perturbation_sync = furthest + self.settings.every
            chosen = super().choose_trial_to_run(in_order)  # type: ignore[misc]
        return chosen

    def _save_trial_state(self, state: Any, time: int, result: dict[str, Any], trial: Any) -> Any:
        """Tune's record of a result; lost weights score minus infinity."""
        score = super()._save_trial_state(state, time, result, trial)  # type: ignore[misc]
        if result.get(UNUSABLE) or not math.isfinite(state.last_score):
            state.last_score = -math.inf
        return score

    def _quantiles(self) -> tuple[list[Any], list[Any]]:
        """(the trials that take over weights, the donors): Tune's worst and best.

        Every trial whose weights are lost is among the first, and none among the second.
        """
        lower, upper = super()._quantiles()  # type: ignore[misc]
        # All trials whose weights are lost, wherever Tune put them.
        lost = []
        for trial, state in self._trial_state.items():  # type: ignore[attr-defined]
            if state.last_score == -math.inf and not trial.is_finished():
                lost.append(trial)
        donors = [trial for trial in upper if trial not in lost]
        if not donors:
            return [], []
        takers = list(dict.fromkeys([*lost, *lower]))  # each once
        return takers, donors

    def _get_new_config(self, trial: Any, donor: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values that the trial tries with the donor's weights.

        They differ from the donor's, unless the job refuses all that were tried. The second item is
        for Tune's log.
        """
        for attempt in range(TRIES):
            # PB2 and PBT may propose the donor's own values, or some that the job refuses together.
            values = self._propose(trial, donor, attempt)
            if all(values[name] == donor.config[name] for name in self.draws):
                continue
            with suppress(ConfigError):
                replace(self.job, values)
                return values, {}
        return dict(donor.config), {}

    def _propose(self, trial: Any, donor: Any, attempt: int) -> dict[str, Any]:
        """Values to try; the later attempts draw every field again."""
        last_result = self._trial_state[donor].last_result  # type: ignore[attr-defined]
        names = f"{_name(trial)} {_name(donor)}"
        rng = random.Random(f"{self.job.run.seed} {names} {last_result[EPOCH]} {attempt}")
        resample = self.settings.resample_probability
        if attempt >= TRIES // 2:
            resample = 1.0
        return explore(donor.config, self.draws, resample, rng)

    def _exploit(self, controller: Any, trial: Any, donor: Any) -> None:
        """Let `trial` continue from the donor's weights, and record it.

        A donor whose checkpoint is missing or damaged is skipped with a warning.
        """
        last_checkpoint = self._trial_state[donor].last_checkpoint  # type: ignore[attr-defined]
        trials = self.folder / "trials"
        pointed = trial_checkpoints.pointed_checkpoint(last_checkpoint.path, trials)
        problem = "no checkpoint" if pointed is None else checkpoint.verify(pointed)
        if pointed is None or problem:
            log.warning(
                "Trial %s keeps its weights: those of %s are gone (%s)",
                trial.trial_id,
                donor.trial_id,
                problem,
            )
            return
        # Before Tune changes the trial: what it was.
        mutation = {
            "trial": _name(trial),
            "donor": _name(donor),
            "epoch": trial_checkpoints.state_of(pointed).epoch,
            "before": dict(trial.config),
            "donor_values": dict(donor.config),
        }
        super()._exploit(controller, trial, donor)  # type: ignore[misc]
        # If Tune 2.60 pauses a trial in the middle of a save, it keeps a note to stop the trial.
        # Then it stops the clone after its first epoch (ray-project/ray #57906). A second pause
        # drops the note and does nothing else.
        controller.pause_trial(trial, should_checkpoint=False)
        # Link the donor's files before it may delete them, then record the exploit.
        trial_checkpoints.prepare_folder(trials, _name(trial), trial.config, pointed)
        mutations.append(self.folder, {**mutation, "values": dict(trial.config)})


class Pbt(_Population, PopulationBasedTraining):  # type: ignore[misc]
    """Tune's PBT with our weights and values."""


class _Pb2(_Population):
    """PB2's choice of values, kept within the range; mixed in before Tune's PB2.

    PB2 computes in float32, so its values may be a little outside the range. At the first turn it
    knows no gain and returns the donor's values; then this explores as PBT does.
    """

    data: Any  # PB2's table: a row for each turn of each trial, and one for each exploit
    current: Any  # PB2's list: the values that the exploits of this turn try so far

    def _take_back(self, trial: Any, known: Any) -> None:
        data = self.data
        last = (data["Trial"] == str(trial)) & (data["Time"] == known.last_train_time)
        self.data = data[~last].reset_index(drop=True)
        super()._take_back(trial, known)

    def _names(self) -> tuple[str, ...]:
        return (*super()._names(), "data", "current", "last_exploration_time")

    def _propose(self, trial: Any, donor: Any, attempt: int) -> dict[str, Any]:
        if attempt:
            return super()._propose(trial, donor, attempt)
        seed = f"{self.job.run.seed} {_name(trial)} {_name(donor)} {len(self.data)}"
        before = np.random.get_state()
        np.random.seed(random.Random(seed).getrandbits(32))
        try:
            # PB2's own, past the mixin's.
            pb2: Any = super(_Population, self)
            proposed, _ = pb2._get_new_config(trial, donor)
        finally:
            np.random.set_state(before)
        values = dict(proposed)
        for name, (low, high, *_) in self.draws.items():
            if name in values:
                values[name] = min(max(values[name], low), high)
        return values

    def _get_new_config(self, trial: Any, donor: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Choose values, and write the row from which PB2 measures the next gain.

        PB2 writes a row for each of its proposals. Only one row may stay, and it must hold the
        values that the trial really tries.
        """
        # PB2 adds rows to the table while it proposes; `known` is the table without them.
        known = self.data
        values, operations = super()._get_new_config(trial, donor)
        tried = {name: values[name] for name in self.draws}
        donors_last = known[known["Trial"] == str(donor)].iloc[[-1]]
        row = donors_last.assign(Trial=str(trial), **tried)
        self.data = pandas.concat([known, row], ignore_index=True)
        self.current[-1] = list(tried.values())
        return values, operations

    def _save_trial_state(self, state: Any, time: int, result: dict[str, Any], trial: Any) -> Any:
        score = super()._save_trial_state(state, time, result, trial)
        if result.get(UNUSABLE):
            # The Gaussian process takes finite numbers only: drop the row that PB2 just added.
            self.data = self.data.iloc[:-1]
        return score


def _pb2() -> type:
    """The class of `search.scheduler: pb2`. Raises ConfigError without scikit-learn."""
    try:
        # UCB can be imported only if scikit-learn is installed.
        from ray.tune.schedulers.pb2 import PB2, UCB  # noqa: F401
    except ImportError as e:
        raise ConfigError(
            f"search.scheduler=pb2 needs scikit-learn: {e}", fix="pip install scikit-learn"
        ) from None
    return type("Pb2", (_Pb2, PB2), {})


def _name(trial: Any) -> str:
    return trial_checkpoints.name_of(trial.path)


def _number(trial: Any) -> int:
    """Tune counts trials from 1, and their tags begin with it. A trial's folder comes later."""
    found = re.match(r"\d+", str(trial.experiment_tag))
    return int(found[0]) if found else 0
