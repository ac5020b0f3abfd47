"""Phases add up to the step, timing does not wait for the device, profiles are in the folder."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raypipe.config import replace
from raypipe.errors import ConfigError
from raypipe.feed.dataset import pin
from raypipe.train import checkpoint, parallel, trainer
from raypipe.train.measure.flops import flops_per_image, peak_flops
from raypipe.train.measure.meter import UNREAD, Meter, Position, StreamClock
from raypipe.train.measure.profile import profiler
from raypipe.train.parallel import ParallelConfig
from raypipe.train.worker import train_rank

from . import ranks
from .conftest import Jobs
from .parallel_ranks import BATCH, data, tiny
from .test_loop import Recorder, job, pixels

PHASES = {"data_s", "augment_s", "forward_s", "backward_s", "optimizer_s", "other_s"}


class FakeTime:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr("raypipe.train.measure.meter.time", fake)
    return fake


class Slow:
    """A feed of four steps that takes its time."""

    steps = 4

    def __init__(self, clock: FakeTime, wait_s: float) -> None:
        self.clock, self.wait_s = clock, wait_s

    def train(self, epoch: int, step: int) -> Iterator[Any]:
        for _ in range(step, self.steps):
            self.clock.sleep(self.wait_s)
            yield SimpleNamespace(labels_B=torch.zeros(8))


SECONDS = {"augment": 0.001, "forward": 0.002, "backward": 0.003, "optimizer": 0.004}


def through(meter: Meter, feed: Slow, epoch: int = 0, step: int = 0) -> dict[str, float]:
    for _ in meter.steps(feed, epoch, step):  # type: ignore[arg-type]
        for phase, seconds in SECONDS.items():
            feed.clock.sleep(seconds)
            meter.lap(phase)
        feed.clock.sleep(0.005)  # a checkpoint
    return meter.epoch()


def test_a_step_is_the_sum_of_its_phases_and_each_gets_its_own(clock: FakeTime) -> None:
    meter, parts = Meter(), {f"{phase}_s": s for phase, s in SECONDS.items()} | {"other_s": 0.005}
    for epoch, wait_s in enumerate((0.02, 0.5)):
        told = through(meter, Slow(clock, wait_s), epoch)
        assert {name: told[name] for name in PHASES} == pytest.approx(parts | {"data_s": wait_s})
        assert told["step_s"] == pytest.approx(wait_s + sum(parts.values()))
        assert told["cpu_memory_mb"] > 10 and "gpu_memory_mb" not in told and "mfu" not in told
        clock.sleep(3)  # evaluation, between epochs: no step's time


def test_positions_come_at_once_at_the_end_of_an_epoch_and_about_every_second(
    clock: FakeTime,
) -> None:
    told: list[Position] = []
    meter = Meter(told.append)
    through(meter, Slow(clock, 0.001), epoch=3, step=1)
    assert [(p.epoch, p.step, p.steps) for p in told] == [(3, 2, 4), (3, 4, 4)]
    assert told[-1].images_per_s == pytest.approx(3 * 8 / (3 * 0.016))
    told.clear()
    through(meter, Slow(clock, 0.6), epoch=4)
    assert [p.step for p in told] == [2, 4], "more than a second since the last"


class Event:
    """What torch.cuda.Event does, on a stream whose clock is `now` (ms)."""

    now = 0.0
    made: ClassVar[list[Event]] = []
    waited: ClassVar[list[float]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made.append(self)

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        Event.waited.append(Event.now - self.at)

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_on_cuda_laps_are_read_when_they_have_long_happened_and_events_are_used_again() -> None:
    Event.made, Event.waited, Event.now = [], [], 0.0
    clock = StreamClock(Event)
    for _ in range(2):  # epochs
        clock.start()
        for _ in range(1000):
            for phase, ms in (("forward", 1.0), ("backward", 2.0)):
                Event.now += ms
                clock.lap(phase)
        waited = list(Event.waited)
        spent = clock.read()
        assert spent == pytest.approx({"forward": 1.0, "backward": 2.0})
        Event.now += 500.0  # evaluation
    assert len(Event.made) <= UNREAD + 2
    assert waited and min(waited[:3]) >= UNREAD / 2, "the host would have waited for the device"


def test_flops_are_those_of_the_formula(tmp_path: Path) -> None:
    layer = nn.Linear(10, 7)
    assert (
        flops_per_image(layer, torch.zeros(1, 10)) == 2 * 10 * 7 * 2
    )  # forward, and the gradient of the weights
    two = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 7))
    assert flops_per_image(two, torch.zeros(1, 10)) == 2 * (10 * 20 * 2 + 20 * 7 * 3)
    two[0].requires_grad_(False)
    assert flops_per_image(two, torch.zeros(1, 10)) == 2 * (10 * 20 * 1 + 20 * 7 * 2)
    depthwise = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    forward = [2 * 16 * 16 * n for n in (3 * 8, 8 * 9)]
    assert flops_per_image(depthwise, torch.zeros(1, 3, 16, 16)) == 2 * forward[0] + 3 * forward[1]


def test_counting_flops_changes_nothing_and_fails_softly() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1)
    )
    before, drawn = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert flops_per_image(model, torch.zeros(1, 3, 8, 8)) > 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state()) and model[0].weight.grad is None
    assert all(t.device.type == "cpu" for t in (*model.parameters(), *model.buffers()))

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.sum()) > 0 else x

    assert flops_per_image(Branches(), torch.zeros(1, 4)) == 0


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 0),
        ("NVIDIA A10G", 0),
        ("NVIDIA GeForce RTX 4090", 0),
    ],
)
def test_a_peak_is_known_or_is_not_guessed(name: str, bf16: float) -> None:
    assert peak_flops(name, torch.bfloat16) == bf16
    assert peak_flops("Tesla V100-PCIE-16GB", torch.float16) == 112e12
    assert peak_flops("Tesla V100-SXM2-16GB", torch.float32) == 15.7e12


def test_a_run_tells_each_epoch_what_its_steps_took(tmp_path: Path) -> None:
    """`small_cnn` at 32 px. FLOPs follow from hand-written rules, and the rate from the FLOPs."""
    told, meter = Recorder(tmp_path), Meter()
    train_rank(job(epochs=2), pixels(), None, told.save, told.report, meter=meter)
    for metrics in told.metrics:
        assert metrics.keys() >= PHASES | {"step_s", "gflops_per_s", "cpu_memory_mb"}
        assert metrics["gflops_per_s"] == pytest.approx(
            meter.flops * 48 / 3 / metrics["step_s"] / 1e9
        )
        assert metrics["forward_s"] > 0 and metrics["backward_s"] > 0
    trial = Recorder(tmp_path)
    train_rank(job(epochs=1), pixels(), None, trial.save, trial.report)
    assert "gflops_per_s" not in trial.metrics[0] and trial.metrics[0].keys() >= PHASES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_phases_are_the_streams_time_and_fit_into_the_epoch(tmp_path: Path) -> None:
    told = Recorder(tmp_path)
    train_rank(job(epochs=3), pixels(), None, told.save, told.report, meter=Meter())
    last = told.metrics[-1]
    epoch_s = 48 / last["images_per_s"]  # with evaluation
    assert (
        last["step_s"] == pytest.approx(sum(last[p] for p in PHASES))
        and 0 < 3 * last["step_s"] < epoch_s
    )
    assert last["gpu_memory_mb"] > 0 and 0 <= last.get("mfu", 0.0) < 1


def rank(rank: int, folder: Path) -> None:
    """Rank 1 is 200 ms late to each backward pass: rank 0 waits, and counts it as communication."""
    for strategy, accumulate in (("ddp", 1), ("ddp", 2), ("fsdp", 1)):
        meter = Meter()
        cfg = ParallelConfig.model_validate(
            {"strategy": strategy, "precision": "fp32", "accumulate": accumulate}
        )
        engine = parallel.build(tiny(), cfg, meter)

        def criterion(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
            time.sleep(0.2 * dist.get_rank())
            return cross_entropy(logits_BC, labels_B)

        for step in range(5):
            meter.lap("data")
            engine.step(*(t[rank::2] for t in data(step)), criterion)
        meter._steps = 5
        (folder / f"{strategy}-{accumulate}-{rank}.json").write_text(json.dumps(meter.epoch()))


def test_communication_is_what_ddp_waited_for_after_its_last_gradient(tmp_path: Path) -> None:
    ranks.start(rank, (tmp_path,), 2)
    told = {f.stem: json.loads(f.read_text()) for f in tmp_path.glob("*.json")}
    assert len(told) == 6 and BATCH % 2 == 0
    waiting, late = told["ddp-1-0"], told["ddp-1-1"]
    assert (
        0.1 < waiting["communication_s"] <= 1.5 * waiting["backward_s"]
    )  # means of four steps, and of five
    assert late["communication_s"] < 0.5 * waiting["communication_s"] and late["forward_s"] > 0.2
    assert 0 <= told["ddp-2-1"]["communication_s"] < 0.5 * told["ddp-2-0"]["communication_s"]
    assert "communication_s" not in told["fsdp-1-0"], "nothing measures it: it must not be made up"


def steps_in(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("convolution_backward" in e.get("name", "") for e in events)
    return sorted({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep")})


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (
            "step:4-5",
            ["ProfilerStep#4", "ProfilerStep#5"],
        ),  # the second epoch's: an epoch has three
        ("step:0-0", ["ProfilerStep#0"]),
        (
            "step:5-90",
            ["ProfilerStep#5", "ProfilerStep#6"],
        ),  # the run ends earlier: 6 never had a batch
        ("step:50-90", None),
    ],
)
def test_a_profile_holds_the_steps_that_were_asked_for(
    asked: str, found: list[str] | None, tmp_path: Path
) -> None:
    told = Recorder(tmp_path)
    train_rank(
        job(epochs=2),
        pixels(),
        None,
        told.save,
        told.report,
        meter=Meter(profiler=profiler(asked, tmp_path / "profile", 0)),
    )
    traces = list((tmp_path / "profile").glob("*.json"))
    assert [steps_in(t) for t in traces] == ([found] if found else [])


@pytest.mark.parametrize("text", ["10-13", "step:13-10", "step:x", "epoch:1-2", ""])
def test_a_profile_that_says_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.profile is wrong.*step:10-13"):
        job(profile=text)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag, (step, value): records are length, its checksum, an Event message, its checksum."""
    from tensorboardX.proto.event_pb2 import Event as Message

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        left = path.read_bytes()
        while left:
            (length,) = struct.unpack("<Q", left[:8])
            message = Message.FromString(left[12 : 12 + length])
            left = left[12 + length + 4 :]
            for value in message.summary.value:
                found.setdefault(value.tag, []).append((message.step, value.simple_value))
    return found


@pytest.mark.slow
@pytest.mark.share
@pytest.mark.usefixtures("ray_session")
def test_two_ray_workers_of_a_stream_tell_steps_and_write_traces_and_event_files(
    jobs: Jobs,
) -> None:
    small = jobs(**{"train.workers": 2, "train.epochs": 3, "feed.carrier": "offload"})
    asked = replace(small, {"train.profile": "step:2-3", "train.tensorboard": True})
    key = small.training_key(pin(small.table, small.feed).version)
    assert (
        asked.training_key(pin(asked.table, asked.feed).version) == key
    )  # looking changes nothing
    told: list[Position] = []
    result = trainer.run(asked, report_position=told.append)
    assert result.metrics["images_per_s"] > 0
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    assert checkpoint.verify(Path(result.checkpoint)) is None
    folder = asked.folder(result.key)
    assert {p.epoch for p in told} == {0, 1, 2} and told[-1].step == told[-1].steps
    assert [p.name for p in sorted((folder / "profile").iterdir())] == [
        "steps-2-3-rank-0.json",
        "steps-2-3-rank-1.json",
    ]
    assert all(
        steps_in(p) == ["ProfilerStep#2", "ProfilerStep#3"] for p in (folder / "profile").iterdir()
    )
    written = scalars(folder / "tensorboard")
    for tag, name in (
        ("quality/val_accuracy", "val_accuracy"),
        ("cost/communication_s", "communication_s"),
    ):
        assert [step for step, _ in written[tag]] == [1, 2, 3]
        assert [v for _, v in written[tag]] == pytest.approx(
            np.float32([m[name] for m in result.history]).tolist()
        )
