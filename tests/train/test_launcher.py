"""`train.launcher=torch_distributor` without Spark: what it refuses, and what workers tell."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from raypipe.config import replace
from raypipe.errors import ConfigError, DataError
from raypipe.feed.dataset import pin
from raypipe.search import refit
from raypipe.search.settings import SearchConfig
from raypipe.search.space.parse import parse
from raypipe.train import spark_place
from raypipe.train.loop import LoopState
from raypipe.train.measure.meter import Position
from raypipe.train.spark_messages import AGAIN, MARK, Inbox, Outbox, as_dict

from .conftest import Jobs

SPARK = {"train.launcher": "torch_distributor", "train.workers": 2}


def test_the_launcher_is_no_part_of_the_key_and_needs_no_cluster(jobs: Jobs) -> None:
    job, other = jobs(**{"train.workers": 2}), jobs(**SPARK)
    version = pin(job.table, job.feed).version
    assert job.training_key(version) == other.training_key(version)
    assert job.needs_cluster and not other.needs_cluster


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.workers": [1, 2]}, r"workers=\(1, 2\) asks Ray for room"),
        ({"train.workers": "auto"}, "workers=auto asks Ray for room"),
        ({"train.batch_size": "auto"}, "batch_size=auto is found on a device of the Ray cluster"),
    ],
)
def test_what_needs_ray_is_refused_with_the_config(
    changes: dict[str, object], said: str, jobs: Jobs
) -> None:
    with pytest.raises(ConfigError, match=said):
        jobs(**(SPARK | changes))


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"cluster.address": "spark"}, "Set cluster.address=none"),
        ({"cluster.address": "127.0.0.1:6379"}, "Set cluster.address=none"),
        ({"feed.carrier": "cache"}, "Set feed.carrier=threads"),
        ({"feed.carrier": "offload"}, "Set feed.carrier=threads"),
        (
            {"model.mode": "frozen", "model.name": "efficientnet_lite0", "model.pretrained": True},
            "Set model.mode=finetune",
        ),
    ],
)
def test_what_needs_ray_is_refused_before_spark_starts(
    changes: dict[str, object], way_out: str, jobs: Jobs
) -> None:
    with pytest.raises(ConfigError, match=rf"trains without Ray.*{way_out}, or train.launcher=ray"):
        spark_place.check(jobs(**(SPARK | changes)))


@pytest.mark.parametrize("address", ["auto", "local", "none"])
def test_the_driver_needs_no_ray(address: str, jobs: Jobs) -> None:
    spark_place.check(jobs(**(SPARK | {"cluster.address": address})))


def test_a_search_its_space_and_its_refit_need_ray(jobs: Jobs) -> None:
    with pytest.raises(ConfigError, match=r"A search needs Ray.*Set train.launcher=ray"):
        spark_place.refuse(jobs(**SPARK), "A search")
    with pytest.raises(ConfigError, match=r"cannot vary train.launcher. Trials .* run on Ray"):
        parse({"train.launcher": "choice(ray, torch_distributor)"}, jobs())
    wanted = SearchConfig(space={"train.lr": "choice(0.1)"}, refit=dict(SPARK))
    with pytest.raises(ConfigError, match=r"search.refit needs Ray"):
        refit.check(jobs(), wanted)


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    made = Inbox(tmp_path / "inbox-1", workers=2)
    made.make()
    return made


def sent(inbox: Inbox, rank: int, act: Callable[[Outbox], None]) -> None:
    outbox = Outbox(inbox.folder, rank)
    act(outbox)
    outbox.close()


def test_epochs_arrive_once_and_in_order(inbox: Inbox) -> None:
    states = [LoopState(epoch=e, history=[{"val_loss": float(e)}] * e) for e in (10, 9, 2)]
    for state in states:
        sent(inbox, 0, lambda box, state=state: box.epoch(state.history[-1], state))
    position = Position(epoch=10, step=3, steps=7, images_per_s=2.5)
    sent(inbox, 0, lambda box: box.position(position))
    told: list[tuple[float, LoopState]] = []
    places: list[Position] = []
    for _ in range(2):
        inbox.relay(lambda metrics, state: told.append((metrics["val_loss"], state)), places.append)
    assert told == [(float(s.epoch), s) for s in reversed(states)] and places == [position]


def test_a_driver_that_is_gone_gets_nothing(inbox: Inbox) -> None:
    inbox.remove()
    sent(inbox, 0, lambda box: box.error(ValueError("late")))
    assert not inbox.folder.exists()


def test_the_error_that_is_shown_is_the_cause(inbox: Inbox) -> None:
    """Of the first worker that failed, but a reason of raypipe's own comes before it."""
    sent(inbox, 1, lambda box: box.error(ZeroDivisionError("first")))
    sent(inbox, 0, lambda box: box.error(RuntimeError("Connection closed by peer")))
    os.utime(inbox.folder / "error-1.json", ns=(1, 1))
    assert "executor: ZeroDivisionError: first." in str(inbox.cause(AGAIN))
    own = DataError("An image is broken", got=3, rule="It is whole", fix="Look at it")
    sent(inbox, 1, lambda box: box.error(own))
    os.utime(inbox.folder / "error-1.json", None)
    found = inbox.cause("")
    assert isinstance(found, DataError) and str(found) == str(DataError(**vars_of(own)))


def vars_of(error: DataError) -> dict[str, str]:
    return {"what": error.what, "got": str(error.got), "rule": error.rule, "fix": error.fix}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("", "an executor, or a worker on it, was lost"),
        (f"x\nRuntimeError: {AGAIN}\n", "an executor, or a worker on it, was lost"),
        ("Job aborted\nExecutorLostFailure (executor 1 exited)\n\tat java", r"ExecutorLostFailure"),
        ("Traceback\nKeyError: 'RANK'\n\tat org", "KeyError: 'RANK'"),
    ],
)
def test_spark_has_the_last_word_where_no_worker_could_write(
    said: str, shown: str, inbox: Inbox
) -> None:
    assert f"on a Spark executor: {shown}" in str(inbox.cause(said))


def test_a_worker_that_sees_no_inbox_is_heard_through_spark(inbox: Inbox) -> None:
    told = json.dumps(as_dict(DataError("No run.dir", got="/r", rule="", fix="Share it")))
    found = inbox.cause(f"Traceback\nRuntimeError: {MARK}{told}\n\n\tat org")
    assert isinstance(found, DataError) and "Share it" in str(found)


def test_one_of_two_is_gone(inbox: Inbox) -> None:
    sent(inbox, 0, lambda box: box.error(RuntimeError("Connection closed by peer")))
    assert "1 of 2 workers are gone, the others say RuntimeError" in str(inbox.cause(AGAIN))


def test_no_error_shows_a_credential(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-5d2e9a")
    sent(inbox, 0, lambda box: box.error(OSError("refused canary-5d2e9a")))
    sent(inbox, 1, lambda box: box.error(DataError("canary-5d2e9a", got="canary-5d2e9a")))
    files = list(inbox.folder.iterdir())
    assert len(files) == 2
    for file in files:
        assert "canary" not in file.read_text() and "***" in file.read_text()


def test_the_job_for_workers_is_the_same(jobs: Jobs) -> None:
    assert replace(jobs(**SPARK), {"train.launcher": "ray"}) == jobs(**{"train.workers": 2})
