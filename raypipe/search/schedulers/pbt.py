"""Population based training (Jaderberg et al. 2017): weak trials take strong ones' weights and try other values from there.

Tune's scheduler decides who takes over from whom, and the population meets for it every `every` epochs: left to themselves,
trials that took longer to start would meet nobody. So each turn costs each trial a pause, which is 20 s for a group of workers
on two cores, and waits for the slowest. What is ours is what moves and what is then tried. The clone begins with the donor's
checkpoint, weights and optimizer, in a folder of its own (lineage.py); values are moved within the space, where Tune's own
would leave a range after a few steps; draws depend on the seed, the trial and the epoch alone, so a restored search repeats
them; a trial that diverged is the worst, where Tune would leave it alone for ever. PB2 (Parker-Holder et al. 2020) chooses the
values by a Gaussian process of the gains so far, on a linear scale and for ranges only; it needs scikit-learn, which MLflow
brings.

Every exploit changes a value, where the space has another: PB2 of Tune returns the donor's values as long as it knows no gains,
and a number at the end of its range would be moved outside and clipped back. Weights that are not finite are handed to nobody,
and a trial that has such weights takes over another's at the next turn.

Each exploit is a line of mutations.jsonl in the search's folder. What a trial was trained with is no set of values but a
schedule of them by epoch (lineage.py). `job_of` makes a job of it, which trains the same weights again.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import yaml
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining

from raypipe.config import replace
from raypipe.errors import ConfigError
from raypipe.search.settings import SearchJob
from raypipe.search.space.samplers import Range, Sampler
from raypipe.search.space.space import Space
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import ENDED, EPOCH, UNUSABLE
from raypipe.train import checkpoint
from raypipe.train.job import MUTABLE, TrainJob

log = logging.getLogger("raypipe")
LOG = "mutations.jsonl"
FACTORS = (0.8, 1.2)  # the paper's
TRIES = 16
Draw = list[Any] | tuple[float, float, bool]  # members, or (low, high, logarithmic)


def check(job: SearchJob, space: Space) -> None:
    """Raises ConfigError for a space that cannot change under way, or settings that contradict a population."""
    cfg = job.search
    if fixed := [field.name for field in space.fields if field.name not in MUTABLE]:
        raise ConfigError(
            f"search.scheduler={cfg.scheduler} changes values under a training that has begun",
            got=", ".join(fixed),
            rule=f"It can change {', '.join(n for n in MUTABLE if not n.startswith('augment.'))} and augment.*",
            fix="Search the others with search.scheduler=asha first",
        )
    if drawn := [
        field.name for field in space.fields if any(branch.condition for branch in field.branches)
    ]:
        raise ConfigError(
            "A population draws its values without conditions",
            got=", ".join(drawn),
            fix="Remove the conditions",
        )
    if cfg.searcher != "random":
        raise ConfigError(
            "A population finds its values itself",
            got=f"search.searcher={cfg.searcher}",
            fix="Set search.searcher=random",
        )
    if cfg.samples * len(space.cells) < 2:
        raise ConfigError(
            "A population has at least two trials",
            got=f"search.samples={cfg.samples}",
            fix="Set search.samples=8",
        )
    if cfg.concurrent is not None:
        raise ConfigError(
            "A population is alive as a whole",
            got=f"search.concurrent={cfg.concurrent}",
            fix="Remove it, or set search.samples",
        )
    if cfg.scheduler == "pb2" and (
        chosen := [f.name for f in space.fields if space.values(f.name)]
    ):
        raise ConfigError(
            "search.scheduler=pb2 chooses within ranges",
            got=", ".join(chosen),
            fix="Set search.scheduler=pbt",
        )


def population(job: SearchJob, space: Space, folder: Path) -> Any:
    """Tune's scheduler for `search.scheduler: pbt` or `pb2`, which writes into the search's folder."""
    cfg, draws = (
        job.search,
        {field.name: _draw(field.branches[0].sampler) for field in space.fields},
    )
    common: dict[str, Any] = {
        "time_attr": "epoch",
        "perturbation_interval": cfg.pbt.every,
        "quantile_fraction": cfg.pbt.quantile,
        "log_config": False,
        "synch": True,
    }
    if cfg.scheduler == "pb2":
        made = _pb2()(
            hyperparam_bounds={name: list(draw[:2]) for name, draw in draws.items()}, **common
        )
    else:
        made = Pbt(hyperparam_mutations={name: lambda: None for name in draws}, **common)
    made.job, made.draws, made.folder = job, draws, folder
    return made


def explore(
    values: Mapping[str, Any], draws: Mapping[str, Draw], resample: float, dice: random.Random
) -> dict[str, Any]:
    """The donor's values, each drawn anew with probability `resample`, else moved: numbers of a list to a neighbour, a number
    of a range by one of FACTORS, within the range. Words and flags have no neighbours and stay."""
    moved = dict(values)
    for name, draw in sorted(draws.items()):
        if name not in values:
            continue
        again = dice.random() < resample
        if isinstance(draw, list):
            ordered = sorted(
                v for v in draw if isinstance(v, (int, float)) and not isinstance(v, bool)
            )
            if again or values[name] not in draw:
                moved[name] = dice.choice(draw)
            elif len(ordered) == len(draw):
                at = ordered.index(values[name])
                moved[name] = dice.choice(
                    ordered[max(0, at - 1) : at] + ordered[at + 1 : at + 2] or ordered
                )
        else:
            low, high, logarithmic = draw
            if again and logarithmic:
                moved[name] = math.exp(dice.uniform(math.log(low), math.log(high)))
            elif again:
                moved[name] = dice.uniform(low, high)
            else:
                options = [min(max(values[name] * by, low), high) for by in FACTORS]
                moved[name] = dice.choice([v for v in options if v != values[name]] or options)
            moved[name] = min(max(moved[name], low), high)
    return moved


def job_of(
    job: TrainJob, changes: Mapping[str, Any], schedule: trial_checkpoints.Schedule
) -> TrainJob:
    """The job of a trial. One that took over weights has values by epoch, and `changes` are only its last ones."""
    if len(schedule) < 2:
        return replace(job, dict(changes))
    first, *later = schedule
    by_epoch = {
        line["epoch"]: {name: value for name, value in line.items() if name != "epoch"}
        for line in later
    }
    return replace(
        job,
        {name: value for name, value in first.items() if name != "epoch"} | {"by_epoch": by_epoch},
    )


def schedules(folder: Path) -> dict[str, trial_checkpoints.Schedule]:
    """By trial that took over another's weights, for searches of versions that kept no schedule beside the weights."""
    found: dict[str, list[dict[str, Any]]] = {}
    for told in mutations(folder):
        before = found.get(told["donor"], [{"epoch": 0, **told["donor_values"]}])
        kept = [line for line in before if line["epoch"] < max(1, told["epoch"])]
        found[told["trial"]] = [*kept, {"epoch": told["epoch"], **told["values"]}]
    return {trial: tuple(lines) for trial, lines in found.items()}


def write(file: Path, schedule: Sequence[Mapping[str, Any]]) -> None:
    """The best trial's schedule, for a reader; no file where it took over nobody's weights."""
    if schedule:
        file.write_text(
            yaml.safe_dump([dict(line) for line in schedule], sort_keys=False), encoding="utf-8"
        )


def mutations(folder: Path) -> list[dict[str, Any]]:
    """The exploits so far, in order: trial, donor, epoch of the weights, the values of both before and the trial's after."""
    file = folder / LOG
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class _Weights:
    """What PBT and PB2 of Tune do otherwise here."""

    job: SearchJob
    draws: dict[str, Draw]
    folder: Path

    def on_trial_add(self, controller: Any, trial: Any) -> None:
        """Tune refuses searchers that learn from finished trials. Ours has drawn all values before the first trial starts."""
        super().on_trial_add(SimpleNamespace(search_alg=None), trial)  # type: ignore[misc]

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> Any:
        if result.get(
            ENDED
        ):  # it has nothing left to train, nor to hand on that its last turn did not
            return PopulationBasedTraining.CONTINUE
        before = random.getstate()
        random.seed(f"{self.job.run.seed} {result[EPOCH]}")  # Tune draws the donor
        try:
            return super().on_trial_result(controller, trial, result)  # type: ignore[misc]
        finally:
            random.setstate(before)

    def choose_trial_to_run(self, controller: Any) -> Any:
        """Tune's choice. Where all wait for trials that have ended meanwhile, which Tune does not see, they go on."""
        chosen = super().choose_trial_to_run(controller)  # type: ignore[misc]
        live = [t for t in controller.get_trials() if not t.is_finished()]
        if chosen is None and live and all(t.status == Trial.PAUSED for t in live):
            furthest = max(self._trial_state[t].last_train_time for t in live)  # type: ignore[attr-defined]
            self._next_perturbation_sync = furthest + self.job.search.pbt.every
            chosen = super().choose_trial_to_run(controller)  # type: ignore[misc]
        return chosen

    def _save_trial_state(self, state: Any, time: int, result: dict[str, Any], trial: Any) -> Any:
        score = super()._save_trial_state(state, time, result, trial)  # type: ignore[misc]
        if result.get(UNUSABLE) or not math.isfinite(state.last_score):
            state.last_score = -math.inf
        return score

    def _quantiles(self) -> tuple[list[Any], list[Any]]:
        """Tune's. Weights that are lost have no place among the best, and every trial that has such is among the weakest."""
        lower, upper = super()._quantiles()  # type: ignore[misc]
        states = self._trial_state.items()  # type: ignore[attr-defined]
        lost = [t for t, state in states if state.last_score == -math.inf and not t.is_finished()]
        upper = [t for t in upper if t not in lost]
        return (list(dict.fromkeys([*lost, *lower])), upper) if upper else ([], [])

    def _get_new_config(self, trial: Any, donor: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the trial tries with the donor's weights: other values than the donor's, if the job takes any."""
        for attempt in range(TRIES):
            values = self._tried(trial, donor, attempt)
            if all(values[name] == donor.config[name] for name in self.draws):
                continue
            with suppress(ConfigError):
                replace(self.job, values)
                return values, {}
        return dict(donor.config), {}

    def _tried(self, trial: Any, donor: Any, attempt: int) -> dict[str, Any]:
        epoch = self._trial_state[donor].last_result[EPOCH]  # type: ignore[attr-defined]
        dice = random.Random(f"{self.job.run.seed} {_name(trial)} {_name(donor)} {epoch} {attempt}")
        resample = self.job.search.pbt.resample_probability if attempt < TRIES // 2 else 1.0
        return explore(donor.config, self.draws, resample, dice)

    def _exploit(self, controller: Any, trial: Any, donor: Any) -> None:
        """Secure the donor's weights for the trial and note it, where Tune hands over a name and hopes that they stay."""
        pointed = trial_checkpoints.follow(self._trial_state[donor].last_checkpoint.path)  # type: ignore[attr-defined]
        if pointed is None or (problem := checkpoint.verify(pointed)):
            log.warning(
                "Trial %s keeps its weights: those of %s are gone (%s)",
                trial.trial_id,
                donor.trial_id,
                problem,
            )
            return
        told = {
            "trial": _name(trial),
            "donor": _name(donor),
            "epoch": trial_checkpoints.state_of(pointed).epoch,
        }
        told |= {"before": dict(trial.config), "donor_values": dict(donor.config)}
        super()._exploit(controller, trial, donor)  # type: ignore[misc]
        # Of a trial that it pauses in the middle of a save, Tune 2.60 notes that it be stopped, and stops the clone after its
        # first epoch (ray-project/ray #57906). Pausing what is paused drops the note and does nothing else.
        controller.pause_trial(trial, should_checkpoint=False)
        trial_checkpoints.settle(self.folder / "trials", _name(trial), trial.config, pointed)
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**told, "values": dict(trial.config)}) + "\n")


class Pbt(_Weights, PopulationBasedTraining):  # type: ignore[misc]
    """Tune's, with our weights and values."""


class _Gains(_Weights):
    """PB2's choice, kept within the range: it computes in float32. Where it has none, it explores as PBT does: at the first
    turn it knows no gain of any trial, and returns the donor's values."""

    data: Any  # PB2's record: a line for each turn of each trial, and one for each exploit
    current: Any  # and the values that this turn's exploits try so far

    def _tried(self, trial: Any, donor: Any, attempt: int) -> dict[str, Any]:
        if attempt:
            return super()._tried(trial, donor, attempt)
        before = np.random.get_state()
        np.random.seed(
            random.Random(
                f"{self.job.run.seed} {_name(trial)} {_name(donor)} {len(self.data)}"
            ).getrandbits(32)
        )
        try:
            values, _ = super(_Weights, self)._get_new_config(trial, donor)  # type: ignore[misc]
        finally:
            np.random.set_state(before)
        return {
            n: min(max(v, self.draws[n][0]), self.draws[n][1]) if n in self.draws else v
            for n, v in values.items()
        }

    def _get_new_config(self, trial: Any, donor: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """PB2 measures the next gain from the line that it adds here, so that line holds what the trial really tries."""
        known = self.data
        values, operations = super()._get_new_config(trial, donor)
        line = (
            known[known["Trial"] == str(donor)]
            .iloc[[-1]]
            .assign(Trial=str(trial), **{n: values[n] for n in self.draws})
        )
        self.data = pandas.concat([known, line], ignore_index=True)
        self.current[-1] = [values[name] for name in self.draws]
        return values, operations

    def _save_trial_state(self, state: Any, time: int, result: dict[str, Any], trial: Any) -> Any:
        score = super()._save_trial_state(state, time, result, trial)
        if result.get(UNUSABLE):  # its Gaussian process takes finite numbers only
            self.data = self.data.iloc[:-1]
        return score


def _pb2() -> type:
    try:
        from ray.tune.schedulers.pb2 import PB2, UCB  # noqa: F401  # the second is there when scikit-learn is
    except ImportError as e:
        raise ConfigError(
            f"search.scheduler=pb2 needs scikit-learn: {e}", fix="pip install scikit-learn"
        ) from None
    return type("Pb2", (_Gains, PB2), {})


def _draw(how: Sampler) -> Draw:
    """What a value may become."""
    return (how.low, how.high, how.log) if isinstance(how, Range) else list(how.finite or ())


def _name(trial: Any) -> str:
    return trial_checkpoints.name_of(trial.path)
