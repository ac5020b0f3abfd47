"""A search on a real cluster: the best trial is what it says, and no trial runs twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as with_
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray import tune
from ray.util import placement_group_table
from torch.nn.functional import cross_entropy

from raypipe.config import replace, validate
from raypipe.errors import ConfigError, DataError, RaypipeError
from raypipe.feed.dataset import Pinned, pin
from raypipe.feed.feed import Source
from raypipe.job import Job
from raypipe.models import fingerprint
from raypipe.search import feasible, tuner
from raypipe.search.result import SearchResult
from raypipe.search.space import defaults, parse
from raypipe.search.trials import trial_data, tune_patches
from raypipe.search.trials.standing import Standing
from raypipe.train import checkpoint, trainer
from raypipe.train.job import TrainJob
from raypipe.train.worker import Data
from tests.searching import search

from ..pixels import decoded

Searches = Callable[..., Job]
Searched = tuple[Job, SearchResult]


@pytest.fixture(scope="module")
def searched(
    ray_session: str, searches: Searches, tmp_path_factory: pytest.TempPathFactory
) -> Searched:
    """Two good rates and two hopeless ones."""
    job = searches(
        tmp_path_factory.mktemp("searched"),
        **{
            "search.samples": 1,
            "search.space": {"train.lr": "grid(1e-2, 1e-6, 2e-2, 2e-6)"},
            "search.reduction": 2,
        },
    )
    before = placement_group_table()
    result = search(job)
    assert placement_group_table().keys() == before.keys(), (
        "Ray loses the CPUs of groups that come and go (places.py)"
    )
    return job, result


def same(result: SearchResult) -> SearchResult:
    return with_(result, seconds=0, ran_s=0)


def run_dirs(job: Job) -> list[str]:
    return sorted(p.name for p in (job.run.path / "search").glob("*/tune*/trial-*"))


def test_every_trial_is_on_the_leaderboard_and_the_best_is_first(searched: Searched) -> None:
    job, result = searched
    assert sorted(t.changes["train.lr"] for t in result.trials) == [1e-6, 2e-6, 1e-2, 2e-2]
    metrics = [t.metric for t in result.trials]
    assert metrics == sorted(metrics)
    assert result.trials[0].changes["train.lr"] >= 1e-2
    assert result.job == replace(
        job.training,
        result.trials[0].changes,
    )


def test_asha_stops_the_hopeless_and_not_the_best(searched: Searched) -> None:
    job, result = searched
    assert result.trials[0].epochs == job.train.epochs and not result.trials[0].stopped_early
    stopped = [t for t in result.trials if t.stopped_early]
    assert stopped and all(
        t.epochs < job.train.epochs and t.metric > result.trials[0].metric for t in stopped
    )
    for trial in result.trials:
        assert len(trial.history) == trial.epochs >= job.search.grace


def test_the_best_trials_checkpoint_reproduces_its_metric(searched: Searched) -> None:
    job, result = searched
    assert (
        result.best.metrics[result.metric]
        == result.trials[0].metric
        == min(m[result.metric] for m in result.best.history)
    )
    assert checkpoint.verify(Path(result.best.checkpoint)) is None
    model = trainer.assemble(result.job, result.best)
    pixels_NHWC, labels_N, _ = decoded(job)
    with torch.no_grad():
        loss = cross_entropy(model(torch.from_numpy(pixels_NHWC)), torch.from_numpy(labels_N))
    assert float(loss) == pytest.approx(result.trials[0].metric, rel=1e-4)


def test_running_again_adds_no_trials_and_returns_the_same(
    searched: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, result = searched
    before = run_dirs(job)
    told: list[tuple[int, int]] = []
    with monkeypatch.context() as patched:
        patched.setattr(tuner, "_run", lambda *args: pytest.fail("searched again"))
        assert same(search(job)) == same(result)
    (
        job.run.path / "search" / result.key / "result.json"
    ).unlink()  # as if killed after the last trial: Tune restores
    assert same(search(job, lambda done, total, standings: told.append((done, total)))) == same(
        result
    )
    assert run_dirs(job) == before and len(before) == 4


def test_a_search_that_was_killed_before_tune_saved_runs_all_its_trials(
    searched: Searched,
) -> None:
    """Tune restored it with one trial in total."""
    job, result = searched
    folder = job.run.path / "search" / result.key
    (folder / "result.json").unlink()
    for file in (folder / "tune").iterdir():
        if file.is_file() and file.name != "tuner.pkl":
            file.unlink()
    assert len(search(job).trials) == len(result.trials)


def test_a_torn_state_is_put_aside_and_the_search_runs(searched: Searched) -> None:
    job, result = searched
    folder = job.run.path / "search" / result.key
    (folder / "result.json").unlink()
    state = folder / "tune" / "tuner.pkl"
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    again = search(job)
    assert [p.name for p in folder.glob("tune-torn-*")]
    assert again.trials[0].changes["train.lr"] >= 1e-2 and len(again.trials) == 4


@pytest.mark.usefixtures("ray_session")
def test_a_killed_search_of_hyperband_goes_on(searches: Searches, tmp_path: Path) -> None:
    """Tune's scheduler has no state to go on from: each restart failed."""
    space = {"train.lr": "grid(1e-2, 1e-6, 2e-2, 2e-6)"}
    changes = {"search.samples": 1, "search.scheduler": "hyperband", "search.keep": 4}
    job = searches(tmp_path, **changes, **{"search.space": space})
    whole = search(job)
    folder = job.run.path / "search" / whole.key
    (folder / "result.json").unlink()
    again = search(job)
    assert [(t.name, t.metric, t.epochs) for t in again.trials] == [
        (t.name, t.metric, t.epochs) for t in whole.trials
    ]
    assert [path.is_dir() for path in folder.glob("tune-before-*")] == [True]


@pytest.mark.parametrize("weights", ["alike", "others"])
def test_the_code_of_a_drawn_backbone_is_part_of_its_search(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the job's own was: after an edit, the old result was returned, or the search went on."""
    module = f"drawn_{weights}"
    width = "8" if weights == "alike" else "8 if pretrained else 4"
    code = (
        "from torch import nn\n"
        "def net(pretrained: bool) -> nn.Module:\n"
        f"    width = {width}\n"
        "    return nn.Sequential(\n"
        "        nn.Conv2d(3, width, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()\n"
        "    )\n"
    )
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"file:{module}:net"
    job = validate(Job, {"table": {"uri": "unused"}, "model": {"side_px": 32}})
    space = parse.parse({"model.name": f"choice(efficientnet_lite0, {name})"}, job.training)
    version: Any = SimpleNamespace(identity="v")

    def key() -> str:
        fingerprint._of_code.cache_clear()
        return tuner.name_of(job.training, job.search, space, version)

    before = key()
    assert key() == before
    (tmp_path / f"{module}.py").write_text(f"{code}\n# edited\n")
    assert key() != before
    plain = parse.parse({"train.lr": "uniform(0.1, 0.2)"}, job.training)
    assert tuner._sources(plain) == {}
    if weights == "alike":
        feasible.require_packages(space, 2)
        return
    with pytest.raises(DataError, match=rf"builds another model.*{module}"):
        feasible.require_packages(space, 2)


@pytest.mark.usefixtures("ray_session")
def test_when_every_trial_fails_of_one_thing_that_is_the_message(
    searches: Searches, tmp_path: Path
) -> None:
    job = searches(
        tmp_path, **{"search.space": {"train.strategy": "grid(zero3)"}, "search.samples": 1}
    )
    with pytest.raises(RaypipeError, match="zero3 shards a model over several workers"):
        search(job)
    errors = [p.read_text() for p in tmp_path.rglob("error.txt")]
    assert errors and "zero3 shards a model over several workers" in errors[0]


@pytest.mark.usefixtures("ray_session")
def test_a_search_beside_one_of_another_thread_is_refused(
    searches: Searches, tmp_path: Path
) -> None:
    with (
        tune_patches.alone(),
        pytest.raises(RaypipeError, match="Another thread of this process runs a search"),
    ):
        search(searches(tmp_path))
    with tune_patches.alone():
        pass


@pytest.mark.usefixtures("ray_session")
def test_a_trial_that_diverges_loses(searches: Searches, tmp_path: Path) -> None:
    job = searches(
        tmp_path, **{"search.space": {"train.lr": "grid(1e30, 1e-2)"}, "search.samples": 1}
    )
    result = search(job)
    assert result.trials[0].changes["train.lr"] == 1e-2 and result.trials[0].metric < 0.7
    assert result.trials[1].checkpoint is None or result.trials[1].metric != result.trials[1].metric


@pytest.mark.usefixtures("ray_session")
def test_automatic_sizes_are_found_for_the_share_of_a_gpu_that_a_trial_has(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def settle(
        job: Job, pinned: Pinned, data: object, drawn: tuple[str, ...], share: float
    ) -> None:
        asked.append(share)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner.finders, "resolve", settle)
    with pytest.raises(KeyboardInterrupt):
        search(searches(tmp_path, **{"train.batch_size": "auto", "search.gpus_per_trial": 0.5}))
    assert asked == [0.5]


@pytest.mark.usefixtures("ray_session")
def test_progress_counts_trials_to_the_end(searches: Searches, tmp_path: Path) -> None:
    told: list[tuple[int, int, list[Standing]]] = []
    search(
        searches(
            tmp_path,
            **{
                "search.scheduler": "none",
                "search.space": {"train.lr": "grid(1e-6, 1e-5, 1e-3, 1e-2)"},
                "train.epochs": 1,
            },
        ),
        lambda done, total, standings: told.append((done, total, standings)),
    )
    assert told[-1][0] == told[-1][1] == 4 and all(a[0] <= b[0] for a, b in pairwise(told))
    bests = [standing.best for standing in told[-1][2]]
    assert len(bests) == 4 and 0 < bests[0] < 1 and bests == sorted(bests)
    assert {standing.state for standing in told[-1][2]} == {"full"}


@pytest.mark.usefixtures("ray_session", "heard")
@pytest.mark.parametrize(
    ("space", "is_said"),
    [({"train.lr": "grid(1e-2)"}, True), ({"model.mode": "choice(frozen, finetune)"}, False)],
)
def test_augmentation_without_an_effect_is_named(
    space: dict[str, str],
    is_said: bool,
    searches: Searches,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backbone = {"name": "efficientnet_lite0", "mode": "frozen", "side_px": 32}
    changes = {"model": backbone, "train.epochs": 1, "augment.erase": 0.5}
    search(searches(tmp_path, **changes, **{"search.samples": 1, "search.space": space}))
    said = "augment.erase has no effect on frozen features" in caplog.text
    assert said == is_said


@pytest.mark.parametrize(
    ("mode", "space", "refit", "named"),
    [
        ("frozen", {"augment.policy": "choice(none, trivial)"}, None, "augment.policy, augment.er"),
        ("frozen", {"augment.hue": "uniform(0, .1)", "model.mode": "choice(finetune)"}, None, ""),
        ("finetune", {"model.mode": "choice(frozen)"}, None, "augment.erase has"),
        ("frozen", {"train.lr": "uniform(.1, .2)"}, {"model.mode": "finetune"}, ""),
        ("frozen", {"train.lr": "uniform(.1, .2)"}, {"train.epochs": 9}, "augment.erase has"),
    ],
)
def test_what_trials_draw_and_what_a_refit_changes_count_for_augmentation(
    mode: str, space: dict[str, str], refit: dict[str, Any] | None, named: str
) -> None:
    """Drawn settings without an effect were not named, and those of a refit that has them were."""
    given = {"table": {"uri": "x"}, "model": {"mode": mode}, "augment": {"erase": 0.5}}
    job = validate(Job, given | {"search": {"space": space, "refit": refit}})
    said = tuner._idle_augment(job.search, parse.parse(space, job.training))
    assert said.startswith(named) and bool(said) == bool(named)


def test_what_only_fine_tuning_draws_is_not_named_for_frozen_features() -> None:
    """`raypipe tune model.mode=frozen` was told that five settings have no effect. Nobody had set
    them, and no trial draws them.
    """
    job = validate(Job, {"table": {"uri": "x"}, "model": {"mode": "frozen"}})
    cfg = defaults.with_default_space(job.training, job.search, {"train": 200}, gpu=False)
    assert cfg.space is not None and "augment.policy" in cfg.space
    assert tuner._idle_augment(cfg, parse.parse(cfg.space, job.training)) == ""
    # What all trials may draw is named, and what depends on it.
    texts = {
        "augment.policy": "choice(none, randaugment)",
        "augment.policy_magnitude": "uniform(0.1, 0.6) if augment.policy == 'randaugment'",
        "augment.hue": "uniform(0, 0.1) if model.mode == 'finetune'",
    }
    said = tuner._idle_augment(job.search, parse.parse(texts, job.training))
    assert said.startswith("augment.policy, augment.policy_magnitude have no effect")


def test_a_space_that_cannot_be_is_refused_before_anything_is_written(
    searches: Searches, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"search\.space names an unknown field train\.lrr.*Did you mean 'train\.lr'",
    ):
        search(searches(tmp_path / "run", **{"search.space": {"train.lrr": "uniform(0, 1)"}}))
    with pytest.raises(
        ConfigError, match=r"cannot draw train\.batch_size=auto.*found once, before the search"
    ):
        search(
            searches(tmp_path / "run", **{"search.space": {"train.batch_size": "choice(8, auto)"}})
        )
    with pytest.raises(ConfigError, match=r"by_epoch would set them again"):
        search(searches(tmp_path / "run", **{"by_epoch": {1: {"train.lr": 0.1}}}))
    with pytest.raises(
        ConfigError, match=r"changes values while a trial trains.*got 'model\.side_px'"
    ):
        search(
            searches(
                tmp_path / "run",
                **{"search.scheduler": "pbt", "search.space": {"model.side_px": "choice(32, 64)"}},
            )
        )
    assert not (tmp_path / "run").exists()


def test_images_are_decoded_once_for_all_trials(searched: Searched) -> None:
    job, result = searched
    used = sum(pin(job.table, job.feed).counts[split] for split in ("train", "val"))
    assert result.decoded == used and len(result.trials) == 4


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("alone", [True, False])
def test_trials_start_when_their_images_are_decoded(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Trials take every CPU, and a task that decodes needs one: with several resolutions a search
    once waited for ever.
    """
    ready: list[bool] = []

    def fit(self: tune.Tuner) -> None:
        blocks = [pixels for source in prepared for pixels, _ in source.blocks]
        ready.append(
            bool(blocks)
            and len(ray.wait(blocks, num_returns=len(blocks), timeout=0)[0]) == len(blocks)
        )
        raise KeyboardInterrupt

    prepared: list[Source] = []
    plain = trial_data.prepare

    def noted(job: TrainJob, pinned: Pinned, here: bool) -> Data:
        assert here == alone, (
            "one node decodes in this process, for tasks would use up the processes that trials "
            "may start in"
        )
        data = plain(job, pinned, here)
        prepared.extend((data.train, data.val))
        return data

    assert trial_data._single_node()
    monkeypatch.setattr(trial_data, "_single_node", lambda: alone)
    monkeypatch.setattr(trial_data, "prepare", noted)
    monkeypatch.setattr(tune.Tuner, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        search(
            searches(
                tmp_path,
                **{"search.samples": 1, "search.space": {"model.side_px": "grid(32, 48, 64, 96)"}},
            )
        )
    assert ready == [True] and len({source.side_px for source in prepared}) == 4


def test_trials_say_what_they_held_and_what_was_spared(searched: Searched) -> None:
    _, result = searched
    assert all(trial.seconds > 0 for trial in result.trials)
    # One worker a trial, on a CPU.
    assert [trial.device_s for trial in result.trials] == [t.seconds for t in result.trials]
    assert result.device_s == pytest.approx(sum(trial.seconds for trial in result.trials))
    # Two trials at a time held two CPUs for as long as the search took, at most.
    assert result.device_s < 2 * result.seconds
    missing = result.full_epochs - result.epochs
    assert missing and result.spared.share == pytest.approx(missing / result.full_epochs)
    assert not any(trial.cut for trial in result.trials)
    (first, *_) = result.runs(usd_per_device_s=0.5)
    assert first[3]["cost.usd"] == pytest.approx(result.trials[0].device_s / 2)


@pytest.mark.usefixtures("ray_session")
def test_what_the_searchs_budget_cut_was_not_spared(searches: Searches, tmp_path: Path) -> None:
    changes = {
        "search.samples": 4,
        "search.space": {"train.lr": "loguniform(1e-4, 1e-2)"},
        "search.scheduler": "none",
        "search.concurrent": 1,
        "search.stopping.epochs": 6,
        "train.stopping.patience": None,
    }
    result = search(searches(tmp_path / "run", **changes))
    assert result.stopped and "budget of 6 epochs" in result.stopped
    # Four epochs of the first trial, two or three of the second.
    whole = [trial for trial in result.trials if trial.epochs == 4]
    cut = [trial for trial in result.trials if trial.epochs < 4]
    assert whole and cut and all(t.cut for t in cut) and not any(t.cut for t in whole)
    assert result.spared.share == 0 == result.spared.device_s
