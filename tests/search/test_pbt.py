"""Population based training: weights move, values change, and what moved is what was trained on."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import ray
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers.pbt import _PBTTrialState

from raypipe.config import load, replace, save
from raypipe.errors import ConfigError
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.search import tune_run
from raypipe.search.result import SearchResult
from raypipe.search.schedulers import explore, mutations, pbt, tune_schedulers
from raypipe.search.space import parse
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import result_of
from raypipe.search.trials.trial import run_trial
from raypipe.train import checkpoint, trainer
from raypipe.train.checkpoint.saver import Saver, newest
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.trainer import prepare
from raypipe.train.worker import train_rank
from tests.searching import search

Searches = Callable[..., Job]
GOOD, BAD = 1e-2, 1e-9  # rates: one learns, the other stands still


def population(folder: Path, searches: Searches, **more: Any) -> Job:
    """Two trials, of which the one that stands still is the worse at the first turn."""
    return searches(
        folder,
        **{
            "search.samples": 1,
            "search.scheduler": "pbt",
            "search.space": {"train.lr": f"grid({BAD}, {GOOD})"},
            "search.pbt": {"every": 2, "quantile": 0.5, "resample_probability": 0.0},
            "train.epochs": 6,
            "train.keep_best": 6,  # so that what clones began with is still there to look at
            "train.schedule": "constant",
            "train.warmup": 0.0,
            **more,
        },
    )


def moved(job: Job, result: SearchResult) -> dict[str, Any]:
    """The last exploit, which is the one that the clone's folder began with."""
    return mutations.read(job.run.path / "search" / result.key)[-1]


def clone_of(job: Job, result: SearchResult, told: dict[str, Any]) -> Path:
    """The checkpoints of the clone since its last exploit."""
    homes = (job.run.path / "search" / result.key / "trials" / told["trial"]).glob("*")
    return max((p for p in homes if p.is_dir()), key=lambda p: p.stat().st_mtime)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.read(folder)
    return {**found.weights, **{f"optimizer/{k}": v for k, v in found.optimizer.items()}}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def searched(
    ray_session: str, searches: Searches, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, SearchResult]:
    job = population(tmp_path_factory.mktemp("pbt"), searches)
    return job, search(job)


def test_a_trial_takes_over_weights_and_trains_on_with_the_new_value(
    searched: tuple[Job, SearchResult],
) -> None:
    """Trained again from the donor's checkpoint with the values that the log names, the clone's
    next epoch is the same to the bit, optimizer and all; with the donor's values it is another.
    """
    job, result = searched
    told = moved(job, result)
    assert told["donor_values"] != told["values"] and told["trial"] != told["donor"]
    found = clone_of(job, result, told)
    begun, first = (found / checkpoint.name(told["epoch"] + i) for i in range(2))

    def trained(values: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
        plain = job.training
        mine = replace(plain, {**values, "feed.carrier": "cache"})
        torch.set_num_threads(1)
        with Saver(folder, mine.train, recent=job.train.epochs) as saver:
            train_rank(
                mine,
                prepare(mine, pin(mine.table, mine.feed)),
                begun,
                saver,
                lambda metrics, state: None,
            )
        return tensors(folder / first.name)

    assert equal(trained(told["values"], job.run.path / "again"), tensors(first))
    assert not equal(trained(told["donor_values"], job.run.path / "other"), tensors(first))


def test_the_clone_begins_with_the_donors_checkpoint_and_history(
    searched: tuple[Job, SearchResult],
) -> None:
    job, result = searched
    told = moved(job, result)
    folder = job.run.path / "search" / result.key / "trials"
    begun = clone_of(job, result, told) / checkpoint.name(told["epoch"])
    donors = [
        p for p in (folder / told["donor"]).glob(f"*/{begun.name}") if checkpoint.verify(p) is None
    ]
    assert checkpoint.verify(begun) is None
    assert donors and equal(tensors(donors[0]), tensors(begun))
    clone = next(t for t in result.trials if told["trial"] == t.name)
    assert list(clone.history[: told["epoch"]]) == trial_checkpoints.state_of(begun).history


def test_the_schedule_says_what_the_weights_were_trained_with(
    searched: tuple[Job, SearchResult],
) -> None:
    job, result = searched
    told = moved(job, result)
    clone = next(t for t in result.trials if told["trial"] == t.name)
    assert clone.schedule[0] == {
        "epoch": 0,
        "train.lr": GOOD,
    }  # the donor's, whose weights these are
    assert (
        clone.schedule[-1] == {"epoch": told["epoch"], **told["values"]}
        and clone.changes == told["values"]
    )
    written = job.run.path / "search" / result.key / "schedule.yaml"
    best = result.trials[0].schedule
    assert yaml.safe_load(written.read_text()) == list(best) if best else not written.exists()
    assert [line["epoch"] for line in clone.schedule] == sorted(
        {line["epoch"] for line in clone.schedule}
    )


def test_a_clones_time_is_its_own(searched: tuple[Job, SearchResult]) -> None:
    """Tune's total of a clone has its donor's seconds; all trials together held the CPUs that there
    are, and no more.
    """
    job, result = searched
    assert moved(job, result), "nobody took over anything"
    assert all(trial.seconds > 0 for trial in result.trials)
    cpus = ray.cluster_resources()["CPU"]
    assert result.device_s < cpus * result.seconds


def test_a_search_read_again_is_the_same(searched: tuple[Job, SearchResult]) -> None:
    job, result = searched
    assert search(job).trials == result.trials
    assert all(
        t.metric < 0.7 and t.epochs == job.train.epochs for t in result.trials
    )  # none stood still to the end


def test_the_winners_file_trains_the_same_weights_again(
    searched: tuple[Job, SearchResult],
) -> None:
    """`raypipe train best.yaml`: weights, optimizer state and metrics, bit for bit, of every trial
    of the population. float32, one worker and one thread, as trials have.
    """
    job, result = searched
    plain = job.training
    assert result.job == mutations.job_of(
        plain, result.trials[0].changes, result.trials[0].schedule
    )
    assert any(len(t.schedule) > 1 for t in result.trials), "nobody took over anything"
    torch.set_num_threads(1)
    for trial in result.trials:
        again = replace(
            mutations.job_of(plain, trial.changes, trial.schedule),
            {"run.dir": str(job.run.path / trial.name)},
        )
        file = save(again, job.run.path / f"{trial.name}.yaml")
        assert load(TrainJob, file) == again
        found = trainer.run(load(TrainJob, file))
        theirs, ours = Path(str(trial.checkpoint)), Path(found.checkpoint)
        assert ours.name == theirs.name and equal(tensors(ours), tensors(theirs))
        assert [line["val_loss"] for line in found.history] == [
            line["val_loss"] for line in trial.history
        ]


def slowly(changes: dict[str, Any], **given: Any) -> None:
    """A trial whose good one starts late and whose bad one takes long over handing on its second
    epoch: when the good one reports and is cloned, the bad one is still at it.
    """
    from ray.tune.trainable.function_trainable import FunctionTrainable

    if changes["train.lr"] == GOOD:
        time.sleep(3)
    elif tune.get_checkpoint() is None:
        actor = next(o for o in gc.get_objects() if issubclass(type(o), FunctionTrainable))
        handed = actor.save_checkpoint

        def save(folder: str) -> Any:
            if actor._last_training_result.metrics["epoch"] == 2:
                time.sleep(6)
            return handed(folder)

        actor.save_checkpoint = save
    run_trial(changes, **given)


@pytest.mark.usefixtures("ray_session")
def test_a_clone_that_was_still_saving_trains_to_its_end(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune notes a stop for a trial that it pauses in the middle of a save: the clone would end
    with its first epoch.
    """
    monkeypatch.setattr(tune_run, "run_trial", slowly)
    job = population(tmp_path, searches, **{"train.epochs": 4})
    result = search(job)
    assert len(mutations.read(job.run.path / "search" / result.key)) == 1
    assert [t.epochs for t in result.trials] == [4, 4]


@given(
    rate=st.floats(1e-4, 1e-1),
    size=st.sampled_from([8, 16, 32]),
    word=st.sampled_from(["cosine", "constant"]),
    resample=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 999),
)
def test_what_is_tried_stays_in_the_space(
    rate: float, size: int, word: str, resample: float, seed: int
) -> None:
    draws: dict[str, explore.Draw] = {
        "lr": (1e-4, 1e-1, True),
        "size": [8, 16, 32],
        "word": ["cosine", "constant"],
    }
    values = {"lr": rate, "size": size, "word": word, "other": 1}
    tried = explore.explore(values, draws, resample, random.Random(seed))
    assert tried == explore.explore(values, draws, resample, random.Random(seed))
    assert 1e-4 <= tried["lr"] <= 1e-1 and tried["size"] in (8, 16, 32) and tried["other"] == 1
    if resample == 0:
        assert tried["word"] == word and max(tried["size"], size) <= 2 * min(tried["size"], size)
        assert tried["lr"] in (max(1e-4, rate * 0.8), min(1e-1, rate * 1.2))


@dataclass(eq=False)
class Member:
    """What a population uses of one of Tune's trials."""

    path: str
    config: dict[str, Any]
    finished: bool = False
    status: str = Trial.PENDING
    checkpoint: Any = None
    last_result: dict[str, Any] = field(default_factory=dict)
    experiment_tag: str = ""
    evaluated_params: dict[str, Any] = field(default_factory=dict)

    def set_status(self, status: str) -> None:
        self.status = status

    @property
    def trial_id(self) -> str:
        return self.path

    @property
    def run_metadata(self) -> Any:
        checkpoints = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None))
        return SimpleNamespace(checkpoint_manager=checkpoints)

    def is_finished(self) -> bool:
        return self.finished

    def __str__(self) -> str:
        return self.path


def members(scheduler: Any, epoch: int, *rates: float) -> list[Member]:
    """A population that has reported a turn: the first the best, val_loss 0.0, 0.1, …; NaN lost its
    weights.
    """
    made = [Member(f"trial-{i:03}", {"train.lr": rate}) for i, rate in enumerate(rates)]
    for i, member in enumerate(made):
        turn(scheduler, member, epoch, i / 10)
    return made


def turn(scheduler: Any, member: Member, epoch: int, loss: float) -> None:
    result = result_of({"val_loss": loss, "train_loss": 0.5}, epoch, False, "val_loss", "min")
    if member not in scheduler._trial_state:
        scheduler._trial_state[member] = _PBTTrialState(member)
    state = scheduler._trial_state[member]
    scheduler._save_trial_state(state, epoch, result, member)


def scheduler_of(name: str, folder: Path, searches: Searches, **more: Any) -> Any:
    texts = {"train.lr": "uniform(1e-3, 1e-1)"}
    job = population(
        folder,
        searches,
        **{"search.scheduler": name, "search.space": texts, "search.samples": 4, **more},
    )
    made = pbt.population(job.training, job.search, parse.parse(texts, job.training), folder)
    made.set_search_properties("val_loss", "min")
    return made


@pytest.mark.parametrize("name", ["pbt", "pb2"])
def test_every_exploit_changes_a_value_from_the_first_turn_on(
    name: str, searches: Searches, tmp_path: Path
) -> None:
    """At both ends of the range too, where a value that is moved outside is clipped back."""
    made = scheduler_of(name, tmp_path, searches)
    rates = [1e-3, 1e-1, 0.02, 0.05]
    trials = members(made, 2, *rates)
    for epoch in (2, 4, 6):
        for donor in trials[:2]:
            for weak in trials[2:]:
                values, _ = made._get_new_config(weak, donor)
                assert (
                    values["train.lr"] != donor.config["train.lr"]
                    and 1e-3 <= values["train.lr"] <= 1e-1
                )
        weak.config = values  # what it tries from here on, and what came of it
        for i, member in enumerate(trials):
            turn(made, member, epoch + 2, 0.1 * i - 0.01 * epoch)


def test_draws_of_pb2_repeat(searches: Searches, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        made = scheduler_of("pb2", tmp_path, searches)
        best, *_, worst = members(made, 2, 0.01, 0.02, 0.05)
        turn(made, best, 4, 0.0)
        turn(made, worst, 4, 0.5)
        found.append(made._get_new_config(worst, best)[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["pbt", "pb2"])
def test_a_restored_population_knows_its_turns_and_its_gains(
    name: str, searches: Searches, tmp_path: Path
) -> None:
    """Tune restores a search with the scheduler that it began with."""
    before = scheduler_of(name, tmp_path, searches)
    best, *others, worst = members(before, 2, 0.01, 0.02, 0.03, 0.05)
    turn(before, best, 4, 0.0)
    turn(before, worst, 4, 0.5)
    before._next_perturbation_sync = 4
    (kept,) = tune_schedulers.memory(before)
    state = cloudpickle.dumps(kept.get_state())
    expected = before._get_new_config(worst, best)[0]

    after = scheduler_of(name, tmp_path, searches)
    (remembering,) = tune_schedulers.memory(after)
    remembering.set_state(cloudpickle.loads(state))
    # Those that reported last come first.
    for member in (worst, best, *others):
        after.on_trial_add(SimpleNamespace(search_alg=None), member)
    assert after._next_perturbation_sync == after._trial_state[best].last_train_time == 4
    assert [member.status for member in (best, *others, worst)] == [
        Trial.PAUSED,  # it waits for its turn
        Trial.PENDING,
        Trial.PENDING,
        Trial.PAUSED,
    ]
    assert after._quantiles() == before._quantiles()
    assert after._get_new_config(worst, best)[0] == expected


@pytest.mark.parametrize("name", ["pbt", "pb2"])
def test_a_trial_whose_last_checkpoint_tune_had_not_seen_reports_again(
    name: str, searches: Searches, tmp_path: Path
) -> None:
    before = scheduler_of(name, tmp_path, searches)
    trials = members(before, 2, 0.01, 0.02, 0.05)
    before._next_perturbation_sync = 2
    after = scheduler_of(name, tmp_path, searches)
    after.restore(before.state())
    trials[2].last_result = {"epoch": 2}
    for member in trials:
        after.on_trial_add(SimpleNamespace(search_alg=None), member)
    assert [member.status for member in trials] == [Trial.PAUSED, Trial.PAUSED, Trial.PENDING]
    controller = SimpleNamespace(get_trials=lambda: trials)
    assert after.choose_trial_to_run(controller) is trials[2]
    turn(after, trials[2], 2, 0.2)
    if name == "pb2":
        assert sorted(after.data["Trial"]) == sorted(before.data["Trial"])


def test_an_exploit_that_a_kill_repeats_is_recorded_once(tmp_path: Path) -> None:
    def exploit(trial: str, epoch: int, rate: float) -> dict[str, Any]:
        return {"trial": trial, "donor": "a", "epoch": epoch, "values": {"train.lr": rate}}

    for told in (exploit("b", 2, 0.1), exploit("c", 2, 0.2), exploit("b", 4, 0.3)):
        mutations.append(tmp_path, told)
    mutations.append(tmp_path, exploit("b", 4, 0.4))
    assert mutations.read(tmp_path) == [
        exploit("b", 2, 0.1),
        exploit("c", 2, 0.2),
        exploit("b", 4, 0.4),
    ]


@pytest.mark.parametrize("name", ["pbt", "pb2"])
def test_lost_weights_are_cloned_by_nobody_and_replaced_first(
    name: str, searches: Searches, tmp_path: Path
) -> None:
    made = scheduler_of(name, tmp_path, searches)
    trials = members(made, 2, 0.01, 0.02, 0.05, 0.06)
    for lost in trials[1:]:
        turn(made, lost, 4, float("nan"))
    turn(made, trials[0], 4, 0.0)
    lower, upper = made._quantiles()
    assert upper == trials[:1] and set(lower) == set(trials[1:])
    values, _ = made._get_new_config(trials[1], trials[0])
    assert values["train.lr"] != 0.01, "and what is told of them does not disturb the choice"
    turn(made, trials[0], 6, float("inf"))
    assert made._quantiles() == ([], []), "where all weights are lost, none are handed on"


def test_schedules_follow_the_weights_through_several_donors(tmp_path: Path) -> None:
    """c takes b's weights, a takes c's; then b takes a's. What b had tried meanwhile is gone with
    its weights.
    """
    lines = [
        ("c", "b", 2, 2.0, 2.4),
        ("b", "d", 4, 9.0, 8.0),
        ("a", "c", 4, 2.4, 3.0),
        ("b", "a", 6, 3.0, 3.6),
    ]
    told = [
        {
            "trial": t,
            "donor": d,
            "epoch": e,
            "before": {},
            "donor_values": {"x": old},
            "values": {"x": new},
        }
        for t, d, e, old, new in lines
    ]
    (tmp_path / mutations.LOG).write_text("\n".join(map(json.dumps, told)))
    found = mutations.schedules(tmp_path)
    assert found["a"] == ({"epoch": 0, "x": 2.0}, {"epoch": 2, "x": 2.4}, {"epoch": 4, "x": 3.0})
    assert found["b"] == (*found["a"], {"epoch": 6, "x": 3.6})
    assert "d" not in found and mutations.schedules(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"search.space": {"model.name": "grid(small_cnn, efficientnet_lite0)"}},
            r"got 'model\.name'.*train\.lr.*augment",
        ),
        (
            {"search.space": {"train.lr": "uniform(1e-3, 1e-2)"}, "search.samples": 1},
            r"at least two.*search\.samples=1",
        ),
        (
            {"search.space": {"train.lr": "uniform(1e-3, 1e-2) if train.epochs == 6"}},
            r"without conditions.*got 'train\.lr'",
        ),
        ({"search.searcher": "tpe"}, r"chooses its values itself.*search\.searcher=tpe"),
        (
            {"search.pbt": {"every": 6}},
            r"before their first exchange.*every=6, train\.epochs=6.*every=3 or train\.epochs=12",
        ),
        ({"search.concurrent": 2}, r"started at once.*search\.concurrent=2"),
        ({"search.scheduler": "pb2"}, r"pb2 chooses within ranges.*got 'train\.lr'.*pbt"),
        (
            {"search.space": {"train.lr": "quniform(0.0001, 0.2, 0.0001)"}},
            r"moves a value to its neighbour, and there are too many.*got 'train\.lr'.*larger step",
        ),
    ],
)
def test_what_a_population_cannot_do_is_one_message(
    changes: dict[str, Any], says: str, searches: Searches, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        job = population(tmp_path, searches, **changes)
        pbt.check(job.search, parse.parse(job.search.space or {}, job.training))


def test_a_trial_whose_donors_weights_are_gone_begins_anew(tmp_path: Path) -> None:
    folder = trial_checkpoints.prepare_folder(
        tmp_path, "a", {"x": 1}, tmp_path / "b" / "k" / checkpoint.name(3)
    )
    assert folder.is_dir() and newest(folder) is None


def test_epochs_that_were_saved_and_not_told_are_told() -> None:
    state = LoopState(epoch=3, history=[{"m": 1.0}, {"m": 2.0}, {"m": 3.0}])
    assert list(trial_checkpoints.unreported(state, 1)) == [
        (2, {"m": 2.0}),
        (3, {"m": 3.0}),
    ] and not list(trial_checkpoints.unreported(state, 3))
