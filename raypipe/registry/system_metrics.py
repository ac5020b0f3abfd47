"""What the nodes did, as the system metrics of an MLflow run."""

from __future__ import annotations

import logging

from raypipe.cluster import usage
from raypipe.cluster.node_reader import SECONDS
from raypipe.cluster.usage import Nodes
from raypipe.errors import hidden, one_line
from raypipe.registry import runs
from raypipe.registry.store import Store

LOG = logging.getLogger("raypipe")


def log(store: Store, run_id: str, nodes: Nodes) -> None:
    """Log what the nodes did as MLflow's system metrics, with the times of the samples.

    Of several nodes each has its name in the metrics' names, as MLflow's own monitor has it. What
    moved over disks and network is counted from the beginning. A store that fails here costs the
    run these metrics and nothing else.
    """
    from mlflow.entities import Metric

    metrics = []
    for node, has in nodes.items():
        prefix = f"system/{_node_name(node)}/" if len(nodes) > 1 else "system/"
        so_far: dict[str, float] = {}
        for step, sample in enumerate(has.samples):
            for name, value in sample.items():
                if name in (usage.AT, SECONDS):
                    continue
                if usage.is_moved(name):
                    value = so_far[name] = so_far.get(name, 0.0) + value
                at_ms = int(sample[usage.AT] * 1000)
                metrics.append(Metric(prefix + name, value, at_ms, step))
    try:
        for start in range(0, len(metrics), 1000):
            store.client.log_batch(run_id, metrics=metrics[start : start + 1000])
    except Exception as e:
        LOG.warning(
            "MLflow did not take what the nodes did (%s). It is kept in the run's folder, in %s",
            hidden(one_line(e, 200)),
            usage.FILE,
        )


def _node_name(node: str) -> str:
    """A node's name as a part of a metric's name."""
    return runs.allowed_name(node).strip(".") or "node"
