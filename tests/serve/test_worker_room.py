"""Workers and replicas that fit on no node are refused; Ray would wait for them without a word."""

from __future__ import annotations

import logging

import pytest

from raypipe.cluster.resources import room_for
from raypipe.errors import ClusterError, ConfigError
from raypipe.serve.batch import PredictConfig
from raypipe.serve.online import server

Nodes = list[dict[str, float]]


@pytest.mark.parametrize(
    ("nodes", "gpus", "room"),
    [
        ([{"CPU": 2, "GPU": 1}], 0.5, (2, 1)),
        ([{"CPU": 8, "GPU": 1}], 1 / 3, (3, 2)),
        # 0.6 of two GPUs are two workers: a third would have parts of both.
        ([{"CPU": 8, "GPU": 2}], 0.6, (2, 4)),
        ([{"CPU": 8, "GPU": 2}], 0.4, (4, 2)),
        # Three GPUs on each node have room for one worker with two.
        ([{"CPU": 6, "GPU": 3}, {"CPU": 6, "GPU": 3}], 2, (2, 6)),
        ([{"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1}], 2, (0, 0)),
        # The CPUs of a node without a GPU are no worker's.
        ([{"CPU": 16}, {"CPU": 4, "GPU": 1}], 1, (1, 4)),
        ([{"CPU": 2, "GPU": 8}], 1, (2, 1)),
        ([{"CPU": 0, "GPU": 1}], 1, (0, 0)),
        ([{"CPU": 9, "GPU": 9}], 1.5, (0, 0)),
        ([], 1, (0, 0)),
    ],
)
def test_a_worker_is_on_one_node(nodes: Nodes, gpus: float, room: tuple[int, int]) -> None:
    assert room_for(nodes, gpus) == room


def test_a_worker_has_a_part_of_one_gpu_or_whole_ones() -> None:
    assert PredictConfig(gpus=2).gpus == 2
    with pytest.raises((ConfigError, ValueError), match="whole ones"):
        PredictConfig(gpus=1.5)


@pytest.mark.parametrize(
    ("nodes", "replicas", "cpus", "fits"),
    [
        ([2], 2, 1, True),
        ([2], 3, 1, False),
        ([4, 4], 2, 4, True),
        ([4, 4], 1, 8, False),
    ],
)
def test_replicas_without_room_are_refused_where_the_cluster_cannot_grow(
    nodes: list[int],
    replicas: int,
    cpus: int,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    heard: None,
) -> None:
    """`serve.replicas=3` on two CPUs waited for ever, and said nothing."""
    monkeypatch.setattr(server, "resources_by_node", lambda: [{"CPU": float(n)} for n in nodes])
    monkeypatch.setattr(server.ray_private, "own_processes", lambda names: {"raylet": []})
    free = {str(number): {"CPU": float(n)} for number, n in enumerate(nodes)}
    monkeypatch.setattr(server.ray_private, "free_resources", lambda: free)
    if fits:
        server._require_room(replicas, cpus)
        assert caplog.text == ""
        # Others have one CPU of it.
        free["0"]["CPU"] -= 1
        with caplog.at_level(logging.WARNING):
            server._require_room(replicas, cpus)
        assert "Others hold CPUs of the cluster, and the server waits for room" in caplog.text
        return
    with pytest.raises(ClusterError, match="no room for the replicas"):
        server._require_room(replicas, cpus)
    # One that others started may have an autoscaler.
    monkeypatch.setattr(server.ray_private, "own_processes", lambda names: None)
    with caplog.at_level(logging.WARNING):
        server._require_room(replicas, cpus)
    assert "Unless it grows, the server waits" in caplog.text
