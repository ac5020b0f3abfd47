"""What the nodes did while a training or a search ran: a file of its folder, usage.json.

recorder.py writes it while the run goes on, and the run's summary and MLflow read it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from raypipe.cluster.node_reader import COST, SECONDS, Size
from raypipe.config import require_format, to_json
from raypipe.files import write_atomic

log = logging.getLogger("raypipe")
FILE = "usage.json"
FORMAT = 1
AT = "at"  # unix seconds at the end of what a sample is about
# A shorter time says little: counters of the kernel move in ticks of 10 ms.
SHORTEST_S = 0.5

Sample = dict[str, float]


@dataclass
class Node:
    """One node. samples: AT, SECONDS, and values by MLflow's names, in the order of time.

    Values are means over SECONDS, the most for memory, and what moved in that time for disks and
    network. unused_s: seconds in which nothing had a CPU or a GPU of it.
    """

    size: Size
    samples: list[Sample] = field(default_factory=list)
    unused_s: float = 0.0

    def mean(self, name: str) -> float | None:
        """A value's mean over all samples that have it; None without any."""
        having = [sample for sample in self.samples if name in sample]
        seconds = sum(sample[SECONDS] for sample in having)
        if not seconds:
            return None
        return sum(sample[name] * sample[SECONDS] for sample in having) / seconds

    def most(self, name: str) -> float | None:
        return max((sample[name] for sample in self.samples if name in sample), default=None)


Nodes = dict[str, Node]


def read(*files: Path) -> Nodes:
    """The recorded nodes by name, of all files together; {} where nothing was recorded."""
    nodes: Nodes = {}
    for file in dict.fromkeys(files):
        for name, node in _read(file).items():
            if name in nodes:
                nodes[name].samples += node.samples
                nodes[name].samples.sort(key=lambda sample: sample[AT])
                nodes[name].unused_s += node.unused_s
            else:
                nodes[name] = node
    return nodes


def _read(file: Path) -> Nodes:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        require_format(stored, FORMAT, file)
        return {
            name: Node(Size(**node["size"]), list(node["samples"]), node["unused_s"])
            for name, node in stored["nodes"].items()
        }
    except FileNotFoundError:
        return {}
    except Exception as e:
        # Torn by a full disk, or of a newer version: not worth a run.
        log.debug("%s cannot be read: %s", file, e)
        return {}


def merged(samples: Sequence[Sample]) -> list[Sample]:
    """Half as many samples: two neighbours become one."""
    pairs = []
    for i in range(0, len(samples) - 1, 2):
        pairs.append(_merge(samples[i], samples[i + 1]))
    return pairs + list(samples[len(pairs) * 2 :])


def _merge(first: Sample, second: Sample) -> Sample:
    one = {AT: second[AT], SECONDS: first[SECONDS] + second[SECONDS]}
    for name in [*first, *second]:
        if name in one:
            continue
        had = [sample for sample in (first, second) if name in sample]
        values = [sample[name] for sample in had]
        if is_moved(name):
            one[name] = sum(values)
        elif "memory" in name or name.startswith("disk"):
            one[name] = max(values)
        else:
            weights = [sample[SECONDS] for sample in had]
            weighted = zip(values, weights, strict=True)
            one[name] = sum(v * w for v, w in weighted) / sum(weights)
    return one


def is_moved(name: str) -> bool:
    """Is this what moved in a sample's time, rather than a state?"""
    return name.startswith(("network_", "disk_read_", "disk_write_"))


def values(node: Node) -> int:
    """How many values a node has."""
    return sum(len(sample) for sample in node.samples)


def add(node: Node, at: float, values: Mapping[str, float]) -> None:
    """Keep a reading; one of a moment too short to say anything is dropped."""
    sample = {name: value for name, value in values.items() if name != COST}
    if sample[SECONDS] >= SHORTEST_S:
        node.samples.append({AT: at, **sample})


def write(file: Path, nodes: Nodes) -> None:
    """Write the nodes; `read` is the inverse."""
    content = {"format": FORMAT, "nodes": {name: asdict(node) for name, node in nodes.items()}}
    write_atomic(file, to_json(content))
