"""Optuna as a user of Ray Tune takes it: OptunaSearch and MedianStoppingRule (plain_tune.py).

TPE is Optuna's own with its defaults: it samples each value alone (not multivariate) and knows no
trials that still run. "Median" is Ray's rule, not Optuna's pruner of the same name: OptunaSearch
takes no pruner.

It begins with the starts that asha and random have; what a start leaves open TPE draws. Values that
the job refuses cannot be trained. They are told to the sampler as the worst result at once: a trial
that takes no time, by which TPE learns to leave them alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

# Here, and not where it is needed: imports are on nobody's clock.
import optuna
from ray import tune
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch

from raypipe.search.schedulers.tune_schedulers import median
from raypipe.search.searchers.optuna_search import _suggest
from raypipe.search.settings import SearchConfig
from raypipe.search.space.samplers import Sampler
from raypipe.search.space.space import Space
from raypipe.search.trials.epoch_result import result_of
from raypipe.search.trials.trial import run_trial
from raypipe.train.job import TrainJob

REFUSED = "refused"  # True in the configuration of a trial that is not trained

optuna.logging.set_verbosity(optuna.logging.ERROR)


def strategy(
    training: TrainJob, cfg: SearchConfig, space: Space, concurrent: int
) -> tuple[Any, Any]:
    """Tune's searcher and scheduler. concurrent: trials that may run at a time."""
    rule = training.train.stopping
    choose = OptunaSearch(
        Draw(space),
        metric=rule.metric,
        mode=rule.mode,
        points_to_evaluate=points(cfg, space),
        sampler=optuna.samplers.TPESampler(seed=training.run.seed),
    )
    return ConcurrencyLimiter(choose, concurrent), median(cfg, training.train, cfg.samples)


def points(cfg: SearchConfig, space: Space) -> list[dict[str, Any]]:
    """The search's starts as Optuna knows them: by branch key, choices by number."""
    samplers: dict[str, Sampler] = {}
    for field in space.fields:
        samplers |= {branch.key: branch.sampler for branch in field.branches}
    found: list[dict[str, Any]] = []
    for start in (cfg.start or {}, *(cfg.starts or ())):
        keyed = space.keyed(start)
        point = {key: samplers[key].code(value) for key, value in keyed.items()}
        if point and point not in found:
            found.append(point)
    return found


@dataclass(frozen=True)
class Draw:
    """The space as Optuna's searcher takes it: a function that it can pickle."""

    space: Space

    def __call__(self, trial: Any) -> dict[str, Any]:
        changes = self.space.draw(partial(_suggest, trial))
        refused = self.space.refusal(changes) is not None
        return {"changes": changes, REFUSED: refused}


def run_drawn(config: dict[str, Any], job: dict[str, Any], **given: Any) -> None:
    """Train a trial that was drawn, or tell the worst result of one that the job refuses."""
    if config[REFUSED]:
        rule = TrainJob.model_validate(job).train.stopping
        tune.report(result_of({}, 1, True, rule.metric, rule.mode))
        return
    run_trial(config["changes"], job=job, **given)
