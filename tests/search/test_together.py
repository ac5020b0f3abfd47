"""The trials of a search as one model: registered, loaded, watched and exported like any other."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import replace as with_
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.config import replace, to_json
from raypipe.errors import DataError
from raypipe.feed.dataset import Pinned, pin
from raypipe.feed.rows import drawn
from raypipe.job import Job
from raypipe.models.ensemble import EnsembleModel
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import fetching, runs
from raypipe.registry.store import open_store
from raypipe.search import budget, finished, together, trial_files
from raypipe.search import page as search_page
from raypipe.search.budget import Speed
from raypipe.search.choosing import Choosing
from raypipe.search.greedy import Bar, Ensemble, by_metric
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger
from raypipe.search.limits import Variant
from raypipe.search.settings import SearchConfig
from raypipe.search.space.space import Space
from raypipe.search.together import Candidate, Together
from raypipe.search.trials.trial import data_key
from raypipe.train import checkpoint, trainer
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot
from raypipe.train.publish import publish
from raypipe.train.trainer import Plan
from raypipe.train.worker import Data, Prepared, validate
from raypipe.watch import examination
from tests.searching import search

CFG = SearchConfig(ensemble=2)
SECOND = {"images_per_s": 1.0, "step_s": 1.0, "forward_s": 0.5}
NO_BAR = Bar(by_metric, (-math.inf, -math.inf), -math.inf)


def candidate(job: TrainJob, folder: Path, seed: int, **changes: Any) -> Candidate:
    """A trial with random weights. Those of seeds 3 and 6 are sure of themselves, and lean to
    different classes: their mean has a lower loss than either.
    """
    job = replace(job, changes)
    torch.manual_seed(seed)
    model = ImageModel(job.model, 2)
    torch.nn.init.normal_(model.head.linear.weight, std=8)
    pieces = {name: Piece.whole(tensor) for name, tensor in model.state_dict().items()}
    state = LoopState(epoch=1, best_epoch=0, history=[{"train_loss": 1.0, "val_loss": 1.0}])
    place = folder / "trials" / f"trial-{seed}" / "key" / checkpoint.name(1)
    written = checkpoint.write(place, Snapshot(pieces), state)
    return Candidate(f"trial-{seed}", job, str(written))


def flip(file: Path) -> None:
    """The last bit."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def prepared(pinned: Pinned, *candidates: Candidate) -> dict[str, Data]:
    return {data_key(one.job): trainer.prepare(one.job, pinned, here=True) for one in candidates}


@pytest.fixture
def job(searches: Callable[..., Job], tmp_path: Path) -> TrainJob:
    return searches(tmp_path / "run").training


@pytest.fixture
def pinned(job: TrainJob) -> Pinned:
    return pin(job.table, job.feed)


def test_what_is_written_says_the_weighted_mean(
    job: TrainJob, pinned: Pinned, tmp_path: Path
) -> None:
    """Of members with different sides and views, from bytes to scores; without their folders."""
    one = candidate(job, tmp_path, 3, **{"model.side_px": 32, "model.views": 2})
    two = candidate(job, tmp_path, 6, **{"model.side_px": 48})
    again = with_(one, name="the same again")
    joining = [one, two, again]
    found = together.make(joining, CFG, pinned, prepared(pinned, one, two), tmp_path)
    assert found is not None and found.members == ("trial-3", "trial-6") and found.gain > 0
    assert sum(found.shares) == pytest.approx(1)
    assert together.read(tmp_path) == found
    alone = [
        validate(
            replace(c.job, {"model.views": 1}),
            prepared(pinned, c)[data_key(c.job)],
            checkpoint.read(Path(c.checkpoint)).weights,
        )
        for c in (one, two)
    ]
    assert found.metrics["val_loss"] < min(metrics["val_loss"] for metrics in alone)
    for c in joining:
        shutil.rmtree(c.checkpoint, ignore_errors=True)
    result = TrainResult(
        "k", pinned.version, pinned.classes, found.metrics, (), 0, found.checkpoint, 0.0
    )
    model = trainer.assemble(one.job, result)
    assert isinstance(model, EnsembleModel) and model.side_px == 48
    scores_NC, labels_N, _ = together.predicted(model, one.job, pinned)
    picked_N = scores_NC[np.arange(len(labels_N)), labels_N]
    assert -np.log(picked_N).mean() == pytest.approx(found.metrics["val_loss"], rel=1e-4)


def test_it_is_one_package_like_any_other(
    searches: Callable[..., Job], tmp_path: Path, photos: Path
) -> None:
    """Registered, loaded without the folder of its search, calibrated, described and watched."""
    job = searches(
        tmp_path, **{"registry.severity_images": 0, "model.calibrate": True, "run.name": "e"}
    )
    pinned = pin(job.table, job.feed)
    one = candidate(job.training, tmp_path, 3, **{"model.side_px": 32, "model.views": 2})
    two = candidate(job.training, tmp_path, 6, **{"model.side_px": 48})
    search_folder = tmp_path / "search"
    found = together.make([one, two], CFG, pinned, prepared(pinned, one, two), search_folder)
    assert found is not None
    history = ({"val_loss": 1.0, "train_loss": 1.0},)
    result = TrainResult(
        "k", pinned.version, pinned.classes, found.metrics, history, 0, found.checkpoint, 0.0
    )
    data = Prepared(lambda: trainer.prepare(one.job, pinned))
    planned = Plan(one.job, pinned, "k", search_folder, data)
    store = open_store(job.run, job.registry, job.artifacts)
    version = publish(store, planned, result, "search")
    assert publish(store, planned, result, "search").version == version.version
    # MLflow had the metrics of its first member's last epoch.
    logged = store.client.get_run(str(runs.finished_run(store, "k"))).data.metrics
    assert logged == pytest.approx(found.metrics)
    shutil.rmtree(search_folder)
    for c in (one, two):
        shutil.rmtree(c.checkpoint)

    package = fetching.fetch(store, version)
    images = [path.read_bytes() for path in sorted(photos.glob("*.png"))]
    predictions = package.predict(images)
    np.testing.assert_allclose(predictions.scores_NC.sum(1), 1, atol=1e-5)
    assert set(predictions.labels) <= set(package.classes)
    assert package.info["temperature"] == package.model.temperature
    assert package.info["calibration"]["images"] == len(package.reference().ids)
    # Its reference is what it says of the validation images, as later batches will be predicted.
    reference = package.reference()
    hashes = [hashlib.sha256(image).hexdigest() for image in images]
    rows = [hashes.index(image_id) for image_id in reference.ids]
    np.testing.assert_allclose(reference.scores_NC, predictions.scores_NC[rows], atol=1e-4)
    np.testing.assert_allclose(reference.features_ND, predictions.features_ND[rows], atol=1e-3)
    examination.known(package, reference)
    card = package.files["card.md"].decode()
    assert "the weighted mean of 2 models" in card and "trial-6" in card and "48 x 48 px" in card


@pytest.mark.usefixtures("heard")
def test_a_member_that_cannot_be_read_costs_only_itself(
    job: TrainJob, pinned: Pinned, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A deleted checkpoint and one of NaN, before two that are sound; and nothing but such ones."""
    gone, broken = candidate(job, tmp_path, 1), candidate(job, tmp_path, 2)
    shutil.rmtree(gone.checkpoint)
    weights = dict(checkpoint.read(Path(broken.checkpoint)).weights)
    weights["head.linear.bias"] = torch.full((2,), torch.nan)
    pieces = {name: Piece.whole(tensor) for name, tensor in weights.items()}
    checkpoint.write(Path(broken.checkpoint), Snapshot(pieces), LoopState())
    sound = [candidate(job, tmp_path, seed) for seed in (3, 6)]
    data = prepared(pinned, sound[0])
    found = together.make([gone, broken, *sound], CFG, pinned, data, tmp_path)
    assert found is not None and set(found.members) == {"trial-3", "trial-6"}
    assert "trial-1 cannot join" in caplog.text and "trial-2 cannot join" in caplog.text
    assert together.make([gone, broken, sound[0]], CFG, pinned, data, tmp_path) is None
    assert together.read(tmp_path) is None, "an ensemble of an earlier try is gone"


def test_its_own_predictions_must_be_better_too(
    job: TrainJob, pinned: Pinned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice that looked good by its members, and is worse than the best of them as a whole."""
    one, two = candidate(job, tmp_path, 7), candidate(job, tmp_path, 1)
    real = together.greedy.choose

    def looks_good(*given: Any) -> Any:
        return with_(real(*given), weights_K=(0.5, 0.5), gain=1.0)

    monkeypatch.setattr(together.greedy, "choose", looks_good)
    assert together.make([one, two], CFG, pinned, prepared(pinned, one), tmp_path) is None
    assert together.read(tmp_path) is None and not (tmp_path / together.WEIGHTS).exists()


def test_it_keeps_the_limits_of_the_search(job: TrainJob, pinned: Pinned, tmp_path: Path) -> None:
    """Two models of 0.4 MB: neither 0.5 MB nor the latency of one leave room for both."""
    both = [candidate(job, tmp_path, seed) for seed in (3, 6)]
    data = prepared(pinned, both[0])
    limits: dict[str, Any] = {"size_mb": 1000.0, "latency_ms": 10000.0}
    roomy = SearchConfig(ensemble=2, limits=limits)
    assert together.make(both, roomy, pinned, data, tmp_path) is not None
    size = sum(t.numel() * 4 for t in checkpoint.read(Path(both[0].checkpoint)).weights.values())
    for tight in ({"size_mb": 1.5 * size / 1e6}, {"latency_ms": 1e-3}):
        cfg = SearchConfig(ensemble=2, limits=tight)
        assert together.make(both, cfg, pinned, data, tmp_path) is None


def test_the_least_member_goes_where_the_whole_is_too_slow(
    job: TrainJob, pinned: Pinned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three members that keep a limit by their sum, and not together: two are registered."""
    three = [candidate(job, tmp_path, seed) for seed in (3, 6, 1)]
    chosen = Ensemble((0.5, 0.4, 0.1), (0.0, 0.0), gain=1.0, bar=NO_BAR)
    monkeypatch.setattr(together.greedy, "choose", lambda *given: chosen)

    def timed(models: list[Any], images: list[bytes], rounds: int = 1) -> list[Variant]:
        ms = [9.0 if len(getattr(one, "members", ())) > 2 else 1.0 for one in models]
        return [Variant("", each, each, each, 0.0) for each in ms]

    monkeypatch.setattr(together.variants, "timed", timed)
    cfg = SearchConfig(ensemble=3, limits={"latency_ms": 5.0})  # type: ignore[arg-type]
    found = together.make(three, cfg, pinned, prepared(pinned, three[0]), tmp_path)
    assert found is not None and found.members == ("trial-3", "trial-6")
    assert found.shares == pytest.approx((5 / 9, 4 / 9))
    # Of equal weights the later one, which is the worse trial, goes.
    weights = dict(zip(["trial-3", "trial-6", "trial-1"], (0.4, 0.3, 0.3), strict=True))
    ensemble = together._within_limits(three, weights, cfg, pinned)
    assert ensemble is not None
    assert [one.name for one in ensemble.members] == ["trial-3", "trial-6"]


def test_the_result_of_a_search_is_its_ensemble(
    job: TrainJob, pinned: Pinned, tmp_path: Path
) -> None:
    """Under the job of its best member, which need not be the leaderboard's first trial."""
    folder = job.run.path / "search" / "key"
    seeds = (1, 6, 3)
    made = []
    for seed in seeds:
        values = {"model.views": 2 if seed == 3 else 1, "train.lr": seed / 1000}
        made.append(candidate(job, folder, seed, **values))
    history = ({"val_loss": 1.0, "train_loss": 1.0},)
    trials = []
    for one, seed in zip(made, seeds, strict=True):
        changes = {"model.views": one.job.model.views, "train.lr": one.job.train.lr}
        trials.append(Trial(one.name, changes, 1.0, 1, False, history, one.checkpoint))
        assert one.name == f"trial-{seed}"
    trial_files.write(folder / "result.json", trials, None, 60)
    joining = together.candidates(job, trials, CFG, None)
    found = together.make(joining, CFG, pinned, prepared(pinned, *made), folder)
    assert found is not None and found.members == ("trial-6", "trial-3")
    result = finished.result_of(folder, "key", Space((), job), pinned, 0.0)
    assert result.members == found.members and result.shares == found.shares
    assert result.best.metrics == found.metrics and result.best.checkpoint == found.checkpoint
    assert result.job == made[1].job and result.trials[0].name == "trial-1"
    assert isinstance(trainer.assemble(result.job, result.best), EnsembleModel)
    assert result.models["trial-3"].views == 2
    # It needs none of its members: a bit of one, and all of another.
    flip(next(Path(made[1].checkpoint).glob("weights-*")))
    shutil.rmtree(made[2].checkpoint)
    again = finished.result_of(folder, "key", Space((), job), pinned, 0.0)
    assert again.best == result.best and again.shares == result.shares
    flip(next(Path(found.checkpoint).glob("weights-*")))
    with pytest.raises(DataError, match=r"weights of its model are damaged.*Remove .*result\.json"):
        finished.result_of(folder, "key", Space((), job), pinned, 0.0)


def test_who_would_take_too_long_is_not_asked(
    job: TrainJob, pinned: Pinned, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One has eight views, and its images take a second each; a head's are there."""
    slow = candidate(job, tmp_path, 1, **{"model.views": 8, "model.side_px": 32})
    one = candidate(job, tmp_path, 3, **{"model.side_px": 32})
    two = candidate(job, tmp_path, 6, **{"model.side_px": 48})
    clock = [0.0]
    ledger = Ledger(3600.0, clock=lambda: clock[0])
    trials = [
        Trial(c.name, {"model.views": c.job.model.views}, 0.5, 1, False, (history,), c.checkpoint)
        for c, history in ((slow, SECOND), (one, {}), (two, {}))
    ]
    soup = with_(slow, name="soup")
    models = {c.name: c.job.model for c in (slow, one, two, soup)}
    choosing = Choosing.of(ledger, models, trials)
    images = pinned.counts[job.feed.val]
    forward_s = SECOND["forward_s"] / SECOND["step_s"]
    assert choosing.asking_s(slow.name, images) == pytest.approx(8 * images * forward_s)
    assert choosing.asking_s(soup.name, images) == choosing.asking_s(slow.name, images)
    assert choosing.asking_s(one.name, images) == 0
    data = prepared(pinned, slow, one, two)
    assert together.said_of([slow, one, two], pinned, data, choosing).usable == [slow, one, two]
    clock[0] = 3600 - ledger.ending(1, None).seconds - 20
    with caplog.at_level("INFO", "raypipe"):
        said = together.said_of([one, slow, two], pinned, data, choosing)
    assert said.usable == [one, two] and "among 2 of 3 trials" in caplog.text
    # The best one is asked in any case: an ensemble has to be better. And two are.
    assert together.said_of([slow, one, two], pinned, data, choosing).usable == [slow, one, two]
    assert together.said_of([one, slow], pinned, data, choosing).usable == [one, slow]


def test_who_has_seen_other_images_of_the_same_labels_does_not_join(
    pinned: Pinned, job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One could not read the first image, another one the second; their labels are equal."""
    joining = [Candidate(name, job, "") for name in "abc"]
    samples = {"a": [1, 2, 3], "b": [0, 2, 3], "c": [1, 2, 3]}
    monkeypatch.setattr(together, "_assembled", lambda one, pinned: one.name)

    def said(name: Any, *given: Any) -> together.Answers:
        return together.Answers(np.full((3, 2), 0.5), np.array([0, 1, 1]), np.array(samples[name]))

    monkeypatch.setattr(together, "_on", said)
    data: Any = defaultdict(lambda: SimpleNamespace(val=None))
    found = together.said_of(joining, pinned, data)
    assert [one.name for one in found.usable] == ["a", "c"]
    assert found.samples_N.tolist() == samples["a"]


def test_a_sample_is_put_in_its_place_beside_images_that_nobody_can_read() -> None:
    """Of five images number 1 is broken. The sample is 2 and 4, and 1 for whom it is not."""
    members_KNC = [np.full((4, 2), value) for value in (0.2, 0.6)]
    found = together.Said(
        [Candidate(name, None, "") for name in "ab"],  # type: ignore[arg-type]
        members_KNC,
        np.array([0, 1, 0, 1]),
        np.array([0, 2, 3, 4]),
    )
    own = np.array([[0.0, 1.0], [0.1, 0.9], [0.3, 0.7]], np.float32)
    answers = together.Answers(own, np.array([1, 1, 1]), np.array([1, 2, 4]))
    members = [SimpleNamespace(name=name) for name in "ab"]
    ensemble: Any = SimpleNamespace(members=members, shares=(0.75, 0.25))
    scores_NC = together._completed(answers, found, ensemble)
    assert np.allclose(scores_NC, [[0.3, 0.3], [0.1, 0.9], [0.3, 0.3], [0.3, 0.7]])


def test_an_ensemble_without_time_is_checked_on_a_sample(
    job: TrainJob, pinned: Pinned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the others it says its members' mean."""
    one = candidate(job, tmp_path, 3, **{"model.side_px": 32, "model.views": 2})
    two = candidate(job, tmp_path, 6, **{"model.side_px": 48})
    data, images = prepared(pinned, one, two), pinned.counts[job.feed.val]
    monkeypatch.setattr(
        together.greedy, "choose", lambda *given: Ensemble((0.25, 0.75), (0, 0), 1, NO_BAR)
    )
    monkeypatch.setattr(budget, "FEWEST_JUDGED", images // 2)
    models = {c.name: c.job.model for c in (one, two)}
    speed = Speed("trial-6", 1, 48, 1.0, forward_images_per_s=1.0)
    choosing = Choosing(Ledger(60.0), models, {c.name: speed for c in (one, two)})
    found = together.make([one, two], CFG, pinned, data, tmp_path, choosing)
    assert found is not None and found.checked is not None and found == together.read(tmp_path)
    assert images // 2 <= found.checked < images
    said = together.said_of([one, two], pinned, data)
    mean_NC = 0.25 * said.scores_KNC[0] + 0.75 * said.scores_KNC[1]
    result = TrainResult("k", pinned.version, pinned.classes, {}, (), 0, found.checkpoint, 0.0)
    model = trainer.assemble(one.job, result)
    assert isinstance(model, EnsembleModel)
    own_NC, labels_N, _ = together.predicted(model, one.job, pinned)
    some_SC, labels_S, _ = together.predicted(model, one.job, pinned, found.checked)
    sample_S = drawn(images, found.checked)
    assert sample_S is not None and np.array_equal(labels_S, labels_N[sample_S])
    assert np.allclose(some_SC, own_NC[sample_S], atol=1e-5)
    mean_NC[sample_S] = some_SC
    picked_N = mean_NC[np.arange(images), labels_N]
    assert found.metrics["val_loss"] == pytest.approx(-np.log(picked_N).mean(), rel=1e-5)
    monkeypatch.setattr(budget, "FEWEST_JUDGED", images)
    assert choosing.checked(list(models), images) is None, "of fewer nothing would be known"
    plenty = Choosing(Ledger(1e6), models, choosing.speeds)
    whole = together.make([one, two], CFG, pinned, data, tmp_path, plenty)
    assert whole is not None and whole.checked is None
    assert whole.metrics["val_loss"] != pytest.approx(found.metrics["val_loss"], rel=1e-7)


def test_heads_of_two_backbones_of_one_architecture_are_no_ensemble(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An ensemble kept one backbone for both, with the weights of the last."""
    one, two = ModelConfig(), ModelConfig(name="efficientnet_lite0_stages", side_px=224)
    # As two folders of Hugging Face are resolved.
    backbone = with_(one.backbone, resolved=("hf:vit", {"width": 8}))
    monkeypatch.setattr(ModelConfig, "backbone", property(lambda self: backbone))
    asked = []
    for name, model in (("one", one), ("two", two), ("another head", one)):
        of_head: Any = SimpleNamespace(model=model, feed=SimpleNamespace(val="val"))
        asked.append(Candidate(name, of_head, ""))
    answers = together.Answers(np.full((2, 2), 0.5), np.array([0, 1]), np.array([0, 1]))
    # As of thousands of classes: their scores are read from the disk.
    monkeypatch.setattr(together, "MOST_HELD", 3)
    monkeypatch.setattr(together, "_assembled", lambda *given: None)
    monkeypatch.setattr(together, "_on", lambda *given: answers)
    rows: Any = SimpleNamespace(counts={"val": 2})
    data: Any = defaultdict(lambda: SimpleNamespace(val=None))
    with caplog.at_level("WARNING", "raypipe"):
        said = together.said_of(asked, rows, data)
    assert [one.name for one in said.usable] == ["one", "another head"]
    assert "two cannot join an ensemble" in caplog.text and "weights of its own" in caplog.text
    assert not any(scores_NC.flags.writeable for scores_NC in said.scores_KNC)
    assert all(np.array_equal(scores_NC, answers.scores_NC) for scores_NC in said.scores_KNC)


def test_scores_that_are_many_are_put_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,000 classes the candidates' scores filled the memory."""
    monkeypatch.setattr(together, "MOST_HELD", 10)
    scores_NC = np.random.default_rng(0).random((4, 3)).astype(np.float32)
    held_NC = together._put_aside(scores_NC)
    assert np.array_equal(held_NC, scores_NC) and held_NC.dtype == scores_NC.dtype
    assert not held_NC.flags.owndata and not held_NC.flags.writeable
    few_NC = scores_NC[:2]
    assert together._put_aside(few_NC) is few_NC

    def full() -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(together.tempfile, "TemporaryFile", full)
    assert together._put_aside(scores_NC) is scores_NC


@pytest.mark.usefixtures("ray_session")
def test_a_search_ends_with_the_choice_of_an_ensemble(
    searches: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """search.ensemble=2: among four trials, of which search.keep=1 would keep one."""
    asked: list[list[str]] = []
    make = together.make

    def told(candidates: list[Candidate], *more: Any) -> Any:
        asked.append([one.name for one in candidates])
        return make(candidates, *more)

    monkeypatch.setattr(together, "make", told)
    space = {"train.lr": "grid(0.01, 0.02)", "model.side_px": "grid(32, 48)"}
    job = searches(
        tmp_path,
        **{
            "search.samples": 1,
            "search.scheduler": "none",
            "search.ensemble": 2,
            "search.keep": 1,
            "search.space": space,
        },
    )
    found = search(job)
    assert asked == [[trial.name for trial in found.trials]] and len(found.trials) == 4
    assert all(trial.kept for trial in found.trials)
    assert len(found.members) in (0, 2) and len(found.members) == len(found.shares)
    assert search(job).best == found.best and len(asked) == 1

    # A choice that was checked on a sample says so to whoever takes the result up.
    folder, (one, two) = found.folder, found.trials[:2]
    shutil.copytree(str(one.checkpoint), folder / together.WEIGHTS, dirs_exist_ok=True)
    chosen = Together((one.name, two.name), (0.5, 0.5), found.best.metrics, 0.1, "", 30)
    (folder / together.FILE).write_text(to_json(asdict(chosen)))
    ledger = Ledger(60.0)
    again = search(job, ledger=ledger)
    assert found.pinned is not None and found.checked is None
    images = found.pinned.counts[job.feed.val]
    assert again.checked == (30, images)
    assert len(found.notes) == (not found.members), "whether one was better is luck here"
    assert ledger.notes[-1] == f"The ensemble was checked on 30 of {images:,} validation images"
    facts: Any = dict(search_page._facts(again, "cells/1", {}, None))  # type: ignore[arg-type]
    assert facts["Checked"] == f"when it was chosen, on 30 of {images:,} validation images"
