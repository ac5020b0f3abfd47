"""Bayesian searchers: Optuna's tree-structured Parzen estimator (tpe) and Gaussian process (gp).

TPE is Bergstra et al. 2011, "Algorithms for hyper-parameter optimization". Optuna is used by its
ask and tell interface:

1. For the next trial we ask Optuna's study, and draw the space with what it suggests. If the job
   refuses the values, or an earlier trial has them, we tell the study that they failed and ask
   again. After TRIES times the trial is one of the random search. Starts are its trials, too; the
   study learns from them.
2. When a trial ends, we tell the study its best epoch's value, whatever ended it (with
   train.result=last, its last one's). A trial that failed, or never had a number, is told as
   failed.
3. The study is stored in a journal in the search's folder, so a killed search continues with it.
4. What was drawn is also written down (draws.py). If a kill makes Tune forget a trial, it gets the
   same one again, although the study may know later results by now.
5. Each ask has a sampler of its own, seeded by the seed and the trial's number. So a suggestion
   depends on the study, and not on how often the search was interrupted.

tpe learns conditional spaces branch by branch. gp models the fields that every trial has, and draws
the others at random.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

from raypipe.config import key_of
from raypipe.errors import ConfigError
from raypipe.search.searchers.draws import Draws
from raypipe.search.searchers.planned import Planned
from raypipe.search.settings import SearchConfig
from raypipe.search.space.samplers import Choice, Range, Sampler
from raypipe.search.space.space import Changes, Space, field_of, is_grid, uniform
from raypipe.search.warm_start import Earlier
from raypipe.train.job import TrainJob

TRIES = 16
JOURNAL = "optuna.journal"


def require() -> Any:
    """The optuna package, imported on demand. Raises ConfigError without it."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "Searchers tpe, gp and bohb need Optuna",
            fix="pip install 'raypipe[optuna]', or set search.searcher=random",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Suggested(Planned):
    """Returns Optuna's suggestions.

    The planned trials have the grid's values, and replace suggestions that the job refuses. Those
    that are starts come first, as they are.
    """

    # Here for searches that an older version began: Tune has pickled them without.
    _starts = 0

    def __init__(
        self,
        job: TrainJob,
        cfg: SearchConfig,
        trials: list[Changes],
        space: Space,
        earlier: list[Earlier],
        folder: Path,
        starts: int = 0,
    ) -> None:
        """starts: so many of the first trials are starts (search.start, search.starts, a hint)."""
        super().__init__(job, trials)
        self._starts = starts
        self._kind = cfg.searcher
        self._seed = job.run.seed
        self._space = space
        self._earlier = earlier
        self._journal = folder / JOURNAL
        self._draws = Draws(folder)
        self._asked: dict[str, int] = {}  # Tune's id -> Optuna's number, of trials that run
        self._opened: Any = None  # the study

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"asked": self._asked}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._asked = state["asked"]
        self._opened = None

    def _draw(self, i: int, trial_id: str) -> Changes:
        drawn = self._draws.get(i)
        if drawn is None:
            drawn = self._ask(i)
            self._draws.add(i, drawn)
        self._record(trial_id, drawn)
        return dict(drawn["changes"])

    def _ask(self, i: int) -> dict[str, Any]:
        """Draw trial i: its changes, and the number and the codes of Optuna's trial."""
        failed = require().trial.TrialState.FAIL
        study = self._study()
        cell = self._cell(i)
        # All trials have one seed: equal values would train equal weights.
        tried = {key_of(draw["changes"]) for draw in self._draws.all()}
        for attempt in range(TRIES + 1):
            study.sampler = self._sampler(i, attempt)
            # The grid's values are fixed; of a start, and in the last attempt, all values are.
            pins = dict(cell)
            if attempt == TRIES:
                pins |= self._planned(self._untried(i, tried))
            elif attempt == 0 and i < self._starts:
                pins |= self._planned(i)
            if pins:
                # Optuna takes enqueued values for the next ask.
                study.enqueue_trial(self._codes(pins))
            asked = study.ask()
            changes = self._space.draw(partial(_suggest, asked))
            is_new = attempt == TRIES or key_of(changes) not in tried
            if is_new and self._space.refusal(changes) is None:
                break
            study.tell(asked.number, state=failed)
        return {"changes": changes, "number": asked.number, "codes": dict(asked.params)}

    def _record(self, trial_id: str, drawn: dict[str, Any]) -> None:
        """Remember which of Optuna's trials this is."""
        self._asked[trial_id] = drawn["number"]

    def _untried(self, i: int, tried: set[str]) -> int:
        """The number of a planned trial that trial i can be: of its cell, if possible a new one."""
        cell = self._cell(i)
        for other in (i, *range(len(self._trials))):
            if key_of(self._trials[other]) not in tried and self._cell(other) == cell:
                return other
        return i  # a search that an older version began has planned copies

    def _cell(self, i: int) -> Changes:
        """The grid's values of trial i, as they were planned: without cells that break a limit."""
        branches = [branch for field in self._space.fields for branch in field.branches]
        crossed = {branch.key for branch in branches if is_grid(branch.sampler)}
        return {key: value for key, value in self._planned(i).items() if key in crossed}

    def _planned(self, i: int) -> Changes:
        """The values of the random search's trial i, by branch key."""
        by_field = self._trials[i]
        by_key: Changes = {}

        def suggest(key: str, sampler: Sampler) -> Any:
            value = by_field[field_of(key)]
            by_key[key] = value
            return value

        self._space.draw(suggest)
        return by_key

    def _learn(self, trial_id: str, value: float | None) -> None:
        # Missing: a trial that has told its value before, as one that paused and ended later.
        if trial_id not in self._asked:
            return
        # Opened before the trial leaves `_asked`: a trial that is missing there is told as failed.
        study = self._study()
        number = self._asked.pop(trial_id)
        if value is None:
            failed = require().trial.TrialState.FAIL
            study.tell(number, state=failed, skip_if_finished=True)
        else:
            study.tell(number, values=value, skip_if_finished=True)

    def _sampler(self, i: int, attempt: int) -> Any:
        """Optuna's sampler for one ask."""
        seed = int(uniform(self._seed, i, attempt) * 2**32)
        # So many trials are drawn at random before the model is used.
        random = min(10, max(4, len(self._trials) // 4))
        if self._kind == "tpe":
            return self._parzen(seed, random)
        samplers = require().samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the class is experimental
            return samplers.GPSampler(
                seed=seed, n_startup_trials=random, warn_independent_sampling=False
            )

    def _parzen(self, seed: int, random: int) -> Any:
        samplers = require().samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some arguments are experimental
            return samplers.TPESampler(
                seed=seed,
                n_startup_trials=random,
                multivariate=True,
                group=True,
                constant_liar=True,
                warn_independent_sampling=False,
            )

    def _study(self) -> Any:
        """Optuna's study, opened at the first use."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> Any:
        """The study in the journal, or a new one that knows the earlier searches' trials."""
        optuna = require()
        states = optuna.trial.TrialState
        # Looked up before the backend makes the file.
        is_new = not self._journal.exists()
        _cut_torn_line(self._journal)
        backend = optuna.storages.journal.JournalFileBackend(str(self._journal))
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name="search",
            direction="maximize" if self._better == "max" else "minimize",
            load_if_exists=True,
        )
        # A kill may have left values that were enqueued for a trial and not asked for. The next ask
        # would take them for another trial, so they are asked for now, and fail below.
        for _ in study.get_trials(deepcopy=False, states=(states.WAITING,)):
            study.ask()
        # Trials of the study that no trial of Tune's runs, or will run again.
        live = {*self._asked.values(), *(draw["number"] for draw in self._draws.all())}
        for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if trial.number not in live:
                study.tell(trial.number, state=states.FAIL)
        if is_new and self._earlier:
            study.add_trials([self._hint(trial) for trial in self._earlier])
        return study

    def _hint(self, trial: Earlier) -> Any:
        """A trial of an earlier search as a finished trial of Optuna."""
        codes = self._codes(trial.keyed)
        return self._optuna_trial(codes, trial.metric)

    def _optuna_trial(self, codes: dict[str, Any], value: float) -> Any:
        """A finished trial of Optuna with these codes (see `_codes`)."""
        samplers = self._samplers()
        distributions = {key: distribution(samplers[key]) for key in codes}
        return require().create_trial(params=codes, distributions=distributions, value=value)

    def _codes(self, by_key: Changes) -> dict[str, float | int | None]:
        """Values as Optuna knows them: choices by number, because a member may be of any type."""
        samplers = self._samplers()
        return {key: samplers[key].code(value) for key, value in by_key.items()}

    def _samplers(self) -> dict[str, Sampler]:
        """By branch key."""
        samplers = {}
        for field in self._space.fields:
            for branch in field.branches:
                samplers[branch.key] = branch.sampler
        return samplers


def distribution(sampler: Sampler) -> Any:
    """A sampler as Optuna describes it; values are codes."""
    kinds = require().distributions
    if isinstance(sampler, Range):
        return kinds.FloatDistribution(sampler.low, sampler.high, log=sampler.log)
    if isinstance(sampler, Choice):
        return kinds.CategoricalDistribution(range(len(sampler.values)))
    return kinds.IntDistribution(0, sampler.count - 1)


def _suggest(trial: Any, key: str, sampler: Sampler) -> Any:
    """The value that Optuna suggests for a branch of its trial."""
    if isinstance(sampler, Range):
        return trial.suggest_float(key, sampler.low, sampler.high, log=sampler.log)
    if isinstance(sampler, Choice):
        number = trial.suggest_categorical(key, range(len(sampler.values)))
        return sampler.values[number]
    steps = trial.suggest_int(key, 0, sampler.count - 1)
    return sampler.value(steps)


def _cut_torn_line(journal: Path) -> None:
    """Cut a last line that a kill left incomplete.

    Optuna would append to this line, and then could never read the journal again.
    """
    if not journal.exists():
        return
    content = journal.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        journal.write_bytes(content[:end])
