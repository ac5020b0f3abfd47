"""A plain search through Ray Tune within a time: the peers of benchmarks/equal_time.py.

All have the product's own trainable, decoded images, features and default space, that of a search
with this budget. They differ in who chooses values and who ends trials (PEERS). asha and random
begin with the product's starts (space/portfolio.py), which a usual search does not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import MedianStoppingRule
from ray.tune.search import ConcurrencyLimiter

from benchmarks.ledger import Line
from raypipe.config import replace
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.search import tuner
from raypipe.search.schedulers.tune_schedulers import asha
from raypipe.search.searchers.optuna_search import _suggest
from raypipe.search.searchers.tune_searchers import candidates, plan, searcher
from raypipe.search.settings import SearchConfig
from raypipe.search.space.space import Changes, Space
from raypipe.search.trials import trial_checkpoints, tune_patches
from raypipe.search.trials.epoch_result import EPOCH
from raypipe.search.trials.trial import folder_name, run_trial
from raypipe.search.trials.trial_data import prepare_data
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob
from raypipe.train.trainer import prepare
from raypipe.train.worker import validate

MOST_TRIALS = 500  # more than fit into any budget
EPOCHS = 9  # of a trial, at most


def settings(asked: Line) -> dict[str, Any]:
    """The sections of the job that these methods set."""
    return {"train": {"epochs": EPOCHS}}


def search(asked: Line, job: Job) -> tuple[Line, Callable[[], float]]:
    """What validation found within the budget, and a function that scores the model on test.

    The clock starts here: decoding and features count.
    """
    began = time.monotonic()
    training = tuner.one_worker(job.training)
    rows = pin(training.table, training.feed, kind=training.model.task)
    # The space depends on the budget: it leaves out what takes long to read.
    budgeted = {"samples": MOST_TRIALS, "budget_s": asked["budget_s"]}
    cfg = job.search.model_copy(update=budgeted)
    cfg, space = tuner.check(training, cfg, rows.counts)
    planned = plan(training, cfg, space, [])
    # A model may choose any backbone and side: all methods pay for all of them.
    wanted = candidates(cfg.model_copy(update={"searcher": "tpe"}), space, planned)
    data = prepare_data(training, rows, wanted)
    decoded_s = time.monotonic() - began

    trials = Path(asked["folder"]) / "trials"
    rule = training.train.stopping
    best = Best(rule.metric, rule.mode, began, asked["budget_s"])
    choose, end, run = PEERS[asked["method"]](training, cfg, space, planned)
    given = {"job": training.model_dump(mode="json"), "data": data, "trials": str(trials)}
    with tune_patches.applied():
        tune.Tuner(
            tune.with_resources(tune.with_parameters(run, **given), {"CPU": 1.0}),
            tune_config=tune.TuneConfig(
                metric=rule.metric,
                mode=rule.mode,
                num_samples=len(planned),
                search_alg=choose,
                scheduler=end,
                time_budget_s=max(0.1, asked["budget_s"] - (time.monotonic() - began)),
                # The checkpoints' folder of a trial has this name.
                trial_dirname_creator=folder_name,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                storage_path=asked["folder"], name="tune", callbacks=[best], verbose=0
            ),
        ).fit()
    if best.epoch == 0:
        raise SystemExit(f"No epoch ended in {asked['budget_s']:g} s; {decoded_s:.0f} s to decode")
    told = best.told() | {
        "decoded_s": round(decoded_s, 1),
        "search_s": round(time.monotonic() - began, 1),
    }
    chosen = replace(training, {**best.changes, "feed.carrier": "cache", "feed.val": "test"})

    def test() -> float:
        metrics = validate(chosen, prepare(chosen, rows, here=True), best.weights(trials))
        return float(metrics[rule.metric])

    return told, test


class Best(tune.Callback):  # type: ignore[misc]
    """The best epoch so far, and when it came. An epoch after the budget does not count."""

    def __init__(self, metric: str, mode: str, began: float, budget_s: float) -> None:
        self._metric, self._sign = metric, 1 if mode == "max" else -1
        self._began, self._until = began, began + budget_s
        self._curve: list[tuple[float, float]] = []  # seconds, the best so far
        self._trials: set[str] = set()
        self._epochs = 0
        # Of the best one.
        self.changes: Changes = {}
        self.epoch = 0
        self._trial = ""

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        now = time.monotonic()
        if now > self._until:
            return
        self._epochs += 1
        self._trials.add(trial.trial_id)
        value = float(result[self._metric])
        if not self._curve or self._sign * value > self._sign * self._curve[-1][1]:
            self._curve.append((round(now - self._began, 1), value))
            self.changes = dict(trial.config.get("changes", trial.config))
            self.epoch = int(result[EPOCH])
            self._trial = trial_checkpoints.name_of(trial.path)

    def told(self) -> Line:
        return {
            "val": self._curve[-1][1],
            "curve": self._curve,
            "trials": len(self._trials),
            "epochs": self._epochs,
        }

    def weights(self, trials: Path) -> Any:
        """Of the best epoch, which the trial keeps; among equal ones, that of the least loss."""
        found: dict[int, tuple[Any, Path]] = {}
        for folder in (trials / self._trial).iterdir():
            found |= trial_checkpoints.epoch_checkpoints(folder)
        newest, path = found[max(found)]
        _, best = found.get(newest.best_epoch + 1, (newest, path))
        return checkpoint.read(best).weights


Peer = tuple[Any, Any, Callable[..., None]]  # Tune's searcher and scheduler, and the trainable


def _asha(training: TrainJob, cfg: SearchConfig, space: Space, planned: list[Changes]) -> Peer:
    choose = searcher(training, cfg, space, planned, [], Path(), _cpus())
    return choose, asha(cfg, training.train, len(planned)), run_trial


def _random(training: TrainJob, cfg: SearchConfig, space: Space, planned: list[Changes]) -> Peer:
    return searcher(training, cfg, space, planned, [], Path(), _cpus()), None, run_trial


def _optuna(training: TrainJob, cfg: SearchConfig, space: Space, planned: list[Changes]) -> Peer:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rule = training.train.stopping
    choose = OptunaSearch(
        _Draw(space, planned),
        metric=rule.metric,
        mode=rule.mode,
        sampler=optuna.samplers.TPESampler(seed=training.run.seed),
    )
    end = MedianStoppingRule(time_attr=EPOCH, grace_period=min(cfg.grace, training.train.epochs))
    return ConcurrencyLimiter(choose, _cpus()), end, _run_drawn


@dataclass(frozen=True)
class _Draw:
    """The space as Optuna's searcher takes it: a function that it can pickle."""

    space: Space
    planned: list[Changes]

    def __call__(self, trial: Any) -> dict[str, Any]:
        changes = self.space.draw(partial(_suggest, trial))
        # What the job refuses becomes the random search's trial of the same number.
        if self.space.refusal(changes) is not None:
            changes = self.planned[trial.number % len(self.planned)]
        return {"changes": changes}


def _run_drawn(config: dict[str, Any], **given: Any) -> None:
    run_trial(config["changes"], **given)


PEERS: dict[str, Callable[[TrainJob, SearchConfig, Space, list[Changes]], Peer]] = {
    "asha": _asha,
    "optuna": _optuna,
    "random": _random,
}


def _cpus() -> int:
    return max(1, int(ray.cluster_resources()["CPU"]))
