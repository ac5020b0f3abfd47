"""What the nodes do is recorded, whatever happens meanwhile; a run never fails or waits for it."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.cluster import node_reader, recorder, usage
from raypipe.cluster.node_reader import CPU, MEMORY, SECONDS, NodeReader
from raypipe.cluster.usage import AT

ROOT = Path(__file__).parents[2]
EVERY_S = 0.55  # longer than usage.SHORTEST_S, or samples become one


def busy(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def recording_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "raypipe-usage"]


def test_this_node_is_recorded_and_a_second_run_adds_to_it(tmp_path: Path) -> None:
    file = tmp_path / usage.FILE
    began = time.time()
    with recorder.recorded(file, every_s=EVERY_S):
        assert recording_threads()
        busy(2.5 * EVERY_S)
    assert not recording_threads()
    (node,) = usage.read(file).values()
    assert len(node.samples) >= 2
    cpus = node.size.cpus
    for sample in node.samples:
        assert began < sample[AT] < time.time() and 0.5 <= sample[SECONDS] < 10
        # This test keeps one CPU busy; others may keep the rest busy.
        assert 40 / cpus <= sample[CPU] <= 100
        assert 0 < sample[MEMORY] <= node.size.memory_mb
    first = list(node.samples)
    with recorder.recorded(file, every_s=EVERY_S):
        time.sleep(1.5 * EVERY_S)
    (node,) = usage.read(file).values()
    assert node.samples[: len(first)] == first and len(node.samples) > len(first)


def test_a_turn_longer_than_a_clock_can_wait_is_a_long_one(tmp_path: Path) -> None:
    """Its thread ended at once, and nothing was recorded."""
    file = tmp_path / usage.FILE
    with recorder.recorded(file, every_s=1e10):
        time.sleep(EVERY_S)
        assert recording_threads()
    (node,) = usage.read(file).values()
    assert len(node.samples) == 1


def test_every_s_null_records_nothing(tmp_path: Path) -> None:
    with recorder.recorded(tmp_path / usage.FILE, None):
        assert not recording_threads()
    assert not list(tmp_path.iterdir())


def test_a_reading_costs_little_and_says_how_much() -> None:
    reader = NodeReader()
    for _ in range(20):
        cost_s = reader.read()[node_reader.COST]
        # 0.7 ms on a quiet machine.
        assert 0 < cost_s < 0.05


@pytest.mark.parametrize("what", ["reader", "turn", "write"])
def test_whatever_breaks_the_block_runs_on(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*args: Any, **named: Any) -> None:
        raise RuntimeError("broken on purpose")

    caplog.set_level(logging.DEBUG, logger="raypipe")
    target, name = {
        "reader": (recorder, "NodeReader"),
        "turn": (recorder.OtherNodes, "turn"),
        "write": (usage, "write"),
    }[what]
    monkeypatch.setattr(target, name, breaks)
    file = tmp_path / usage.FILE
    with recorder.recorded(file, every_s=EVERY_S):
        time.sleep(1.5 * EVERY_S)
    assert "broken on purpose" in caplog.text, "the fault did not happen"
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert not recording_threads()
    # This node is recorded even if the others cannot be asked.
    assert bool(usage.read(file)) == (what == "turn")


def test_a_cluster_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, began = threading.Event(), threading.Event()

    def turn(*args: Any, **named: Any) -> None:
        began.set()
        hangs.wait(30)

    monkeypatch.setattr(recorder.OtherNodes, "turn", turn)
    monkeypatch.setattr(recorder, "PATIENCE_S", 0.2)
    with recorder.recorded(tmp_path / usage.FILE, every_s=EVERY_S):
        assert began.wait(10)
        left_at = time.monotonic()
    assert time.monotonic() - left_at < 2
    hangs.set()
    until = time.monotonic() + 5
    while recording_threads() and time.monotonic() < until:
        time.sleep(0.05)
    assert not recording_threads(), "the thread ends as soon as the answer comes"


def test_a_torn_file_is_begun_again(tmp_path: Path) -> None:
    file = tmp_path / usage.FILE
    for torn in ("", '{"format": 1, "nodes"', '{"format": 99, "nodes": {}}', "[]"):
        file.write_text(torn)
        assert usage.read(file) == {}
    with recorder.recorded(file, every_s=EVERY_S):
        time.sleep(1.5 * EVERY_S)
    assert len(usage.read(file)) == 1


def test_a_long_run_keeps_few_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_VALUES", 30)
    monkeypatch.setattr(recorder, "FEWEST", 2)
    file = tmp_path / usage.FILE
    began = time.monotonic()
    with recorder.recorded(file, every_s=EVERY_S):
        time.sleep(3.5)
    lasted_s = time.monotonic() - began
    (node,) = usage.read(file).values()
    assert usage.values(node) <= 30 and len(node.samples) >= 2
    assert sum(sample[SECONDS] for sample in node.samples) == pytest.approx(lasted_s, abs=0.7)


a_sample = st.fixed_dictionaries(
    {
        SECONDS: st.floats(0.5, 100),
        CPU: st.floats(0, 100),
        MEMORY: st.floats(0, 1e6),
        "network_receive_megabytes": st.floats(0, 1e6),
    },
    optional={"gpu_0_utilization_percentage": st.floats(0, 100)},
)


@given(st.lists(a_sample, max_size=9))
def test_merged_samples_say_the_same(samples: list[dict[str, float]]) -> None:
    for number, sample in enumerate(samples):
        sample[AT] = float(number)
    before, after = (usage.Node(NodeReader.size, s) for s in (samples, usage.merged(samples)))  # type: ignore[arg-type]
    assert len(after.samples) == math.ceil(len(samples) / 2)
    assert [s[AT] for s in after.samples][-1:] == [s[AT] for s in samples][-1:]
    for name in (SECONDS, "network_receive_megabytes"):
        total = sum(sample[name] for sample in samples)
        assert sum(sample[name] for sample in after.samples) == pytest.approx(total)
    assert after.most(MEMORY) == before.most(MEMORY)
    assert (after.mean(CPU) or 0) == pytest.approx(before.mean(CPU) or 0)


@pytest.mark.parametrize(
    ("number", "visible", "seen"),
    [
        (0, None, True),
        (1, "1, 3", True),
        (2, "1, 3", False),
        (0, "", False),
        (5, "GPU-5a", True),
        (5, "GPU-6", False),
        (0, "-1", False),
        (0, "MIG-GPU-5a/1/0", False),
    ],
)
def test_only_gpus_that_cuda_may_see_count(
    number: int, visible: str | None, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert node_reader.is_visible(number, "GPU-5a0b", visible) is seen


@pytest.mark.slow
def test_nodes_that_join_leave_or_do_nothing(own_ray: dict[str, str], tmp_path: Path) -> None:
    """Real raylets: one joins, is used and is killed, and then an idle one joins."""
    command = [sys.executable, "-m", "tests.cluster.leaving_nodes", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=os.environ | own_ray
    )
    assert done.returncode == 0, done.stderr[-4000:]
    nodes = usage.read(tmp_path / usage.FILE)
    host, *others = nodes
    # The idle one has the killed one's name, if Ray had noticed by then.
    assert others in ([f"{host}-2"], [f"{host}-2", f"{host}-3"])
    used, idle = nodes[others[0]], nodes[others[-1]]
    assert len(nodes[host].samples) > len(used.samples) >= 3
    assert all(0 <= sample[CPU] <= 100 for sample in used.samples)
    assert idle.unused_s >= 3
