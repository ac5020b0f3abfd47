"""A plain search through Ray Tune within a time: the peers of benchmarks/equal_time.py.

All have the product's own trainable, decoded images and features, and the default space of a search
with this budget, epochs included. They differ in who chooses values and who ends trials (PEERS).
asha and random begin with the product's starts (space/portfolio.py), which a usual search does not
have, and then draw at random; plain_optuna.py begins with the same.

To this space the features of all stages are added (`with_stages`): our first answer has them. One
pass of the backbone makes both kinds, because the last layer's features are part of the others.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune

from benchmarks import plain_optuna
from benchmarks.ledger import Line
from benchmarks.scored import NoModel, Winner
from raypipe.config import replace
from raypipe.feed.dataset import Pinned, pin
from raypipe.job import Job
from raypipe.models.backbones import BACKBONES
from raypipe.search import feasible
from raypipe.search.contenders import STAGES
from raypipe.search.presets import MANY
from raypipe.search.schedulers.tune_schedulers import asha
from raypipe.search.searchers.tune_searchers import plan, searcher
from raypipe.search.settings import SearchConfig
from raypipe.search.space.space import Changes, Space
from raypipe.search.trials import trial_checkpoints, tune_patches
from raypipe.search.trials.epoch_result import EPOCH, metric_of_result
from raypipe.search.trials.trial import folder_name, run_trial
from raypipe.search.trials.trial_data import prepare_data
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob, TrainResult


def settings(asked: Line) -> dict[str, Any]:
    """The sections of the job that these methods set: as many trials as the time allows."""
    return {"search": {"samples": MANY, "budget_s": asked["budget_s"]}}


def search(asked: Line, job: Job) -> tuple[Line, Winner, Pinned]:
    """What validation found within the budget, and the rows it was found on.

    The clock starts here: decoding and features count. Raises NoModel.
    """
    began = time.monotonic()
    training = feasible.one_worker(job.training)
    rows = pin(training.table, training.feed, kind=training.model.task)
    cfg, _ = feasible.check(training, job.search, rows)
    cfg, space = feasible.check(training, with_stages(cfg, training.model.name), rows)
    training = space.job  # with the epochs that a search with this budget has
    peer = PEERS[asked["method"]](training, cfg, space)
    data = prepare_data(training, rows, _wanted(space, peer))
    decoded_s = time.monotonic() - began

    rule, folder = training.train.stopping, Path(asked["folder"])
    best = Best(rule.metric, rule.mode, began, asked["budget_s"], folder / "trials")
    given = {"job": training.model_dump(mode="json"), "data": data, "trials": str(best.trials)}
    with tune_patches.applied():
        tune.Tuner(
            tune.with_resources(tune.with_parameters(peer.run, **given), {"CPU": 1.0}),
            tune_config=tune.TuneConfig(
                metric=rule.metric,
                mode=rule.mode,
                num_samples=cfg.samples,
                search_alg=peer.choose,
                scheduler=peer.end,
                time_budget_s=max(0.1, asked["budget_s"] - (time.monotonic() - began)),
                # The checkpoints' folder of a trial has this name.
                trial_dirname_creator=folder_name,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                storage_path=asked["folder"], name="tune", callbacks=[best], verbose=0
            ),
        ).fit()
    if best.kept is None:
        raise NoModel(f"No epoch ended in {asked['budget_s']:g} s; {decoded_s:.0f} s to decode")
    told = best.told() | {
        "most_epochs": training.train.epochs,
        "decoded_s": round(decoded_s, 1),
        "search_s": round(time.monotonic() - began, 1),
    }
    chosen = replace(training, best.changes)
    return told, Winner(chosen, _result(asked["method"], rows, best.kept)), rows


def with_stages(cfg: SearchConfig, name: str) -> SearchConfig:
    """The search, whose trials on frozen features draw those of all stages, too.

    name: the job's backbone. Starts keep it. A backbone without stages changes nothing.
    """
    drawn = dict(cfg.space or {})
    modes = drawn.get("model.mode", "frozen")
    if f"{name}{STAGES}" not in BACKBONES or "frozen" not in modes:
        return cfg
    text = f"choice({name}, {name}{STAGES})"
    if "model.mode" in drawn:
        text += " if model.mode == 'frozen'"
        if "model.name" in drawn:
            text += f" else {drawn['model.name']}"
    own = {"model.name": name}
    changes = {
        "space": drawn | {"model.name": text},
        "start": own | (cfg.start or {}),
        "starts": tuple(own | start for start in cfg.starts or ()),
    }
    return cfg.model_copy(update=changes)


@dataclass(frozen=True)
class Peer:
    """Tune's searcher and scheduler, the trainable, and the trials that are known before."""

    choose: Any
    end: Any
    run: Callable[..., None]
    planned: tuple[Changes, ...] = ()


def _wanted(space: Space, peer: Peer) -> list[Changes]:
    """Trials that together need every array that a model may ask for.

    Stages come first: the last layer's features are then read and not computed. All methods pay for
    all arrays.
    """
    wanted = [*space.variants(), *peer.planned]
    return sorted(wanted, key=lambda one: not str(one.get("model.name")).endswith(STAGES))


def _result(method: str, rows: Pinned, folder: Path) -> TrainResult:
    """What a training would have returned whose best epoch this checkpoint is."""
    state = checkpoint.read(folder).state
    history, at = tuple(state.history), state.epoch - 1
    return TrainResult(
        method, rows.version, rows.classes, history[at], history, at, str(folder), seconds=0.0
    )


class Best(tune.Callback):  # type: ignore[misc]
    """The best epoch so far, when it came, and its checkpoint. One after the budget counts nothing.

    Of equally good epochs that of the least loss is the best, as on the product's leaderboard.
    """

    def __init__(self, metric: str, mode: str, began: float, budget_s: float, trials: Path) -> None:
        """began: of `time.monotonic`. trials: the folder of all trials' checkpoints."""
        self._metric, self._sign = metric, 1 if mode == "max" else -1
        self._began, self._until = began, began + budget_s
        self.trials = trials
        self._curve: list[tuple[float, float]] = []  # seconds, the best so far
        self._seen: set[str] = set()  # ids of trials
        self._refused = self._epochs = 0
        # Of the best one.
        self._place = (-math.inf, -math.inf)
        self.changes: Changes = {}
        self.kept: Path | None = None

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        now = time.monotonic()
        if now > self._until:
            return
        if trial.config.get(plain_optuna.REFUSED):
            self._refused += 1
            return
        self._epochs += 1
        self._seen.add(trial.trial_id)
        value = metric_of_result(result, self._metric)
        place = (self._sign * value, -float(result.get("val_loss", math.inf)))
        if math.isnan(value) or place <= self._place:
            return
        if place[0] > self._place[0]:
            self._curve.append((round(now - self._began, 1), value))
        self._place = place
        self.changes = dict(trial.config.get("changes", trial.config))
        self._keep(trial_checkpoints.name_of(trial.path), int(result[EPOCH]))

    def _keep(self, trial: str, epoch: int) -> None:
        """Link the epoch's checkpoint. The trial waits until this is done, and may delete its own
        when a later epoch is better, even one after the budget.
        """
        folder = trial_checkpoints.folder_of(self.trials, trial, self.changes, None)
        before, self.kept = self.kept, self.trials.with_name(f"best-{trial}-{epoch}")
        shutil.copytree(folder / checkpoint.name(epoch), self.kept, copy_function=_link)
        if before is not None:
            shutil.rmtree(before)

    def told(self) -> Line:
        return {
            "val": self._curve[-1][1],
            "curve": self._curve,
            "trials": len(self._seen),
            "refused": self._refused,
            "epochs": self._epochs,
        }


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def _asha(training: TrainJob, cfg: SearchConfig, space: Space) -> Peer:
    planned = plan(training, cfg, space, [])
    choose = searcher(training, cfg, space, planned, [], Path(), _cpus())
    end = asha(cfg, training.train, len(planned))
    return Peer(choose, end, run_trial, tuple(planned))


def _random(training: TrainJob, cfg: SearchConfig, space: Space) -> Peer:
    planned = plan(training, cfg, space, [])
    choose = searcher(training, cfg, space, planned, [], Path(), _cpus())
    return Peer(choose, None, run_trial, tuple(planned))


def _optuna(training: TrainJob, cfg: SearchConfig, space: Space) -> Peer:
    choose, end = plain_optuna.strategy(training, cfg, space, _cpus())
    return Peer(choose, end, plain_optuna.run_drawn)


PEERS: dict[str, Callable[[TrainJob, SearchConfig, Space], Peer]] = {
    "asha": _asha,
    "optuna": _optuna,
    "random": _random,
}


def _cpus() -> int:
    return max(1, int(ray.cluster_resources()["CPU"]))
