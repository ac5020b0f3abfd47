"""What clusters do to a training: it ends with the weights of an undisturbed one, bit for bit.

Two workers, sharded (fsdp), so that every rank's file matters. Each test asserts that its fault
fired. The tests of a full disk and of kills between files are beside the checkpoints'
(tests/train).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from raypipe.config import dump, replace, validate
from raypipe.errors import RaypipeError
from raypipe.feed.dataset import pin
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig
from raypipe.train import checkpoint, starting, trainer, worker_group
from raypipe.train.job import TrainJob, TrainResult

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("ray_session")]
EPOCHS, FAULT = (
    4,
    12,
)  # the fault comes after this many steps, in the third epoch; a checkpoint after every step


@ray.remote
class Tenant:
    """Takes CPUs."""

    def ready(self) -> bool:
        return True


@pytest.fixture(scope="module")
def job(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    folder = tmp_path_factory.mktemp("chaos")
    table = TableConfig(uri=str(folder / "table"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(table, validate(IngestConfig, {"from": source, "splits": {"train": 0.6, "val": 0.4}}))
    settings: dict[str, Any] = {
        "table": table.model_dump(),
        "run": {"dir": str(folder / "undisturbed")},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False, "dropout": 0.2},
        "augment": {"flip_horizontal": True, "shift": 0.1},
        "train": {
            "strategy": "fsdp",
            "workers": 2,
            "epochs": EPOCHS,
            "batch_size": 8,
            "lr": 0.01,
            "precision": "fp32",
        },
    }
    settings["train"] |= {
        "checkpoint_steps": 1,
        "timeout_s": 6,
        "stopping": {"patience": None},
        "ema": 0.9,
    }
    return validate(TrainJob, settings)


@pytest.fixture(scope="module")
def weights(job: TrainJob) -> dict[str, torch.Tensor]:
    """Of the last epoch of a run that nothing disturbed."""
    return last(job, trainer.run(job))


def last(job: TrainJob, result: TrainResult) -> dict[str, torch.Tensor]:
    assert len(result.history) == EPOCHS
    return dict(checkpoint.read(Path(result.checkpoint).with_name(checkpoint.name(EPOCHS))).weights)


def folder_of(job: TrainJob) -> Path:
    return job.run.path / "train" / job.training_key(pin(job.table, job.feed).version)


def disturbed(
    act: Callable[[Path], None], note: Path, step_s: float = 0.0
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A rank that does `act` to itself, once in all, when rank 1 has taken FAULT steps; `note`
    tells that it did.
    """

    def rank(config: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed as dist

        from raypipe.train import preemption, worker_group

        steps, asked = 0, preemption.Notice.__call__
        resumed = any(config["setup"].checkpoints.glob("*/manifest.json"))

        def counted(self: preemption.Notice) -> bool:
            nonlocal steps
            steps += 1
            time.sleep(step_s)
            if dist.get_rank() == 1 and steps == FAULT and not resumed and not note.exists():
                act(note)
            return asked(self)

        preemption.Notice.__call__ = counted  # type: ignore[method-assign]
        return worker_group.run_worker(config)

    return rank


def killed(note: Path) -> None:
    note.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(note: Path) -> None:
    note.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def raises(note: Path) -> None:
    note.write_text(str(os.getpid()))
    raise ZeroDivisionError("a fault of the test")


@pytest.mark.parametrize("act", [pytest.param(killed, marks=pytest.mark.share), stopped, raises])
def test_a_worker_that_dies_hangs_or_fails(
    act: Callable[[Path], None],
    job: TrainJob,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray starts the workers again, and they repeat no more than the step whose checkpoint was not
    there yet.
    """
    mine, note, told = replace(job, {"run.dir": str(tmp_path)}), tmp_path / "note", []
    waits: list[bool] = []

    def sampled(started: threading.Event, ended: threading.Event, *given: Any) -> None:
        ran = False
        while not ended.wait(0.05):
            ran = ran or started.is_set()
            waits.append(ran and not started.is_set())

    monkeypatch.setattr(starting, "_tell", sampled)
    monkeypatch.setattr(worker_group, "run_worker", disturbed(act, note))
    result = trainer.run(mine, progress=lambda metrics, state: told.append(state.epoch))
    assert note.exists(), "the fault did not fire"
    assert any(waits), "while Ray started them again, they counted as running"
    assert_same(last(mine, result), weights)
    assert told == [1, 2, 3, 4], "a whole epoch was trained again"


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture(scope="module")
def interrupted(job: TrainJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a training that failed in the third epoch and was not started again."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_group, "run_worker", disturbed(raises, folder / "note"))
        with pytest.raises(
            RaypipeError,
            match=r"Training failed on a worker: a fault of the test.*Checkpoints are kept in",
        ):
            trainer.run(replace(job, {"run.dir": str(folder), "train.max_failures": 0}))
    assert (folder / "note").exists()
    return folder


def cut_short(newest: Path) -> None:
    path = newest / "optimizer-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_byte(newest: Path) -> None:
    path = newest / "weights-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))


def lose_a_shard(newest: Path) -> None:
    (newest / "weights-00001.safetensors").unlink()


DAMAGE = [
    (cut_short, "optimizer-00001.safetensors is missing or cut short"),
    pytest.param(
        flip_a_byte,
        "weights-00000.safetensors does not match its sha256",
        marks=pytest.mark.share,
    ),
    (lose_a_shard, "weights-00001.safetensors is missing or cut short"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    damage: Callable[[Path], None],
    says: str,
    interrupted: Path,
    job: TrainJob,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two workers resume; one step is repeated."""
    mine = replace(job, {"run.dir": str(shutil.copytree(interrupted, tmp_path / "run"))})
    checkpoints = folder_of(mine) / "checkpoints"
    newest = max(checkpoints.glob("epoch-*"))
    damage(newest)
    found, skipped = checkpoint.newest(checkpoints.glob("epoch-*"))
    assert skipped == [f"{newest.name}: {says}"] and found is not None
    assert_same(last(mine, trainer.run(mine)), weights)


def test_a_torn_snapshot_of_rays_controller_is_not_in_the_way(
    interrupted: Path, job: TrainJob, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Ray writes one of the checkpoints it is told of, and refuses to start a run of that name over
    a torn one. It is told of none of ours and each start has its own name: a torn one, put where
    Ray would have it, is not even read.
    """
    mine = replace(job, {"run.dir": str(shutil.copytree(interrupted, tmp_path / "run"))})
    (started,) = (mine.run.path / "ray").iterdir()
    torn = started / "checkpoint_manager_snapshot.json"
    assert not torn.exists()
    torn.write_text('{"ray_version": "2.60.0", "checkpoint_results": [{"metr')
    with pytest.raises(Exception, match=r"(?s)checkpoint|snapshot|JSON|Unterminated"):
        started_again(started)
    assert_same(last(mine, trainer.run(mine)), weights)
    assert torn.exists() and len(list((mine.run.path / "ray").iterdir())) == 2


def started_again(folder: Path) -> None:
    """A run of Ray's own under that name."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    run = RunConfig(name=folder.name, storage_path=str(folder.parent))
    TorchTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=1), run_config=run).fit()


def driver(job: TrainJob, folder: Path) -> subprocess.Popen[str]:
    """The training in a process of its own, after its first epoch."""
    (folder / "job.yaml").write_text(dump(job))
    code = (
        "import sys; from pathlib import Path; from raypipe.cluster.connect import connect; from "
        "raypipe.config import load\n"
        "from raypipe.train import trainer; from raypipe.train.job import TrainJob\n"
        "job = load(TrainJob, Path(sys.argv[1])); connect(job.cluster); trainer.run(job)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "job.yaml")], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while (
        not list(folder_of(job).glob("checkpoints/epoch-0001-*/manifest.json"))
        and time.monotonic() < deadline
    ):
        assert process.poll() is None, "the driver ended before anything could happen to it"
        time.sleep(0.01)
    return process


@pytest.mark.share
def test_a_driver_that_is_killed_and_submitted_again(
    job: TrainJob, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    mine = replace(job, {"run.dir": str(tmp_path / "run")})
    process = driver(mine, tmp_path)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL and not (folder_of(mine) / "result.json").exists()
    assert_same(last(mine, trainer.run(mine)), weights)


def test_a_driver_that_is_asked_to_stop_saves_the_step(job: TrainJob, tmp_path: Path) -> None:
    """Without checkpoints inside epochs: the newest is of the step in which the workers heard of
    it.
    """
    mine = replace(
        job, {"run.dir": str(tmp_path / "run"), "train.checkpoint_steps": None, "train.epochs": 400}
    )
    process = driver(mine, tmp_path)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    message = (
        r"Stopped on request \(got 'SIGTERM'\). Epoch (\d+), step (\d+) is saved. Run it again"
    )
    found = re.search(message, said)
    assert process.returncode == 1 and found, said
    epoch, step = map(int, found.groups())
    newest, skipped = checkpoint.newest(folder_of(mine).glob("checkpoints/epoch-*"))
    assert newest is not None and skipped == []
    state = checkpoint.read(newest).state
    # In the middle of the second epoch, or of a later one.
    assert (state.epoch + 1, state.step) == (epoch, step) and epoch >= 2 and step >= 1
    assert not (folder_of(mine) / "result.json").exists()


def test_an_interrupt_ends_a_training_on_workers_and_it_goes_on(
    job: TrainJob, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Ray Train took Ctrl-C, and ended the process with the exit code 0."""
    mine = replace(job, {"run.dir": str(tmp_path / "run")})
    process = driver(mine, tmp_path)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and said.rstrip().endswith("KeyboardInterrupt"), said
    assert not (folder_of(mine) / "result.json").exists()
    assert_same(last(mine, trainer.run(mine)), weights)


def test_as_many_workers_train_as_there_is_room_for(
    job: TrainJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the two CPUs is taken: a training of one to two workers starts with one, and does not
    wait for ever.
    """
    tenant = Tenant.options(num_cpus=1).remote()  # type: ignore[attr-defined]
    ray.get(tenant.ready.remote())
    mine = replace(
        job,
        {
            "run.dir": str(tmp_path),
            "train.workers": [1, 2],
            "train.strategy": "auto",
            "train.epochs": 1,
        },
    )
    result = trainer.run(mine)
    ray.kill(tenant)
    manifest = json.loads((Path(result.checkpoint) / "manifest.json").read_text())
    assert manifest["world"] == 1 and len(result.history) == 1


@pytest.fixture
def second_node(ray_session: str) -> Iterator[str]:
    """The id of a second node of two CPUs, on which alone there is room."""
    tenant = Tenant.options(num_cpus=2).remote()  # type: ignore[attr-defined]
    ray.get(tenant.ready.remote())
    before = {node["NodeID"] for node in ray.nodes()}
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--address={ray_session}",
        "--num-cpus=2",
        "--block",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while (
        not (new := {n["NodeID"] for n in ray.nodes() if n["Alive"]} - before)
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    yield new.pop()
    ray.kill(tenant, no_restart=True)
    process.terminate()
    process.wait(90)


def test_a_node_that_is_taken_away_gives_notice(
    second_node: str,
    job: TrainJob,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The workers save the step they are in and leave; on the other node they take the next one.
    Nothing is repeated.
    """
    caplog.set_level(logging.INFO, logger="raypipe")
    mine = replace(
        job, {"run.dir": str(tmp_path), "train.checkpoint_steps": None, "train.max_failures": 0}
    )
    monkeypatch.setattr(
        worker_group, "run_worker", disturbed(lambda note: None, tmp_path / "note", step_s=1.0)
    )
    drain = Drain(second_node, folder_of(mine))
    drain.start()
    result = trainer.run(mine)
    drain.join()
    assert drain.accepted, drain.said
    message = r"A node is being taken away: going on elsewhere from epoch \d+, step (\d+)"
    found = re.search(message, caplog.text)
    assert found and int(found[1]) >= 1, "no step of the epoch was saved"
    assert_same(last(mine, result), weights)
    assert json.loads((folder_of(mine) / "result.json").read_text())["history"]
    assert ray.is_initialized()


class Drain(threading.Thread):
    """Once the first epoch is saved, tells Ray that the node will be gone in a minute, and gives
    the other node's CPUs free.
    """

    def __init__(self, node: str, folder: Path) -> None:
        super().__init__(daemon=True)
        self.node, self.folder, self.said, self.accepted = node, folder, "", False

    def run(self) -> None:
        from ray.util.state import list_actors

        deadline = time.monotonic() + 120
        while (
            not list(self.folder.glob("checkpoints/*/manifest.json"))
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "drain-node",
                    f"--address={os.environ['RAY_ADDRESS']}",
                ),
                *(
                    "--node-id",
                    self.node,
                    "--reason",
                    "DRAIN_NODE_REASON_PREEMPTION",
                    "--reason-message",
                    "a test",
                ),
                *("--deadline-remaining-seconds", "60"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        self.said, self.accepted = done.stdout + done.stderr, done.returncode == 0
        for tenant in list_actors(filters=[("class_name", "=", "Tenant"), ("state", "=", "ALIVE")]):
            os.kill(ray.util.state.get_actor(tenant.actor_id).pid, signal.SIGKILL)
