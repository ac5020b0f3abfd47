"""The line about nodes says what samples and clocks show, and nothing where they do not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from raypipe.cluster import usage
from raypipe.cluster.node_reader import CPU, MEMORY, SECONDS, Size
from raypipe.cluster.usage import AT, Node
from raypipe.registry import versions
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.train import trainer
from raypipe.train.measure.utilisation import limit, phases, utilisation
from raypipe.train.publish import publish

from .conftest import Jobs

COMPUTE = {"data": 0.05, "forward": 0.5, "backward": 0.4, "optimizer": 0.05}
HUNGRY = {"data": 0.4, "forward": 0.3, "backward": 0.3}


@pytest.mark.parametrize(
    ("shares", "cpu", "gpu", "on_gpu", "said"),
    [
        (HUNGRY, 0.93, 0.5, True, "decoding limits: steps waited 40% of their time for images"),
        (HUNGRY, 0.93, None, False, "decoding limits"),
        (HUNGRY, 0.5, 0.5, True, "reading limits, or feed.threads"),
        ({"communication": 0.35, "backward": 0.9}, 0.9, None, False, "exchange of gradients"),
        ({"other": 0.31, "forward": 0.69}, 0.9, 0.9, True, "checkpoints and reports limit: 31%"),
        (COMPUTE, 0.4, 0.9, True, "the GPU limits"),
        (COMPUTE, 0.9, None, False, "computing limits: 95% of a step, and the CPUs were full"),
        # Nothing stands out: an idle GPU that waits for no image may wait for Python.
        (COMPUTE, 0.4, 0.6, True, None),
        (COMPUTE, 0.95, 0.6, True, None),
        (COMPUTE, 0.6, None, False, None),
        ({}, 0.99, None, False, None),
        ({}, 0.1, None, True, None),
    ],
)
def test_what_limits_is_what_was_measured(
    shares: dict[str, float], cpu: float, gpu: float | None, on_gpu: bool, said: str | None
) -> None:
    found = limit(shares, cpu, gpu, on_gpu)
    assert found is None if said is None else found is not None and said in found


def test_phases_weigh_an_epoch_by_its_time() -> None:
    slow = {"step_s": 2.0, "data_s": 1.0, "forward_s": 1.0, "images_per_s": 10.0}
    fast = {"step_s": 1.0, "data_s": 0.0, "forward_s": 1.0, "images_per_s": 30.0}
    lost = {"step_s": 0.0, "data_s": 0.0, "images_per_s": float("nan")}
    shares = phases([slow, fast, lost])
    assert shares == pytest.approx({"data": 0.375, "forward": 0.625})
    assert phases([]) == {} and phases([{"val_loss": 1.0}]) == {}


def node(samples: int = 4, unused_s: float = 0.0, of: str = "host", **values: float) -> Node:
    sample = {SECONDS: 5.0, **{CPU: 90.0, MEMORY: 3100.0}, **values}
    size = Size(4.0, of, 24000.0, of)
    return Node(size, [{AT: 5.0 * i, **sample} for i in range(samples)], unused_s)


def test_one_node() -> None:
    found = utilisation({"a": node(of="container")}, [])
    assert found is not None
    assert found.text() == (
        "CPU 90% of 4 busy, memory at most 3.1 of 24.0 GB (limits of the container)"
    )
    assert found.summary()["limit"] is None
    assert found.summary()["nodes"][0]["cpu_busy"] == pytest.approx(0.9)


def test_two_nodes_with_gpus_and_one_that_did_nothing() -> None:
    gpus = {"gpu_0_utilization_percentage": 80.0, "gpu_1_utilization_percentage": 40.0}
    nodes = {
        "a": node(**gpus),
        "b": node(**{**gpus, CPU: 50.0, MEMORY: 12000.0}, unused_s=20.0),
        "c": node(samples=0, unused_s=40.0),
    }
    epochs = [
        {"step_s": 1.0, "data_s": 0.1, "forward_s": 0.9, "images_per_s": 9.0, "gpu_memory_mb": 1.0}
    ]
    found = utilisation(nodes, epochs)
    assert found is not None
    assert found.text() == (
        "3 nodes: CPU 70% of 8 busy, GPU 40% of 4 idle, memory at most 12.0 of 24.0 GB (on b), "
        "nothing ran on b for 50% of the time, nothing ran on c for 100% of the time"
    )


def test_too_few_samples_say_nothing() -> None:
    assert utilisation({}, []) is None
    assert utilisation({"a": node(samples=2)}, []) is None
    brief = node(samples=5)
    for sample in brief.samples:
        sample[SECONDS] = 1.0
    assert utilisation({"a": brief}, []) is None
    assert utilisation({"a": node(samples=0, unused_s=100.0)}, []) is None
    # A node that was seen only once is left out; the other one speaks for itself.
    found = utilisation({"a": node(), "b": node(samples=1)}, [])
    assert found is not None and len(found.nodes) == 1


@pytest.mark.usefixtures("ray_session")
def test_a_training_logs_its_node_to_mlflow(jobs: Jobs) -> None:
    job = jobs(**{"train.epochs": 8, "cluster.usage_every_s": 1})
    planned = trainer.plan(job)
    # Long enough for several samples on a fast machine, too.
    result = trainer.run(planned, progress=lambda metrics, state: time.sleep(0.4))
    (recorded,) = usage.read(planned.folder / usage.FILE).values()
    assert recorded.samples, "the training was shorter than a second"
    store = open_store(job.run, RegistryConfig())
    version = publish(store, planned, result, "train")
    (run,) = store.client.search_runs([store.experiment_id])
    logged = store.client.get_metric_history(run.info.run_id, f"system/{CPU}")
    assert [m.value for m in logged] == pytest.approx([s[CPU] for s in recorded.samples])
    assert [m.timestamp for m in logged] == [int(s[AT] * 1000) for s in recorded.samples]
    again = publish(store, planned, result, "train")
    assert again == version == versions.find(store, planned.key)
    assert len(store.client.get_metric_history(run.info.run_id, f"system/{CPU}")) == len(logged)


def test_a_training_without_usage_logs_none(jobs: Jobs) -> None:
    job = jobs(**{"train.epochs": 1, "cluster.usage_every_s": None, "cluster.address": "none"})
    planned: Any = trainer.plan(job)
    trainer.run(planned)
    assert not (Path(planned.folder) / usage.FILE).exists()


def test_a_node_weighs_as_long_as_it_was_there() -> None:
    """A pod that was killed after 15 s counted as much as the one that trained for an hour."""
    nodes = {"a": node(samples=3, **{CPU: 5.0}), "b": node(samples=700, **{CPU: 97.0})}
    found = utilisation(nodes, [])
    assert found is not None and "CPU 97% of 8 busy" in found.text()
