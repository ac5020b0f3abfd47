"""A budget for a whole search: what is planned from what was measured, with a clock of our own."""

from __future__ import annotations

import fcntl
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config import load, validate
from raypipe.config import replace as changed
from raypipe.errors import ConfigError, RaypipeError
from raypipe.feed.dataset import Pinned
from raypipe.files import LOCK
from raypipe.job import Job
from raypipe.models.severity import LEAST_VALIDATION
from raypipe.models.tasks import Task
from raypipe.models.zoo import ModelConfig
from raypipe.registry.tracking import RegistryConfig
from raypipe.search import budget, networks, variants
from raypipe.search.budget import Ending, Refit, Speed
from raypipe.search.choosing import Choosing
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger, TooShort
from raypipe.search.presets import MANY
from raypipe.search.settings import SearchConfig
from raypipe.search.tuner import _in_key
from raypipe.timer import OutOfTime, interrupted
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import MOMENTS, Piece, Snapshot
from raypipe.train.settings import TrainConfig
from raypipe.train.trainer import Plan
from raypipe.work import in_time, kept_refits

SPEED = Speed("trial-000", 3, 128, 100.0, 300.0)
ENDING = Ending(judged=1000, start_s=8.0, trials=10, images_per_s=300.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ledger(budget_s: float = 60.0, **more: Any) -> tuple[Ledger, Clock]:
    clock = Clock()
    made = Ledger(budget_s, clock=clock)
    for name, value in more.items():
        setattr(made.forecast if hasattr(made.forecast, name) else made, name, value)
    return made, clock


@given(
    budget_s=st.floats(1, 4000),
    start_s=st.floats(0, 60),
    judged=st.integers(0, 20_000),
    rate=st.floats(1, 2000),
    share=st.floats(0.05, 0.95),
)
def test_trials_and_the_end_fit_into_the_budget_whenever_anything_does(
    budget_s: float, start_s: float, judged: int, rate: float, share: float
) -> None:
    ending = Ending(judged, start_s, 5, rate)
    end_s = budget.trials_end(budget_s, start_s, ending, share, refits=False)
    with_refit = budget.trials_end(budget_s, start_s, ending, share, refits=True)
    assert start_s <= with_refit <= end_s
    if end_s > start_s:
        assert end_s + ending.seconds <= budget_s
        assert with_refit - start_s == pytest.approx((1 - share) * (end_s - start_s))


@given(
    budget_s=st.floats(10, 4000),
    spent=st.floats(0, 1.2),
    rate=st.floats(1, 2000),
    side_px=st.sampled_from([64, 128, 224]),
    most=st.integers(1, 30),
)
def test_a_refit_fits_with_its_fewest_epochs_or_there_is_none(
    budget_s: float, spent: float, rate: float, side_px: int, most: int
) -> None:
    speed = replace(SPEED, side_px=side_px, train_images_per_s=rate)
    found = budget.plan_refit(budget_s, spent * budget_s, ENDING, speed, 2000, most, (224, side_px))
    if isinstance(found, str):
        assert " left (" in found and "trial-000" in found
        return
    larger = found.side_px / side_px
    assert spent * budget_s + found.seconds + ENDING.at(larger).seconds <= budget_s
    assert min(budget.FEWEST_EPOCHS, most) * 2000 / rate * larger**2 <= found.seconds
    assert found.epochs == most and larger <= budget.MOST_LARGER


def test_heads_on_one_fast_backbone_may_take_what_shifted_copies_would() -> None:
    made, _ = ledger(splits=(400, 600), start_s=8.0, shifted=1800, least_shifted=600, views=8)
    left_s, heads_s = made.left_s(1, None), made.left_for_heads_s(120.0)
    assert left_s is not None and heads_s is not None and heads_s > left_s + 10
    # What cannot be left out is kept: package, MLflow, the page.
    assert heads_s < 60 - made.ending(1, None).fixed_s
    assert Ledger(None).left_for_heads_s(120.0) is None


def test_the_wanted_resolution_gives_way_to_the_trials_own() -> None:
    def side(budget_s: float) -> int | str:
        found = budget.plan_refit(budget_s, 100, ENDING, SPEED, 2000, 13, (224, 128))
        return found.side_px if isinstance(found, Refit) else found

    # An epoch takes 20 s at 128 px and 61 s at 224 px.
    assert side(600) == 224
    assert side(250) == 128
    assert "3 epochs at 128 px need 60.0 s" in str(side(140))


def test_a_refit_whose_epochs_nobody_has_set_takes_the_time_there_is() -> None:
    """An epoch takes 20 s. A host that becomes faster goes on, up to what still teaches."""

    def epochs(budget_s: float, most: int | None) -> tuple[int, str]:
        found = budget.plan_refit(budget_s, 100, ENDING, SPEED, 2000, most, (128,))
        assert isinstance(found, Refit)
        return found.epochs, found.why

    assert epochs(800, 20)[0] == 20
    most, why = epochs(800, None)
    fitting = int(why.split()[0])
    assert 30 < fitting < 40 and most == min(2 * fitting, 60)
    assert epochs(8000, None)[0] == budget.MOST_EPOCHS
    assert epochs(200, None)[0] == budget.USUAL_EPOCHS, "a host may have many more threads"
    assert epochs(8000, 100)[0] == 100


def test_a_refit_is_judged_by_test_images_alone() -> None:
    """It has learned from validation. If it comes to nothing, both splits judge what stays."""
    made, _ = ledger(splits=(400, 600), tests=600, start_s=8.0)
    whole, refit = made.ending(1, SPEED), made.ending(1, SPEED, refit=True)
    assert (whole.judged, refit.judged) == (1000, 600)
    made.forecast.tests = 0
    assert made.ending(1, SPEED, refit=True).judged == 1000, "the table has no test images"

    def room_s(without_s: float) -> float:
        found = budget.plan_refit(600, 100, refit, SPEED, 2000, 13, (224,), without_s)
        assert isinstance(found, Refit)
        return found.seconds

    at_224 = refit.at(224 / SPEED.side_px).seconds
    assert room_s(0) == room_s(at_224) == room_s(at_224 + 50) + 50


def test_a_refit_leaves_time_for_an_end_that_few_images_judge() -> None:
    made, clock = ledger(1000.0, splits=(400, 600), views=8)
    assert made.ending(1, SPEED, fewest=True).judged == 8 * 2 * budget.FEWEST_JUDGED
    made.forecast.judged_images = 50
    assert made.ending(1, SPEED, fewest=True).judged == 8 * 2 * 50
    # It came to nothing, and 95 s are left: as many images judge as there is time for.
    clock.now += 900
    expected = replace(ENDING, images_per_s=100.0)
    left_s = budget.usable(1000.0) - 900 - expected.fixed_s
    fitting = in_time._fitting(made, expected, (400, 600))
    each_s = 8 * 2 * (1 + budget.ENDING_MARGIN) / 100.0
    assert 0 < fitting * each_s <= left_s < (fitting + 1) * each_s
    clock.now += 200
    assert in_time._fitting(made, expected, (400, 600)) == 0


def test_a_network_that_was_timed_is_not_guessed() -> None:
    made, _ = ledger(splits=(400, 600), timed={SPEED.trial: 50.0})
    assert made.ending(1, SPEED).images_per_s == 50.0
    assert made.ending(1, replace(SPEED, trial="trial-001")).images_per_s == 300.0
    rate = variants.predictions_per_s(ModelConfig(mode="finetune", side_px=32, views=8), 3)
    # Views are predictions of their own: the model's eight would take eight times as long.
    assert 20 < rate < 1e6


def test_with_all_threads_a_refit_fits_where_one_thread_would_be_too_slow() -> None:
    def side(speed: Speed) -> int:
        found = budget.plan_refit(427, 100, ENDING, speed, 2000, 13, (224, 128))
        assert isinstance(found, Refit)
        return found.side_px

    # Five epochs at 224 px take 306 s by the trial's rate.
    assert side(SPEED) == 128
    assert side(SPEED.alone) == 224


def test_the_end_is_estimated_again_with_each_trial_and_each_measurement() -> None:
    made, clock = ledger(splits=(400, 600), start_s=4.0)
    guessed = made.ending(0, None).seconds
    assert made.ending(50, None).seconds > guessed
    assert made.ending(0, SPEED).seconds < guessed
    slow = replace(SPEED, forward_images_per_s=10.0)
    # A split that takes too long is sampled, so the end stays below a share of the budget.
    assert made.ending(0, slow).judged == 2 * budget.FEWEST_JUDGED
    made.forecast.embedded_per_s = 80.0
    assert made.ending(0, replace(SPEED, forward_images_per_s=None)).images_per_s == 80.0
    clock.now += 20
    made.started()
    assert made.start_s == 20 and made.ending(0, SPEED).seconds > guessed / 2


def test_a_server_far_away_gets_the_time_that_trials_take_there() -> None:
    """Of 155 trials each took half a second where an answer takes 60 ms, and 60 ms were planned."""
    near, far = (
        ledger(600.0, start_s=8.0, answer_s=answer_s)[0].ending(155, SPEED)
        for answer_s in (0.0, 0.06)
    )
    questions = budget.QUESTIONS * 155 + budget.QUESTIONS_OF_MODEL
    more_s = 0.06 * questions * (1 + budget.ENDING_MARGIN)
    assert more_s > 60 and far.fixed_s - near.fixed_s == pytest.approx(more_s)
    # What comes after the trials' runs is kept free for it.
    assert far.after_runs_s - near.after_runs_s == pytest.approx(0.06 * budget.QUESTIONS_OF_MODEL)
    for trials in (0, 155):
        one = replace(far, trials=trials)
        assert one.after_runs_s < one.fixed_s

    # Which trials get a run there, its clock says: far more trials would else get no time at all.
    def slow(trials: int) -> float:
        return ledger(600.0, start_s=8.0, answer_s=1.0)[0].ending(trials, SPEED).fixed_s

    more_s = slow(10) - slow(1) - (1 + budget.ENDING_MARGIN) * 9 * 0.08
    assert more_s == pytest.approx((1 + budget.ENDING_MARGIN) * 9 * budget.QUESTIONS)
    most_s = (1 + budget.ENDING_MARGIN) * (budget.RECORDED * 600 + 100 * 0.08)
    assert slow(100) - slow(0) == pytest.approx(most_s)


def test_the_upload_of_a_package_is_planned_with() -> None:
    """Over a line of 4 Mbit/s a package of 36 MB came 80 s after the budget."""

    def planned(*mb_per_s: float | None, budget_s: float = 600.0, **more: Any) -> Ending:
        made, _ = ledger(budget_s, start_s=8.0, uploads=mb_per_s, weights_mb=36.0, **more)
        return made.ending(3, SPEED)

    here, far = planned(), planned(0.5)
    assert here.upload_s == 0 and far.upload_s == 80.0
    assert far.seconds - here.seconds == pytest.approx(80 * (1 + budget.ENDING_MARGIN))
    assert far.after_runs_s - here.after_runs_s == 80.0
    assert "upload 80.0 s" in str(far) and "upload" not in str(here)
    # To artifacts.uri, too; of an ensemble all networks go.
    assert planned(0.5, 4.0).upload_s == 90.0
    assert planned(0.5, heads_mb=20.0).upload_s == 120.0
    assert planned(0.5, others=4).upload_s == 80.0 + 2 * 72.0
    # What is only guessed takes no more than its part: most lines are faster.
    assert planned(None).upload_s == 40.0 / budget.GUESSED_MB_PER_S
    assert planned(None, budget_s=90.0).upload_s == budget.GUESSED_UPLOAD * 90
    assert planned(None, 0.5, budget_s=90.0).upload_s == 80 + budget.GUESSED_UPLOAD * 90


def test_a_budget_that_an_upload_needs_alone_says_so() -> None:
    """A server had hung for an hour. By that rate every later search ended with a first message
    that did not name it, and none of them uploaded anything that had shown another one."""

    made, _ = ledger(600.0, start_s=8.0, uploads=(0.02,), weights_mb=36.0)
    with pytest.raises(TooShort, match=r"need about 23\d\d s, 2000 s of them to upload.*the last"):
        made.trials_begin()
    assert "delete mlflow/uploads.json in the run's folder" in str(made.too_short())
    made, _ = ledger(9.0, start_s=8.0, uploads=(None,), weights_mb=36.0)
    assert ", 1 s of them to upload the package. Set" in str(made.too_short())
    made.forecast.uploads = ()
    assert "upload" not in str(made.too_short())


def test_of_a_finished_search_the_weights_are_weighed(tmp_path: Path) -> None:
    metrics = {"images_per_s": 100.0, "step_s": 0.3, "forward_s": 0.1}
    trial = Trial("trial-0", {}, 0.9, 3, False, (metrics,), "somewhere")
    found = ended(trial, ModelConfig(mode="finetune", side_px=128), None)
    found.best = SimpleNamespace(checkpoint=str(tmp_path))
    # AdamW keeps two numbers for each weight, which no package has: three times as much was
    # planned with, and a refit had no time.
    weights = torch.zeros(750_000)
    moments = {f"{name}/w": Piece.whole(weights) for name in MOMENTS}
    kept = Snapshot({"w": Piece.whole(weights)}, moments)
    checkpoint.write(tmp_path, kept, LoopState())
    made, _ = ledger(600.0, uploads=(1.0,), weights_mb=70.0, heads_mb=9.0)
    made.ending(1, in_time._expect(found, [trial], made))
    assert made.ending(1, SPEED).upload_s == pytest.approx(3.0 + budget.BESIDE_WEIGHTS_MB, abs=0.01)
    assert checkpoint.weights_mb(tmp_path / "gone") == 0

    # The checkpoint of a head has no backbone, and its package has one: its end was late.
    asked: list[str] = []
    made.forecast.weigh_network = lambda model: asked.append(model.name) or 14.0
    found.job.model = ModelConfig(mode="frozen")
    in_time._expect(found, [trial], made)
    in_time._expect(found, [trial], made)
    assert made.forecast.weights_mb == pytest.approx(17.0, abs=0.01) and len(asked) == 1
    # Those of an ensemble are all in its own.
    found.shares = (0.5, 0.5)
    in_time._expect(found, [trial], made)
    assert made.forecast.weights_mb == pytest.approx(3.0, abs=0.01)


def test_heads_are_weighed_with_their_backbones(tmp_path: Path) -> None:
    """Of an ensemble of heads nothing was planned but the heads."""
    for name, numbers in (("a", 250_000), ("b", 500_000), ("c", 750_000)):
        kept = Snapshot({"w": Piece.whole(torch.zeros(numbers))})
        checkpoint.write(tmp_path / name, kept, LoopState())
    at = {side_px: ModelConfig(mode="frozen", side_px=side_px) for side_px in (128, 224)}
    sizes = {128: 20.0, 224: 30.0}
    made, _ = ledger(600.0, weigh_network=lambda model: sizes[model.pixels])
    heads = {str(tmp_path / "a"): at[224], str(tmp_path / "b"): at[128]}
    for more, most, mb in (
        ({}, 2, 53.0),
        ({}, 1, 32.0),
        # Two heads on one backbone share it.
        ({str(tmp_path / "c"): at[128]}, 3, 56.0),
    ):
        made.forecast.weigh_heads(heads | more, most)
        assert made.forecast.heads_mb == pytest.approx(mb, abs=0.05)


def test_images_that_take_long_to_read_are_planned_with() -> None:
    """With photos of 12 megapixels in an object store the end was a minute late."""

    def planned(image_s: float, **more: Any) -> Ending:
        made, _ = ledger(2000.0, splits=(400, 600), start_s=8.0, image_s=image_s, **more)
        return made.ending(1, SPEED)

    plain, large = planned(0.0), planned(0.1)
    assert planned(0.0005) == plain, "small pictures are in the margin"
    added_s = budget.READ * 0.1 - budget.COVERED_S
    assert plain.judged == large.judged == 1000
    more_s = 1000 * added_s * (1 + budget.ENDING_MARGIN)
    assert large.judged_s - plain.judged_s == pytest.approx(more_s) and more_s > 100
    assert large.prediction_s == plain.prediction_s
    # An image is read once for all of its views.
    of_views = planned(0.1, views=8)
    assert of_views.reading_s == pytest.approx(budget.READ * 0.1 / 8 - budget.COVERED_S)

    # In a shorter budget fewer images judge, and an ensemble is checked on fewer.
    made, _ = ledger(600.0, splits=(400, 600), start_s=8.0, image_s=0.1)
    assert made.ending(1, SPEED).judged < 1000
    few = in_time._fitting(made, large, (400, 600))
    assert few < in_time._fitting(made, plain, (400, 600))
    models = {"a": ModelConfig(mode="finetune", side_px=128)}
    choosing = Choosing(made, models, {"a": SPEED})
    checked = choosing.checked(["a"], 1000)
    assert checked is not None and budget.FEWEST_JUDGED < checked < 1000
    made.forecast.image_s = 0.0
    assert choosing.checked(["a"], 1000) is None
    # What embeds images has read them.
    made.forecast.image_s, made.forecast.embedded_per_s = 0.1, 8.0
    assert made.ending(1, replace(SPEED, forward_images_per_s=None)).reading_s == 0


def test_images_that_cannot_be_read_end_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> float:
        raise RaypipeError("a file is gone")

    monkeypatch.setattr(in_time.image_seconds, "measured", fails)
    feed, model = SimpleNamespace(val="val"), SimpleNamespace(pixels=224)
    job: Any = SimpleNamespace(feed=feed, model=model)
    assert in_time._image_s(job, cast(Any, None)) == 0


def test_too_few_shifted_copies_get_no_time() -> None:
    made, _ = ledger(100.0, shifted=1800, least_shifted=360)
    slow, fast = (
        replace(SPEED, forward_images_per_s=40.0),
        replace(SPEED, forward_images_per_s=60.0),
    )
    # 8 s are 320 of them, or 480.
    assert made.ending(0, slow).seconds == made.ending(0, slow).least_s
    assert made.ending(0, fast).seconds == pytest.approx(
        made.ending(0, fast).least_s + 8 + budget.FIT_S
    )


def test_trials_stop_when_the_end_has_to_begin_and_earlier_for_a_refit() -> None:
    made, clock = ledger(100.0, refits=True, refit_share=0.5)
    assert made.is_over(0, None) is None, "nothing has begun"
    clock.now += 20
    made.started()
    made.trials_begin()
    end_s = budget.trials_end(100, 20, made.ending(1, SPEED), 0.5, True)
    clock.now = 1000 + end_s - 0.1
    assert made.is_over(1, SPEED) is None
    clock.now += 0.2
    assert "the budget of 100 s" in str(made.is_over(1, SPEED))
    assert made.is_over(1, None) is None, "without a first answer, the refit's part is theirs too"
    clock.now = 1090
    assert made.is_over(1, None) is not None
    said = made.summary()
    assert said and said["phases"]["start"] == {"planned_s": None, "spent_s": 20.0}
    assert said["phases"]["ending"]["planned_s"] > 0 and said["phases"]["ending"]["evidence"]


def test_a_budget_that_is_too_short_says_how_long_it_has_to_be() -> None:
    made, clock = ledger(10.0)
    clock.now += 9
    made.started()
    with pytest.raises(RaypipeError, match="before a trial had finished an epoch") as raised:
        raise made.too_short()
    assert "start 9 s" in str(raised.value) and "search.budget_s=30 or more" in str(raised.value)
    early, clock = ledger(5.0)
    clock.now += 5
    assert "search.budget_s=60 or more" in str(early.too_short()), "20 s, and then 40, were too few"


def test_after_a_kill_a_longer_budget_is_no_way_out() -> None:
    """It is another search: who followed the advice lost all finished trials."""
    made, clock = ledger(28.0, splits=(400, 600))
    made.goes_on = True
    clock.now += 8
    made.started()
    clock.now += 1
    with pytest.raises(TooShort, match="no time left to go on with it") as raised:
        made.trials_begin()
    said = str(raised.value)
    assert "start 8 s, reading 1 s" in said and "Run the same command again" in said
    assert "is another search" in said and "or more" not in said
    # Trials that went on and finished no epoch need more time, and so does a first run.
    began, _ = ledger(600.0)
    began.goes_on = True
    began.trials_begin()
    assert str(began.too_short()).endswith(" or more.")
    # Before the search is known, it may be either.
    unknown = str(ledger(5.0)[0].too_short())
    assert "search.budget_s=60 or more" in unknown and "interrupted before" in unknown


def test_no_trial_begins_without_time_for_it() -> None:
    made, clock = ledger(28.0, splits=(400, 600))
    clock.now += 8
    made.started()
    with pytest.raises(RaypipeError, match=r"start 8 s, reading 1 s; test"):
        clock.now += 1
        made.trials_begin()


def test_what_cannot_look_at_a_clock_is_interrupted() -> None:
    late = interrupted(0.05, lambda: OutOfTime("too long"))
    with pytest.raises(OutOfTime, match="too long"), late:
        try:
            threading.Event().wait(5)
        except Exception as e:  # as a store does that cannot be opened
            raise ValueError("something else") from e
    with interrupted(1e18, lambda: OutOfTime("too long")):
        pass  # the system's timer refuses such a number
    with interrupted(0.05, lambda: OutOfTime("too long")):
        pass
    time.sleep(0.1)  # the timer is gone


def test_the_choice_of_an_ensemble_is_a_part_of_the_ending_until_it_begins() -> None:
    """1,000 images, which 7 candidates predict, and then 3 members; each 300 a second."""
    asked = {"splits": (1000,), "others": 2, "combined": 7000, "chosen": 1000}
    made, clock = ledger(600.0, start_s=8.0, **asked)
    made.trials_begin()
    before = made.ending(10, SPEED)
    assert before.judged == 1000 and before.prediction_s == pytest.approx(3 / 300)
    assert before.between_s == pytest.approx((7000 + 3 * 1000) / 300)
    assert made.ending(2, SPEED).prediction_s == pytest.approx(2 / 300), "nobody else has a network"
    slow = replace(SPEED, forward_images_per_s=30.0)
    assert made.ending(10, slow).between_s == budget.CHOOSING * 600, "among fewer, then"
    made.forecast.combined = made.forecast.chosen = 5
    assert made.ending(10, SPEED).between_s == 5, (
        "candidates are read, however few images there are"
    )
    made.forecast.combined, made.forecast.chosen = 7000, 1000
    made.forecast.again_s = 20.0
    assert made.ending(10, slow).between_s == budget.CHOOSING * 600 + 20
    made.forecast.again_s = 0.0
    clock.now += 560
    assert made.is_over(10, SPEED)  # trials end early enough
    made.forecast.combined = made.forecast.chosen = 0
    with made.reading(is_answered=True):
        pass
    clock.now += 30
    late = made.reading(is_answered=True, phase="ensemble")
    with pytest.raises(TooShort), late:
        pass


def test_what_comes_after_search_limits_is_still_interrupted() -> None:
    """Models were measured under an alarm of their own, which ended the search's."""
    made = Ledger(2.4)
    with pytest.raises(TooShort), made.reading():
        with made.reading(phase="limits"):
            pass
        threading.Event().wait(5)


def test_an_alarm_never_takes_a_model_that_is_there() -> None:
    """Trials look at the clock; what follows an answer has an alarm of its own."""
    made, _clock = ledger(600)
    with made.reading():
        with made.reading():
            pass
        made.trials_begin()
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    with made.reading(), made.reading(is_answered=True, least_s=60):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 50


def test_after_a_refit_the_speed_is_still_the_trials() -> None:
    """A trial of 128 px: what is to be predicted at 224 px takes three times as long."""
    metrics = {"images_per_s": 100.0, "step_s": 0.3, "forward_s": 0.1}
    trial = Trial("trial-0", {}, 0.9, 3, False, (metrics,), "somewhere")
    found: Any = SimpleNamespace(
        trials=(trial,),
        again=(),
        stay=(),
        models={"trial-0": ModelConfig(mode="finetune", side_px=128)},
        job=SimpleNamespace(
            model=ModelConfig(mode="finetune", side_px=224), train=TrainConfig(workers=2)
        ),
    )
    speed = in_time.speed_of(found)
    assert speed is not None and speed.side_px == 128


def test_in_a_short_budget_shifted_copies_get_what_an_ensemble_and_a_refit_leave() -> None:
    """Ten seconds were kept for them, and there was no time for an ensemble."""
    copied = {"shifted": 3000, "least_shifted": 600, "start_s": 8.0}
    for budget_s, waits in ((45.0, True), (59.9, True), (60.0, False), (600.0, False)):
        made, _ = ledger(budget_s, **copied)
        during = made.ending(4, SPEED)
        assert during.seconds > during.least_s + budget.FIT_S, "trials end as before"
        made.forecast.trials_ended = True
        after = made.ending(4, SPEED)
        assert after.least_s == during.least_s
        assert after.seconds == (after.least_s if waits else during.seconds)
        # They are made if there is time: see in_time.ending.
        assert after.least_shifted_s == during.least_shifted_s
        assert after.fit_s == during.fit_s


def begun(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, int], *settings: str, budget_s: float = 90.0
) -> tuple[Ledger, Clock]:
    """The ledger of `raypipe tune` on a table with so many images of each split."""
    monkeypatch.setattr(in_time, "_image_s", lambda job, pinned: 0.0)
    monkeypatch.setattr(in_time, "_has_more_threads", lambda job: True)
    job = load(Job, None, ["table.uri=t", "search.preset=fast", *settings])
    none, task = cast(Any, None), Task("single_label", ("a", "b"))
    pinned = Pinned(none, none, {}, task, counts, frozenset(counts), none)
    made, clock = ledger(budget_s)
    in_time.begin(job, pinned, made)
    return made, clock


def test_copies_of_which_no_estimate_can_come_are_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 27 validation images none can: 19 s of 90 were kept for them, and trials began late or
    not at all. And the result said that there had been no time."""

    def copies(val: int, test: int, *settings: str) -> tuple[int, int]:
        counts = {"train": 219, "val": val, "test": test}
        forecast = begun(monkeypatch, counts, *settings)[0].forecast
        return forecast.copies(refit=False), forecast.copies(refit=True)

    least = LEAST_VALIDATION
    assert copies(27, 34) == (0, 0) and copies(least - 1, least) == (0, 9 * least)
    assert copies(500, 500) == (1800, 1800) and copies(150, 34) == (1350, 0)
    # Who learns validation, or test images, is asked about others, or about none.
    assert copies(500, 300, "feed.train=val", "search.refit=null") == (1800, 0)
    assert copies(500, 300, "feed.val=train")[0] == 1800
    assert copies(500, 300, "feed.test=val") == (1800, 0)
    assert copies(500, 300, "model.task=multi_label") == (0, 0)
    assert copies(500, 300, "registry.severity_images=0") == (0, 0)

    # A search of a busy host, whose end took 23 s, and then the cluster's end.
    made, clock = begun(monkeypatch, {"train": 219, "val": 27, "test": 34})
    clock.now += 18.2
    made.started()
    made.forecast.trials_ended = True
    made.forecast.others = made.forecast.combined = made.forecast.chosen = 0
    head = Speed("first-answer-2", 1, 48, 262.0, 270.0)
    planned = made.ending(3, head)
    assert planned.seconds == planned.least_s and 25 < planned.seconds < 30
    made.forecast.shifted = 1800
    assert made.ending(3, head).seconds - planned.seconds == pytest.approx(
        7.2 - 0.533 + 12.74, 0.01
    )


def test_what_heads_say_of_validation_costs_an_ensemble_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten candidates were planned to predict 303 images, where six heads had said it already: the
    choice took 1 s of 9, and no trial began."""
    made, _ = begun(monkeypatch, {"train": 240, "val": 63, "test": 97}, budget_s=900.0)
    assert made.forecast.combined == 10 * 63
    made.forecast.works_per_s, made.forecast.others = 27.0, 0

    def asked(trials: int) -> float:
        ending = made.ending(trials, None)
        return (ending.between_s - 63 * ending.judging_s) * 27.0

    # A trial by a soup and by an ensemble, at most.
    assert asked(1) == pytest.approx(2 * 63) and asked(3) == pytest.approx(6 * 63)
    assert asked(5) == asked(50) == pytest.approx(630)


def test_before_a_trial_reports_its_network_is_the_slowest_that_it_may_have() -> None:
    """At 128 px trials were planned with an end at 224 px, of three times the work."""
    made, _ = ledger(600.0, splits=(400, 600))
    small, large = (ModelConfig(mode="finetune", side_px=side) for side in (56, 112))
    made.forecast.slowest_of([small, large])
    assert made.ending(1, None).images_per_s == budget.GUESSED_IMAGES_PER_S, "nothing is measured"
    made.forecast.works_per_s = 30.0
    unknown = ModelConfig(name="timm:large", mode="finetune", side_px=64)
    made.forecast.slowest_of([small, unknown])
    assert made.ending(1, None).images_per_s == 30.0
    made.forecast.slowest_of([small, large])
    assert made.ending(1, None).images_per_s == pytest.approx(120.0)
    assert made.ending(1, SPEED).images_per_s == 300.0


def test_a_host_that_is_slow_to_start_is_slower_still_after_trials() -> None:
    """With a start of 16 s the end took 21 s, and the cluster's end; 18 were planned for both."""
    quiet, full = replace(ENDING, start_s=9.0), replace(ENDING, start_s=16.3)
    assert quiet.fixed_s == replace(quiet, heads_alone=True).fixed_s
    more_s = full.fixed_s - replace(full, heads_alone=True).fixed_s
    assert more_s == pytest.approx(6.3 * (1 + budget.ENDING_MARGIN))
    slowest = replace(ENDING, start_s=60.0)
    more_s = slowest.fixed_s - replace(slowest, heads_alone=True).fixed_s
    assert more_s == pytest.approx(budget.MOST_SLOWER_S * (1 + budget.ENDING_MARGIN))
    # Where time is left for heads alone, they get it.
    made, _ = ledger(90.0, start_s=16.3)
    left_s, heads_s = made.left_s(1, None), made.left_for_heads_s(40.0)
    assert left_s is not None and heads_s is not None
    assert heads_s - left_s == pytest.approx(6.3 * (1 + budget.ENDING_MARGIN))


def ended(trial: Trial, model: ModelConfig, plan: Any) -> Any:
    """The result of a search of one trial, without a refit."""
    return SimpleNamespace(
        trials=(trial,),
        again=(),
        stay=(),
        shares=(),
        refitted=False,
        models={trial.name: model},
        job=SimpleNamespace(model=model, train=TrainConfig(workers=2)),
        plan=plan,
    )


def test_without_time_for_shifted_copies_the_package_does_not_name_the_users_setting() -> None:
    """It said "registry.severity_images is 0", which nobody had set."""
    metrics = {"images_per_s": 100.0, "step_s": 0.3, "forward_s": 0.1}
    trial = Trial("trial-0", {}, 0.9, 3, False, (metrics,), "somewhere")
    tuned = ModelConfig(mode="finetune", side_px=128)
    plan = SimpleNamespace(job=SimpleNamespace(registry=RegistryConfig()))
    found = ended(trial, tuned, plan)
    made, clock = ledger(600.0, splits=(400, 600), shifted=1800, least_shifted=360)
    clock.now += 590
    published, until, _ = in_time.ending(found, made)
    assert published is found.plan and until is not None and until <= time.monotonic()
    # The registered version says what became of it: see test_lacking.py.
    assert made.notes == []
    # What is not made is not in the plan, nor is the cluster's end, which no phase counts.
    plain, _ = ledger(600.0, splits=(400, 600))
    in_time.ending(found, plain)
    planned_s = made.phase("ending").planned_s
    assert planned_s is not None and planned_s == plain.phase("ending").planned_s
    assert planned_s == pytest.approx(plain.ending(1, SPEED).seconds - budget.closing_s(0.0))


def test_a_soup_and_its_first_trial_are_two_networks() -> None:
    """They were told as one, and the end took as long again as was planned."""
    metrics = {"images_per_s": 100.0, "step_s": 0.3, "forward_s": 0.1}
    trial = Trial("trial-0", {}, 0.9, 3, False, (metrics,), "somewhere")
    tuned = ModelConfig(mode="finetune", side_px=128)
    job = SimpleNamespace(model=tuned, train=TrainConfig(workers=2))
    found: Any = SimpleNamespace(trials=(trial,), again=(), models={"trial-0": tuned}, job=job)
    made, _ = ledger(600.0)
    alone = in_time._expect(found, [trial], made)
    assert alone is not None and made.forecast.others_s == 0
    both = in_time._expect(found, [trial, trial], made)
    assert both == alone and made.forecast.others_s == pytest.approx(1 / 300)


def test_a_refit_of_more_views_leaves_time_for_them(tmp_path: Path) -> None:
    """Eight views of a trial's one: the end took eight times what was planned for it."""
    metrics = {"images_per_s": 100.0, "step_s": 0.3, "forward_s": 0.1}
    trial = Trial("trial-0", {}, 0.9, 3, False, (metrics,), "somewhere")
    tuned, train = ModelConfig(mode="finetune", side_px=128), TrainConfig(workers=2)
    job: Any = SimpleNamespace(
        train=train,
        feed=SimpleNamespace(train="train", val="val"),
        search=SimpleNamespace(trains_again=True),
    )
    plan: Any = SimpleNamespace(job=SimpleNamespace(registry=RegistryConfig()))
    room_s: list[float] = []
    end_s: list[float] = []
    for views in (1, 8):
        made, _ = ledger(600.0, splits=(400, 600), tests=600)
        found: Any = SimpleNamespace(
            trials=(trial,),
            again=(),
            stay=(),
            shares=(),
            refitted=False,
            models={"trial-0": tuned},
            job=SimpleNamespace(model=tuned, train=train),
            pinned=SimpleNamespace(counts={"train": 800, "val": 400}),
            best=SimpleNamespace(key="k"),
            folder=tmp_path / str(views),
            plan=plan,
        )
        found.folder.mkdir()
        job.search.refit = {"model.views": views}
        planned = in_time._planned(job, job.search.refit, found, made, 0.0)
        assert isinstance(planned, Refit)
        room_s.append(planned.seconds)
        found.refitted, found.again = True, ("trial-0",)
        found.job.model = tuned.model_copy(update={"views": views})
        in_time.ending(found, made)
        end_s.append(made.phase("ending").planned_s or 0.0)
    more_s = 7 * 600 / 300 * (1 + budget.ENDING_MARGIN)
    assert room_s[0] - room_s[1] == pytest.approx(more_s)
    assert end_s[1] - end_s[0] == pytest.approx(more_s)


def test_predictions_after_the_trials_are_as_fast_as_their_threads() -> None:
    metrics = {"images_per_s": 100.0, "step_s": 0.3, "forward_s": 0.1}

    def rate(has_more_threads: bool, is_frozen: bool = False) -> float | None:
        speed = budget.speed_of("trial-0", 128, is_frozen, metrics, 3, has_more_threads)
        assert speed is not None and speed.train_images_per_s == 100
        return speed.forward_images_per_s

    assert rate(False) == pytest.approx(300)
    assert rate(True) == pytest.approx(300 * budget.PREDICTS_ALONE)
    assert rate(True, is_frozen=True) is None


def test_predictions_are_cpu_work_whatever_trials_trained_on() -> None:
    """A GPU's forward pass was taken for that of the CPUs, on which an ensemble is chosen."""
    metrics = {"images_per_s": 1000.0, "step_s": 0.05, "forward_s": 0.01, "gpu_memory_mb": 900.0}
    speed = budget.speed_of("trial-0", 112, False, metrics, 3)
    assert speed is not None and speed.train_images_per_s == 1000
    assert speed.forward_images_per_s is None
    tuned = ModelConfig(mode="finetune", side_px=112, views=2)
    per_s = networks.of_works(50.0)
    on_cpus = networks.on_cpus(speed, tuned, per_s)
    # A quarter of the pixels, at 50 images a second of 224 px.
    assert on_cpus.forward_images_per_s == pytest.approx(200)
    guessed = networks.on_cpus(speed, tuned, networks.of_works(None)).forward_images_per_s
    assert guessed == pytest.approx(4 * budget.GUESSED_IMAGES_PER_S)
    # What was measured on CPUs stays, and a head's backbone is not its own to time.
    assert networks.on_cpus(SPEED, tuned, per_s) is SPEED
    assert networks.on_cpus(speed, ModelConfig(), per_s) is speed

    made, _ = ledger(3600.0, works_per_s=50.0)
    trial = Trial("trial-0", {}, 0.9, 3, False, (metrics,), "somewhere")
    choosing = Choosing.of(made, {"trial-0": tuned}, [trial])
    assert choosing.asking_s("trial-0", 400) == pytest.approx(400 * 2 / 200)
    assert made.forecast.rate(choosing.speeds["trial-0"]) == pytest.approx(200)


def test_a_network_of_unknown_work_is_timed_once_on_the_cpus() -> None:
    """After trials on a GPU any backbone counted as efficientnet_lite0, as fast as 50 a second."""
    asked: list[tuple[str, int]] = []

    def time_network(model: ModelConfig) -> float:
        asked.append((model.name, model.pixels))
        return 0.0 if model.name == "timm:broken" else 2.0

    made, _ = ledger(600.0, works_per_s=50.0, time_network=time_network)
    per_s = made.forecast.network_per_s
    large = ModelConfig(name="timm:large", mode="finetune", side_px=64)
    on_gpu = replace(SPEED, forward_images_per_s=None)
    assert networks.on_cpus(on_gpu, large, per_s).forward_images_per_s == pytest.approx(2.0)
    assert per_s(large.model_copy(update={"side_px": 128})) == pytest.approx(0.5)
    assert asked == [("timm:large", 64)]
    # What cannot be timed is asked for once, too. And where the work is known, nothing is timed.
    broken = large.model_copy(update={"name": "timm:broken"})
    assert per_s(broken) == per_s(broken) == 50
    assert per_s(ModelConfig(mode="finetune", side_px=112)) == pytest.approx(200)
    assert len(asked) == 2


def test_a_network_that_cannot_be_timed_ends_no_search(
    monkeypatch: pytest.MonkeyPatch, heard: None, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(model: ModelConfig, classes: int) -> float:
        raise ImportError("no such library")

    monkeypatch.setattr(variants, "predictions_per_s", fails)
    assert in_time._network_per_s(ModelConfig(), classes=2) == 0
    assert "efficientnet_lite0 cannot be timed" in caplog.text


@pytest.mark.parametrize(("image_s", "batches"), [(2.0, 2), (0.2, 3), (0.01, 5)])
def test_a_slow_network_is_timed_on_few_images(
    monkeypatch: pytest.MonkeyPatch, image_s: float, batches: int
) -> None:
    """Eight images at once took 16 s where one takes two. The first call makes much else."""
    now, asked = [0.0], list[int]()

    def predict(pixels_NHWC: Any) -> None:
        now[0] += image_s * len(pixels_NHWC) + (0.0 if asked else 3.0)
        asked.append(len(pixels_NHWC))

    network = SimpleNamespace(predict=predict)
    built = SimpleNamespace(for_inference=lambda: network)
    monkeypatch.setattr(variants, "_built", lambda model, classes: built)
    monkeypatch.setattr(variants, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    rate = variants.predictions_per_s(ModelConfig(mode="finetune", side_px=32), 3)
    assert rate == pytest.approx(1 / image_s)
    assert asked == [1, 1, 8, 32, 32][:batches]


def test_a_large_network_is_judged_by_as_many_images_as_there_is_time_for(tmp_path: Path) -> None:
    """200 of each split were predicted in any case: 400 s at one a second, in a budget of 180 s."""
    metrics = {"images_per_s": 1000.0, "step_s": 0.05, "forward_s": 0.01, "gpu_memory_mb": 900.0}
    trial = Trial("trial-0", {}, 0.9, 3, False, (metrics,), "somewhere")
    large = ModelConfig(name="timm:large", mode="finetune", side_px=64)
    job = validate(Job, {"table": {"uri": "-"}, "run": {"dir": str(tmp_path)}}).training
    plan = Plan(job, cast(Any, None), "k", tmp_path, cast(Any, None))
    found = ended(trial, large, plan)

    def judged(spent_s: float, images_per_s: float = 1.0) -> int | None:
        """How many images of each split."""
        asked = {"splits": (400, 600), "start_s": 8.0, "time_network": lambda model: images_per_s}
        made, clock = ledger(180.0, **asked)
        clock.now += spent_s
        published, until, runs_until = in_time.ending(found, made)
        # A file is written to as fast as our own code runs: each trial gets its run there.
        assert until is not None and runs_until is None
        made.forecast.answer_s = 0.01
        _, until, runs_until = in_time.ending(found, made)
        assert until is not None and runs_until is not None and runs_until > until
        return published.job.registry.judged_images

    # Two splits, and the margin: 2.3 s an image of each.
    fixed_s = replace(ENDING, trials=1).fixed_s
    assert judged(60) == int((budget.usable(180.0) - 60 - fixed_s) / 2.3)
    assert judged(170) == budget.LEAST_JUDGED
    # Where they are planned with a part of the budget, late trials take nothing of them.
    assert judged(170, 16.0) == int(budget.JUDGED * 180 * 16 / 2) > budget.FEWEST_JUDGED


def test_at_another_side_only_the_refitted_network_takes_longer() -> None:
    ending = replace(ENDING, others_s=0.02)
    assert ending.prediction_s == pytest.approx(1 / 300 + 0.02)
    assert ending.at(2.0).prediction_s == pytest.approx(4 / 300 + 0.02)
    more_s = ending.at(2.0).judged_s - ending.judged_s
    assert more_s == pytest.approx(1000 * 3 / 300 * (1 + budget.ENDING_MARGIN))


def test_candidates_of_an_ensemble_are_asked_for_half_of_the_time_to_choose_it() -> None:
    made, clock = ledger(600.0)
    is_late = made.choosing()
    half_s = budget.CHOOSING * 600 / 2
    assert not is_late() and not is_late(half_s - 1) and is_late(half_s + 1)
    clock.now += half_s + 1
    assert is_late()
    made.budget_s = None
    assert not made.choosing()()


def test_a_ctrl_c_whose_cleaning_up_takes_too_long_is_still_one() -> None:
    with pytest.raises(KeyboardInterrupt), interrupted(0.05, lambda: OutOfTime("too long")):
        try:
            raise KeyboardInterrupt
        finally:
            threading.Event().wait(5)


def test_an_alarm_after_all_is_done_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = signal.setitimer

    def late(which: int, seconds: float) -> None:
        if not seconds:  # the timer is about to be stopped
            signal.raise_signal(signal.SIGALRM)
        real(which, seconds)

    monkeypatch.setattr(signal, "setitimer", late)
    before = signal.getsignal(signal.SIGALRM)
    with interrupted(60, lambda: OutOfTime("too long")):
        pass
    assert signal.getsignal(signal.SIGALRM) is before


def test_without_a_budget_a_ledger_only_counts() -> None:
    made, clock = ledger()
    made.budget_s = None
    clock.now += 1e9
    made.trials_begin()
    assert made.is_over(3, None) is None and made.left_s(3, None) is None
    assert made.summary() is None and made.facts() == {}
    # What was not made is said all the same.
    made.notes += ["No soup: no trial has begun", "No refit: it diverged"]
    assert made.facts() == {"notes": "No soup: no trial has begun. No refit: it diverged"}
    with made.reading():
        pass


def test_a_preset_sets_only_what_the_user_did_not() -> None:
    job = load(Job, None, ["table.uri=t", "search.preset=good", "search.budget_s=90"])
    assert job.search.budget_s == 90 and job.search.samples == MANY
    assert job.search.refit == {"model.side_px": 224}
    none = load(Job, None, ["table.uri=t", "search.preset=good", "search.refit=null"])
    assert none.search.refit is None and none.search.budget_s == 1200
    assert (job.search.first_answer, job.search.ensemble) == (True, 5)
    fast = validate(SearchConfig, {"preset": "fast"})
    assert (fast.budget_s, fast.refit, fast.first_answer, fast.ensemble) == (180, "heads", True, 5)
    plain = validate(SearchConfig, {"preset": "best", "first_answer": False, "ensemble": 1})
    assert (plain.first_answer, plain.ensemble, plain.refit) == (False, 1, {"model.side_px": 224})
    assert changed(fast, {"budget_s": None}).budget_s is None, "a resolved one is not filled again"
    # All trials of a population begin at once.
    assert validate(SearchConfig, {"preset": "good", "scheduler": "pbt"}).samples == 16
    # It draws all of its trials before the first: 2,000 took more time than a short budget has.
    assert validate(SearchConfig, {"budget_s": 80, "scheduler": "freeze_thaw"}).samples == 16
    endless = validate(SearchConfig, {"preset": "fast", "budget_s": None})
    assert endless.budget_s is None and endless.samples == 16, "nothing would end 2,000"
    assert validate(SearchConfig, {"preset": "fast", "soup": 3}).soup == 3


@pytest.mark.parametrize(
    "more",
    [
        ["search.soup=3"],
        ["search.limits.money=2", "search.stopping.price_per_hour=1"],
    ],
)
def test_a_preset_sets_no_refit_beside_what_refuses_one(more: list[str]) -> None:
    job = load(Job, None, ["table.uri=t", "search.preset=good", *more])
    assert job.search.refit is None and job.search.budget_s == 1200
    with pytest.raises(ConfigError, match=r"refit"):
        load(Job, None, ["table.uri=t", "search.preset=good", "search.refit={}", *more])


@pytest.mark.parametrize("wrong", ["0", "-5", ".nan", ".inf", "soon", "true"])
def test_a_budget_is_a_number_of_seconds(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"search\.budget_s"):
        load(Job, None, ["table.uri=t", f"search.budget_s={wrong}"])


def test_an_unknown_preset_is_one_message() -> None:
    with pytest.raises(ConfigError, match=r"search\.preset"):
        load(Job, None, ["table.uri=t", "search.preset=quick"])


def test_a_search_without_a_budget_has_the_key_of_an_older_raypipe() -> None:
    old = {"samples", "space", "searcher", "warm_start", "scheduler", "grace", "reduction"}
    old |= {"pauses", "concurrent", "gpus_per_trial", "soup", "start", "refit", "stopping", "pbt"}
    plain = SearchConfig()
    assert set(_in_key(plain)) == old and _in_key(plain)["refit"] is None
    asked = plain.model_copy(update={"refit": {"train.epochs": 3}})
    assert _in_key(asked) == _in_key(plain)
    assert _in_key(plain.model_copy(update={"budget_s": 60.0})) != _in_key(plain)


def test_a_budget_that_waited_for_another_process_says_so(tmp_path: Path) -> None:
    """It said that no trial had finished an epoch, and to take a longer budget: another search."""
    folder = tmp_path / "search"
    folder.mkdir()
    late, says = Ledger(2.4), "Another process works on the same search"
    with (folder / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TooShort, match=says) as told, late.reading(), late.owned(folder):
            pass
        # When trials have ended, nothing around it looks at the clock.
        for late in (Ledger(2.4), Ledger(1.0)):
            with pytest.raises(TooShort, match=says), late.owned(folder):
                pass
    assert str(folder) in str(told.value) and "Run the same command again" in str(told.value)
    free = Ledger(2.4)
    with free.reading(), free.owned(folder):
        assert free.waits_for is None and not free.phases
    assert "a trial had finished an epoch" in str(free.too_short())


def test_only_the_wait_is_told_as_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 s in which a learning rate was found were told as waiting, too."""

    clock = Clock()
    ledger = Ledger(600, clock=clock)

    @contextmanager
    def held(folder: Path, says: bool) -> Iterator[None]:
        assert says == (not ledger.phases), "once for each folder"
        clock.now += 0.6
        yield

    monkeypatch.setattr("raypipe.search.ledger.owned", held)
    clock.now += 40
    with ledger.owned(tmp_path):
        clock.now += 5
        assert ledger.lap("reading") == pytest.approx(45)
    spent = {name: round(phase.spent_s, 1) for name, phase in ledger.phases.items()}
    assert spent == {"waiting for another process": 0.6, "reading": 45.0}
    with ledger.owned(tmp_path):
        pass


def test_a_finished_refit_is_known_by_its_model_and_its_training(tmp_path: Path) -> None:
    """Another trial may have become the best since, and its training may have been deleted."""

    def found(best: str, trial: str = "trial-2") -> Any:
        job = SimpleNamespace(folder=lambda key: tmp_path / key)
        trials = (SimpleNamespace(name=trial),)
        return SimpleNamespace(
            folder=tmp_path, job=job, best=SimpleNamespace(key=best), trials=trials
        )

    job: Any = SimpleNamespace(train=TrainConfig(), search=SimpleNamespace(refit={"train.lr": 1}))
    other: Any = SimpleNamespace(train=TrainConfig(), search=SimpleNamespace(refit={"train.lr": 2}))
    plan = Refit(5, 10.0, 64, "it fits")
    kept_refits.keep_plan(job, found("a"), plan)
    assert not kept_refits.is_done(job, found("a"))
    kept_refits.keep_plan(job, found("a"), plan, trained="t")
    kept_refits.keep_plan(other, found("a"), plan)
    assert not kept_refits.is_done(job, found("a")), "its training is gone"
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "result.json").touch()
    assert kept_refits.is_done(job, found("a"))
    assert not kept_refits.is_done(job, found("b")) and not kept_refits.is_done(other, found("a"))
    # A member of an ensemble has the key of the search.
    another = found("a", "trial-5")
    assert not kept_refits.is_done(job, another) and kept_refits.plan_of(job, another) is None
    # As an older raypipe kept it, which named no trial.
    old = {f"a {kept_refits._asked(job)}": {"plan": asdict(plan), "trained": "t"}}
    (tmp_path / kept_refits.PLAN).write_text(json.dumps(old))
    assert kept_refits.is_done(job, found("a")) and not kept_refits.is_done(job, found("b"))
    kept_refits.keep_plan(job, found("a"), plan, trained="t")
    kept_refits.keep_plan(other, found("a"), plan)
    kept_refits.forget_plan(job, found("a"))
    assert not kept_refits.is_done(job, found("a")) and len(kept_refits.begun(found("a"))) == 1


def test_a_refit_has_time_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last step ended where its time ended, so its result was lost each time."""
    made, _ = ledger(60.0)
    monkeypatch.setattr(in_time, "_planned", lambda *given: Refit(5, 10.0, 64, "it fits"))
    monkeypatch.setattr(in_time.refit, "job_of", lambda *given: None)
    monkeypatch.setattr(in_time.refit, "unfinished", lambda done: None)
    has_s: list[float] = []

    def train(job: Any, found: Any, until: float | None) -> Any:
        assert until is not None
        has_s.append(until - time.monotonic())
        return found

    search = SimpleNamespace(refit={})
    asked: Any = SimpleNamespace(
        training=None,
        train=TrainConfig(),
        search=search,
        folder=tmp_path,
        best=SimpleNamespace(key="k"),
        trials=(SimpleNamespace(name="trial-1", seconds=2.0),),
        job=SimpleNamespace(train=TrainConfig(), folder=lambda key: tmp_path / str(key)),
    )
    in_time._refitted_alone(asked, {}, asked, made, train, budget.usable(60.0) - 10.0)
    assert 8.0 < has_s[0] <= 10.0 - in_time.WRITTEN_S
    # A head has no clock: it may take all that the end leaves.
    asked.job.train = TrainConfig(solver="closed")
    in_time._refitted_alone(asked, {}, asked, made, train, budget.usable(60.0) - 30.0)
    assert 25.0 < has_s[1] <= 30.0
    # All that was left was told as its plan, of which it took a second.
    assert made.phase("refit").planned_s == budget.again_s([2.0]) < 10
