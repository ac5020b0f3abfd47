"""Bayesian searchers: Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) and Gaussian process, by ask and tell.

The study lies in a journal in the search's folder, so a killed search goes on with what it knew. Each ask has a sampler of
its own, seeded by (seed, trial): what is suggested depends on the study, and not on how often the search was interrupted.
A trial is told its best epoch, whoever ended it; one that failed or was never a number is told as failed. tpe learns
conditional spaces branch by branch; gp models the fields that every trial has and draws the others at random. Where the job
refuses TRIES suggestions in a row, the trial is the random search's.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

from raypipe.errors import ConfigError
from raypipe.search.searchers.tune_searchers import Draws
from raypipe.search.settings import SearchJob
from raypipe.search.space.samplers import Choice, Range, Sampler
from raypipe.search.space.space import Changes, Space, uniform
from raypipe.search.warm_start import Earlier

TRIES = 16
JOURNAL = "optuna.journal"


def require() -> Any:
    """The optuna package, imported when it is asked for. Raises ConfigError without it."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "Searchers tpe, gp and bohb need Optuna",
            fix="pip install 'raypipe[optuna]', or set search.searcher=random",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Suggested(Draws):
    """Optuna's suggestions; the planned trials say what a grid pins, and what to try when the job refuses them."""

    def __init__(
        self,
        job: SearchJob,
        trials: list[Changes],
        space: Space,
        earlier: list[Earlier],
        folder: Path,
    ) -> None:
        super().__init__(job, trials)
        self._kind, self._seed, self._space, self._earlier = (
            job.search.searcher,
            job.run.seed,
            space,
            earlier,
        )
        self._journal = folder / JOURNAL
        self._asked: dict[str, int] = {}  # Tune's id -> Optuna's number, of trials that run
        self._opened: Any = None

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"asked": self._asked}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._asked, self._opened = state["asked"], None

    def _draw(self, i: int, trial_id: str) -> Changes:
        optuna, study, cells = require(), self._study(), self._space.cells
        for attempt in range(TRIES + 1):
            study.sampler = self._sampler(i, attempt)
            pins = {**cells[i % len(cells)], **(self._planned(i) if attempt == TRIES else {})}
            if pins:
                study.enqueue_trial(self._codes(pins))
            asked = study.ask()
            changes = self._space.draw(partial(_suggest, asked))
            if self._space.refusal(changes) is None:
                break
            study.tell(asked.number, state=optuna.trial.TrialState.FAIL)
        self._note(trial_id, asked)
        return changes

    def _note(self, trial_id: str, asked: Any) -> None:
        self._asked[trial_id] = asked.number

    def _planned(self, i: int) -> Changes:
        """The random search's trial, by key."""
        keyed: Changes = {}
        self._space.draw(
            lambda key, how: keyed.setdefault(key, self._trials[i][key.partition("#")[0]])
        )
        return keyed

    def _tell(self, trial_id: str, value: float | None) -> None:
        failed = require().trial.TrialState.FAIL
        if trial_id in self._asked:  # asked before a state was lost: it was told as failed already
            told = {"state": failed} if value is None else {"values": value}
            self._study().tell(self._asked.pop(trial_id), **told, skip_if_finished=True)

    def _sampler(self, i: int, attempt: int) -> Any:
        optuna, seed = require(), int(uniform(self._seed, i, attempt) * 2**32)
        random = min(10, max(4, len(self._trials) // 4))  # trials before the model is asked
        if self._kind == "tpe":
            return self._parzen(seed, random)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an experimental class
            return optuna.samplers.GPSampler(
                seed=seed, n_startup_trials=random, warn_independent_sampling=False
            )

    def _parzen(self, seed: int, random: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental arguments
            shared = {
                "multivariate": True,
                "group": True,
                "constant_liar": True,
                "warn_independent_sampling": False,
            }
            return require().samplers.TPESampler(seed=seed, n_startup_trials=random, **shared)

    def _study(self) -> Any:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> Any:
        """The study with what it knew. Trials that nobody runs any more are told as failed."""
        optuna = require()
        new = not self._journal.exists()
        _mend(self._journal)
        journal = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(self._journal))
        )
        direction = "maximize" if self._better == "max" else "minimize"
        study = optuna.create_study(
            storage=journal, study_name="search", direction=direction, load_if_exists=True
        )
        states = optuna.trial.TrialState
        for _ in study.get_trials(deepcopy=False, states=(states.WAITING,)):
            study.ask()  # pinned values that a kill left behind: they are another trial's
        for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if trial.number not in self._asked.values():
                study.tell(trial.number, state=states.FAIL)
        if new and self._earlier:
            study.add_trials([self._hint(trial) for trial in self._earlier])
        return study

    def _hint(self, trial: Earlier) -> Any:
        codes, samplers = self._codes(trial.keyed), self._samplers()
        how = {key: distribution(samplers[key]) for key in codes}
        return require().create_trial(params=codes, distributions=how, value=trial.metric)

    def _codes(self, keyed: Changes) -> dict[str, float | int | None]:
        """Values as Optuna knows them: choices by number, so that a member may be of any type."""
        samplers = self._samplers()
        return {key: samplers[key].code(value) for key, value in keyed.items()}

    def _samplers(self) -> dict[str, Sampler]:
        return {b.key: b.sampler for f in self._space.fields for b in f.branches}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}


def distribution(how: Sampler) -> Any:
    kinds = require().distributions
    if isinstance(how, Range):
        return kinds.FloatDistribution(how.low, how.high, log=how.log)
    if isinstance(how, Choice):
        return kinds.CategoricalDistribution(range(len(how.values)))
    return kinds.IntDistribution(0, how.count - 1)


def _suggest(trial: Any, key: str, how: Sampler) -> Any:
    if isinstance(how, Range):
        return trial.suggest_float(key, how.low, how.high, log=how.log)
    if isinstance(how, Choice):
        return how.values[trial.suggest_categorical(key, range(len(how.values)))]
    return how.value(trial.suggest_int(key, 0, how.count - 1))


def _mend(journal: Path) -> None:
    """Cut a last line that a kill left half written: Optuna would append to it, and never read the journal again."""
    if journal.exists():
        content = journal.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            journal.write_bytes(whole)
