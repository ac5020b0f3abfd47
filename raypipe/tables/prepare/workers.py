"""Prepares parts on the cluster, by tasks of one CPU, in any order.

The order is drawn: two runs at once would else make the same parts side by side.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray

from raypipe.cluster.tasks import cancel, result
from raypipe.errors import without_secrets
from raypipe.tables.commits import Moved
from raypipe.tables.prepare.parts import Coding, Part, make
from raypipe.tables.prepare.staged import Made

AHEAD = 2  # tasks for each worker: one runs, one waits beside it


def stream(parts: list[Part], coding: Coding, workers: int | None) -> Iterator[tuple[Made, bool]]:
    """Each part when it is finished, and whether it was made here.

    workers: tasks at a time; None: as many as the cluster has CPUs. Raises Moved if another run has
    finished all of them, and what a task raises.
    """
    if not parts:
        return
    most = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
    how = ray.put(coding)
    task = ray.remote(num_cpus=1, max_retries=3)(without_secrets(make))
    waiting = random.sample(parts, len(parts))
    started: list[Any] = []
    try:
        while waiting or started:
            while waiting and len(started) < (workers or most):
                part = waiting.pop()
                # Another run may have made it meanwhile, or all of them.
                theirs = coding.staged.noted(part.number)
                if theirs is not None:
                    yield theirs, False
                    continue
                if coding.staged.is_over():
                    raise Moved
                sent = replace(part, fragments=tuple(one.for_task() for one in part.fragments))
                started.append(task.remote(sent, how))
            if not started:
                return
            ready, started = ray.wait(started, num_returns=1)
            yield result(ready[0]), True
    finally:
        cancel(started)  # the consumer stops early, or a task has failed
