"""`train.launcher=torch_distributor`: workers on Spark executors train as workers of Ray do.

One Spark application serves the tests that run in this process; it belongs to them, as a
notebook's does. Where the driver itself is killed, it is a process of its own with its own Spark.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from raypipe.config import dump, replace
from raypipe.errors import RaypipeError
from raypipe.feed.dataset import pin
from raypipe.train import checkpoint, spark_launch, trainer
from raypipe.train.job import TrainJob, TrainResult
from tests.local_spark import (
    MARK,
    MASTER,
    ROOT,
    environment,
    executor_of,
    marked,
    one_message,
    require_spark,
    seconds_until_gone,
    verb,
)

from .conftest import Jobs

pyspark = require_spark()
pytestmark = pytest.mark.spark
CANARY = "canary-of-the-store-91ab"
EPOCHS = 4
PAGES = ["jobs", "stages", "storage", "environment", "executors", "SQL"]
API = [
    "jobs",
    "stages?details=true",
    "environment",
    "allexecutors",
    "sql?details=true",
    "storage/rdd",
]


@dataclass
class Spark:
    session: Any
    folder: Path
    """Of Spark's own files: work, local and event log."""


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    """Two executors of two cores each, with a UI and an event log."""
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.ui.enabled": "true",
        "spark.ui.showConsoleProgress": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{folder}",
        "spark.log.level": "OFF",
        "spark.local.dir": str(folder / "local"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.delenv("PYSPARK_SUBMIT_ARGS")
        builder = SparkSession.builder.master(MASTER).appName("raypipe tests")
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        yield Spark(session, folder)
        session.stop()


@pytest.fixture
def spark_jobs(jobs: Jobs) -> Jobs:
    """Two workers that write a checkpoint after every step."""
    own = {
        "train.workers": 2,
        "train.launcher": "torch_distributor",
        "train.epochs": EPOCHS,
        "train.batch_size": 8,
        "train.checkpoint_steps": 1,
        "train.timeout_s": 30,
        "model.dropout": 0.2,
        "augment.flip_horizontal": True,
    }
    return lambda **changes: jobs(**(own | changes))


def folder_of(job: TrainJob) -> Path:
    return job.folder(job.training_key(pin(job.table, job.feed).version))


def weights(result: TrainResult, epochs: int = EPOCHS) -> dict[str, torch.Tensor]:
    """Of the last epoch."""
    assert len(result.history) == epochs
    folder = Path(result.checkpoint).with_name(checkpoint.name(epochs))
    return dict(checkpoint.read(folder, verified=True).weights)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def losses(result: TrainResult) -> list[tuple[float, float]]:
    return [(epoch["train_loss"], epoch["val_loss"]) for epoch in result.history]


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.share), "zero3"])
def test_it_learns_what_ray_learns(
    strategy: str, spark: Spark, spark_jobs: Jobs, tmp_path: Path
) -> None:
    job = spark_jobs(**{"train.strategy": strategy})
    told: list[int] = []
    result = trainer.run(job, lambda metrics, state: told.append(state.epoch))
    rays = replace(job, {"train.launcher": "ray", "run.dir": str(tmp_path / "ray")})
    by_ray = trainer.run(rays)
    assert told == [1, 2, 3, 4]
    assert result.key == by_ray.key
    assert losses(result) == losses(by_ray)
    assert same(weights(result), weights(by_ray))
    # Nothing but the run itself is left.
    names = {path.name for path in folder_of(job).iterdir()}
    assert names == {"checkpoints", "config.yaml", "lock", "result.json"}


def test_two_trainings_at_once_share_one_application(spark: Spark, spark_jobs: Jobs) -> None:
    """Four workers on four cores; and the session, this process and Spark's stay as they were."""
    seen = {name: os.environ.get(name) for name in os.environ}
    settings = spark.session.sparkContext.getConf().getAll()
    found: dict[int, TrainResult] = {}

    def train(seed: int) -> None:
        found[seed] = trainer.run(spark_jobs(**{"run.seed": seed}))

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses(found[1]) != losses(found[2])
    assert {name: os.environ.get(name) for name in os.environ} == seen
    assert spark.session.sparkContext.getConf().getAll() == settings
    assert spark.session.sparkContext.getLocalProperty("spark.jobGroup.id") is None
    left = spark.session.sparkContext.parallelize(range(8), 8).map(variables).collect()
    assert not set().union(*left) & {"MASTER_ADDR", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"}


def variables(_: int) -> set[str]:
    time.sleep(0.5)
    return set(os.environ)


def acting(act: Callable[[], None], note: Path) -> Callable[[], dict[str, Any]]:
    """A rank that does `act`, once in all, when rank 1 has taken six steps; `note` says so."""

    def rank() -> dict[str, Any]:
        import torch.distributed as dist

        from raypipe.train import preemption, spark_worker

        steps, asked = 0, preemption.Notice.__call__

        def counted(self: preemption.Notice) -> bool:
            nonlocal steps
            steps += 1
            if dist.get_rank() == 1 and steps == 6 and not note.exists():
                note.write_text(str(os.getpid()))
                act()
            return asked(self)

        preemption.Notice.__call__ = counted  # type: ignore[method-assign]
        return spark_worker.run()

    return rank


def kill_executor() -> None:
    from tests.local_spark import executor_of

    executor_of(os.getpid()).kill()
    time.sleep(60)


def kill_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError("a fault of the test")


@pytest.mark.parametrize("act", [kill_executor, kill_worker, fail])
def test_a_group_that_fails_goes_on_from_its_newest_checkpoint(
    act: Callable[[], None],
    spark: Spark,
    spark_jobs: Jobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="raypipe")
    undisturbed = trainer.run(spark_jobs(**{"run.dir": str(tmp_path / "undisturbed")}))
    note = tmp_path / "note"
    monkeypatch.setattr(spark_launch, "run", acting(act, note))
    result = trainer.run(spark_jobs())
    assert note.exists() and "Going on from the newest checkpoint" in caplog.text
    assert same(weights(result), weights(undisturbed))
    # Whichever comes first: Spark's word, as ExecutorLostFailure, or that of the other rank.
    said = "ZeroDivisionError: a fault" if act is fail else "[Ll]ost|gone"
    (again,) = re.findall("Going on from the newest checkpoint. (.*)", caplog.text)
    assert re.search(said, again), again


def test_too_many_failures_are_one_message(
    spark: Spark, spark_jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_launch, "run", acting(kill_executor, tmp_path / "note"))
    job = spark_jobs(**{"train.max_failures": 0})
    with pytest.raises(RaypipeError, match=r"failed on a Spark executor.*Checkpoints are kept in"):
        trainer.run(job)
    assert not list(folder_of(job).glob("inbox-*"))
    assert spark.session.range(3).count() == 3


def test_a_table_that_only_the_driver_sees(spark: Spark, spark_jobs: Jobs, tmp_path: Path) -> None:
    """It is gone after the driver has read its labels: no executor ever sees it."""
    job = spark_jobs()
    table = shutil.copytree(job.table.uri, tmp_path / "table")
    planned = trainer.plan(replace(job, {"table.uri": str(table)}))
    planned.data()
    table.rename(tmp_path / "elsewhere")
    with pytest.raises(RaypipeError, match=r"executor does not see table.uri.*Set table.uri"):
        trainer.run(planned)


def test_a_loss_that_is_not_a_number(spark: Spark, spark_jobs: Jobs) -> None:
    with pytest.raises(RaypipeError, match=r"diverged: no epoch is usable.*train.lr"):
        trainer.run(spark_jobs(**{"train.lr": 1e30}))


@pytest.mark.share
def test_credentials_reach_the_workers_and_no_page_of_spark(
    spark: Spark, spark_jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment and in table.storage_options; a worker's error does not show them."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    note = tmp_path / "note"

    def rank() -> dict[str, Any]:
        from raypipe.feed import feed
        from raypipe.train import spark_worker

        opened = feed.Source.open

        def told(self: Any, device: Any) -> Any:
            options = feed.fetch(self.rows).storage_options["secret_access_key"]
            note.write_text(f"{os.environ['AWS_SECRET_ACCESS_KEY']} {options}")
            raise OSError(f"the store refuses {options}")

        feed.Source.open = told  # type: ignore[method-assign]
        try:
            return spark_worker.run()
        finally:
            feed.Source.open = opened  # type: ignore[method-assign]

    monkeypatch.setattr(spark_launch, "run", rank)
    secret = CANARY[::-1]
    options = {"secret_access_key": secret}
    job = spark_jobs(**{"table.storage_options": options, "train.max_failures": 0})
    with pytest.raises(RaypipeError, match=r"OSError: the store refuses \*\*\*"):
        trainer.run(job)
    assert note.read_text() == f"{CANARY} {secret}"
    note.unlink()
    context = spark.session.sparkContext
    application = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}"
    urls = [f"{context.uiWebUrl}/{page}/" for page in PAGES]
    urls += [f"{application}/{page}" for page in API]
    shown = [urllib.request.urlopen(url, timeout=30).read() for url in urls]
    assert b"MapInArrow" in b"".join(shown), "the pages show the training"
    work = Path(pyspark.__file__).parent / "work" / context.applicationId
    assert work.exists(), "the logs of the executors"
    kept = [path for folder in (spark.folder, work, tmp_path) for path in folder.rglob("*")]
    shown += [path.read_bytes() for path in kept if path.is_file()]
    for text in shown:
        assert CANARY.encode() not in text and secret.encode() not in text


@pytest.mark.share
def test_no_port_listens_but_on_loopback(spark: Spark, spark_jobs: Jobs) -> None:
    """TorchDistributor's own server for logs would listen on all interfaces of the driver."""
    places: set[str] = set()

    def look(metrics: dict[str, float], state: Any) -> None:
        for connection in psutil.Process().net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                places.add(connection.laddr.ip)

    before = {
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    trainer.run(spark_jobs(), look)
    assert places <= {"127.0.0.1", "::1", *(address.ip for address in before)}


def test_more_workers_than_cores_are_one_message(spark: Spark, spark_jobs: Jobs) -> None:
    with pytest.raises(RaypipeError, match=r"too little room for the training .got '5 workers"):
        trainer.run(spark_jobs(**{"train.workers": 5}))


def start(job: TrainJob, folder: Path, master: str) -> tuple[subprocess.Popen[str], str]:
    """The training as a process of its own, after its first epoch; and its mark."""
    mark = uuid.uuid4().hex
    (folder / "job.yaml").write_text(dump(job))
    given = f"--master {master} --conf spark.log.level=OFF pyspark-shell"
    process = subprocess.Popen(
        [sys.executable, "-m", "raypipe", "train", str(folder / "job.yaml")],
        env=environment(**{MARK: mark, "PYSPARK_SUBMIT_ARGS": given}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    until = time.monotonic() + 240
    while not list(folder_of(job).glob("checkpoints/epoch-0001-*/manifest.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    return process, mark


@pytest.fixture
def reaped() -> Iterator[list[str]]:
    """Kills what still carries one of these marks."""
    marks: list[str] = []
    yield marks
    for mark in marks:
        for process in marked(mark):
            with suppress(psutil.Error):
                process.kill()


LONG = {"train.epochs": 60}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("first", ["torch_distributor", "ray"])
def test_what_one_launcher_began_the_other_finishes(
    first: str,
    strategy: str,
    spark: Spark,
    spark_jobs: Jobs,
    tmp_path: Path,
    reaped: list[str],
) -> None:
    job = spark_jobs(**(LONG | {"train.launcher": first, "train.strategy": strategy}))
    other = {"torch_distributor": "ray", "ray": "torch_distributor"}[first]
    began = replace(job, {"cluster.address": "local"}) if first == "ray" else job
    process, mark = start(began, tmp_path, "local-cluster[2,1,2048]")
    reaped.append(mark)
    process.kill()
    process.communicate()
    # Of a killed Ray, agents look for their head for a minute before they end.
    seconds_until_gone(mark, 120 if first == "ray" else 60)
    saved = sorted(path.name for path in folder_of(job).glob("checkpoints/*"))
    assert saved and not (folder_of(job) / "result.json").exists()
    done: list[int] = []
    finished = replace(job, {"train.launcher": other})
    result = trainer.run(finished, lambda metrics, state: done.append(state.epoch))
    assert done[0] > 1, "it did not begin again"
    whole = trainer.run(replace(finished, {"run.dir": str(tmp_path / "whole")}))
    assert same(weights(result, 60), weights(whole, 60))


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGKILL, -9, ""),
        (signal.SIGTERM, 1, "Stopped on request.*is saved"),
        (signal.SIGINT, 1, "Interrupted. Run the same command again"),
    ],
)
def test_a_driver_that_is_ended(
    number: signal.Signals,
    code: int,
    said: str,
    spark_jobs: Jobs,
    tmp_path: Path,
    reaped: list[str],
) -> None:
    """Its two workers are on two executors, and end with it."""
    job = spark_jobs(**{"train.epochs": 2000})
    process, mark = start(job, tmp_path, "local-cluster[2,1,2048]")
    reaped.append(mark)
    known = marked(mark)
    workers = [p for p in known if "RANK" in p.environ() and "LOCAL_RANK" in p.environ()]
    assert len({executor_of(worker.pid).pid for worker in workers}) == len(workers) == 2
    process.send_signal(number)
    took_s = seconds_until_gone(mark, 60, known)
    print(f"{number.name}: all processes have ended after {took_s:.1f} s")
    _, err = process.communicate()
    assert process.returncode == code, err
    if said:
        assert one_message(err, said)
    assert not list(folder_of(job).glob("inbox-*")) or number is signal.SIGKILL
    assert checkpoint.newest(folder_of(job).glob("checkpoints/epoch-*"))[0] is not None


ON_SPARK = ["train.launcher=torch_distributor", "train.workers=2"]


@pytest.mark.parametrize(
    ("conf", "asked", "said"),
    [
        ("", ["train.workers=5"], "room for the training.*room for 4 of them.*Lower train.workers"),
        ("--conf spark.task.cpus=2", ["train.workers=3"], "room for 2 of them"),
        (
            "--conf spark.dynamicAllocation.enabled=true",
            [],
            "dynamicAllocation.*Start Spark withou",
        ),
        ("--conf spark.ssl.enabled=true", [], "spark.ssl.enabled=true.*ignoreSsl=true"),
        ("", ["train.gpu=true"], "resource.gpu.amount=0.*Start Spark with"),
        ("", ["run.dir=/proc/self/cwd/run"], "does not see run.dir.*Set run.dir to a place"),
    ],
)
def test_what_cannot_train_there_is_one_message(
    conf: str, asked: list[str], said: str, spark_jobs: Jobs, tmp_path: Path
) -> None:
    job = spark_jobs()
    (tmp_path / "job.yaml").write_text(dump(job))
    master = f"{MASTER} --conf spark.log.level=OFF {conf}"
    # The driver's working folder is not that of the executors.
    words = "train", str(tmp_path / "job.yaml"), *asked
    code, out, err, mark = verb(*words, master=master, cwd=tmp_path)
    assert seconds_until_gone(mark, 30) < 30
    assert (code, out) == (2, "") and one_message(err, said)
