"""Freeze-thaw search under Ray Tune: our rule (freeze_thaw.py) decides who trains the next epoch.

Tune starts trials in the order in which they are drawn, as soon as there is room. The rule chooses
among all that wait, also among those that have not begun. So:

1. All trials are drawn at the start, and a new one is paused before it begins. Tune starts none of
   them by itself.
2. A trial is chosen only when there is room for it, with all that is known by then.
3. When the rule is done, the trials that wait are stopped. By then all have begun.
4. Trials that ran at a kill are started again at once, and so are those whose last checkpoint Tune
   had not seen. The others stay paused.
"""

from __future__ import annotations

from typing import Any

from ray.tune.experiment import Trial

from raypipe.search.schedulers.curves import target
from raypipe.search.schedulers.freeze_thaw import FreezeThaw
from raypipe.search.schedulers.rule_scheduler import DECISIONS, RuleScheduler
from raypipe.search.space.coordinates import Coordinates
from raypipe.search.space.space import Space
from raypipe.search.trials.epoch_result import EARLIER, ENDED, EPOCH, metric_of_result
from raypipe.search.trials.trial_checkpoints import lacks_last
from raypipe.train.stopping import StoppingConfig

SECONDS = "time_this_iter_s"  # Tune's: since the trial's last report, or since it started


class FreezeThawScheduler(RuleScheduler):
    """Carries out what `rule` decides. A paused trial keeps its checkpoint and no process."""

    rule: FreezeThaw

    def __init__(
        self, rule: FreezeThaw, coordinates: Coordinates, stopping: StoppingConfig, concurrent: int
    ) -> None:
        super().__init__()
        self.rule = rule
        self._coordinates = coordinates
        self._metric = stopping.metric
        self._mode = stopping.mode
        self._concurrent = concurrent
        self._added: set[str] = set()

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """A trial was drawn, or Tune adds it again: after a kill, or because it failed."""
        name = trial.trial_id
        if name in self._added:
            # It failed. Tune starts it again by itself, and would not find it among the paused.
            self.rule.begin(name)
            return
        self._added.add(name)
        self.rule.meet(name, self._coordinates.of(trial.config))
        if self.rule.is_ended(name):
            trial.set_status(Trial.TERMINATED)
        elif self.rule.is_failed(name):
            # It failed before a kill. If it waited, nobody might choose it again. It would end as
            # if it had been stopped early, and might win. So it is tried again at once.
            self.rule.begin(name)
        elif trial.status == Trial.TERMINATED or not self.rule.is_running(name):
            # The end of a search cuts its trials, and the rule is not told. Without an answer the
            # search may go on: the rule would wait for a trial that Tune does not start.
            self.rule.forget(name)
            if not lacks_last(trial):
                trial.set_status(Trial.PAUSED)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        value = metric_of_result(result, self._metric)
        aim = target(result, self._metric, self._mode)
        # Epochs of before a kill are told within milliseconds: the trial would look cheap.
        seconds = None if result.get(EARLIER) else result.get(SECONDS)
        epoch, ended = int(result[EPOCH]), bool(result.get(ENDED))
        verdict = self.rule.report(trial.trial_id, epoch, value, aim, seconds, ended)
        return DECISIONS[verdict]

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self.rule.fail(trial.trial_id)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """The trial that the rule chooses, if there is room for one."""
        trials = {trial.trial_id: trial for trial in tune_controller.get_trials()}
        active = [t for t in trials.values() if t.status in (Trial.PENDING, Trial.RUNNING)]
        if len(active) >= self._concurrent:
            return None
        # Tune may still be saving a trial that the rule has paused. Then it is not in here.
        paused = {name for name, trial in trials.items() if trial.status == Trial.PAUSED}
        chosen = self.rule.choose(paused)
        if chosen is not None:
            return trials[chosen]
        if self.rule.done and not active:
            for name in paused:
                tune_controller.stop_trial(trials[name])
        return None

    def debug_string(self) -> str:
        return "Freeze-thaw search"


def freeze_thaw(
    stopping: StoppingConfig, epochs: int, space: Space, seed: int, concurrent: int
) -> FreezeThawScheduler:
    """The scheduler of a search over `space`, with `concurrent` trials at a time."""
    coordinates = Coordinates(space)
    rule = FreezeThaw(epochs, coordinates.group_D, stopping.mode, seed)
    return FreezeThawScheduler(rule, coordinates, stopping, concurrent)
