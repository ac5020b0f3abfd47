"""Runs a function in another Python environment on a Ray node, with arrays and JSON in and out.

fastdup and Alibi Detect need an old numpy and Pillow; the core runs newer ones. Each lives in a
*sidecar*: a small virtual environment, built once per node (`sidecars/build.py`). The core's
site-packages come behind its own, so that torch, ray and raypipe are not installed twice. Ray
starts the worker with the sidecar's interpreter (`py_executable`).

The protocol of `call`:

1. A task on some node looks for the sidecar. If it is missing, a second task builds it there. The
   wheels come from the archive that `cluster.sidecars` or RAYPIPE_SIDECARS names; without one, from
   the node's package index, or the driver's if the node has none. The driver's may hold a
   password: it travels as an argument of the task, which Ray shows nowhere.
2. A task on that node runs in the sidecar's interpreter. It gets arrays as .npy bytes and options
   as JSON, and returns the same. Nothing is pickled between the two environments: numpy 1 cannot
   load a pickle of numpy 2.
3. An error in the function returns as text. The core may be unable to unpickle its class.

Cost: the first call 3-9 s (a worker and its imports), later ones 10 ms while Ray keeps that worker.

The sidecar's worker imports this module too, and may hold another pydantic. So it must not import
raypipe.config.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import logging
import os
import shlex
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.cluster.sidecars import build, pip
from raypipe.cluster.sidecars.build import QUIET, Source
from raypipe.errors import ClusterError, RaypipeError, hidden, one_line

LOG = logging.getLogger("raypipe")
_told: list[Source] = []  # the archive that this process was told to take, if any


def take_from(address: str | None) -> None:
    """Nodes take the archive of sidecars from this address; None: from RAYPIPE_SIDECARS, if set.

    Raises ConfigError for what is no address.
    """
    from raypipe.cluster.sidecars import archive

    chosen = address or os.environ.get(build.ARCHIVE, "")
    if chosen:
        archive.check(chosen)
    _told[:] = [Source(archive.absolute(chosen))] if chosen else []


def ensure(name: str) -> Path:
    """The interpreter of sidecar `name` on this node; it is built if it is missing. See `build`."""
    return build.ensure(name, *_told)


def call(
    name: str,
    function: str,
    arrays: dict[str, np.ndarray],
    options: dict[str, Any],
    *,
    num_cpus: float = 1,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Run `"package.module:function"` in sidecar `name` on some node of the connected cluster.

    The function has the signature `f(arrays, options) -> (arrays, facts)`; options and facts are
    JSON. Raises RaypipeError with the end of the sidecar's traceback if the function fails, and
    ClusterError if its process or node is lost.
    """
    import ray

    if not ray.is_initialized():
        raise ClusterError(
            f"The sidecar {name} needs Ray, and there is no connection",
            fix="Call cluster.connect first",
        )
    try:
        reply = _call(name, function, _pack(arrays), json.dumps(options), num_cpus)
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, RaypipeError):
            raise e.cause from None
        raise
    except ray.exceptions.RayError as e:
        reason = one_line(f"{type(e).__name__}: {e}", 400)
        raise ClusterError(
            f"The sidecar {name} was lost: {reason}", fix="See the logs of Ray, then run it again"
        ) from e
    if "error" in reply:
        raise RaypipeError(f"{function} failed in the sidecar {name}:\n{pip.tail(reply['error'])}")
    return _unpack(reply["arrays"]), json.loads(reply["facts"])


def _call(
    name: str, function: str, packed: dict[str, bytes], options: str, num_cpus: float
) -> dict[str, Any]:
    """Prepare the sidecar on some node, then run the function there; returns `_run`'s reply."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    find, prepare, run = _remotes()
    node_id, interpreter = ray.get(find.options(num_cpus=num_cpus).remote(name))
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    if not interpreter:
        LOG.info("building the sidecar %s on a node: about half a minute, once per node", name)
        source = _told[0] if _told else Source(index=pip.index())
        task = prepare.options(num_cpus=num_cpus, scheduling_strategy=there)
        interpreter = ray.get(task.remote(name, source))
    task = run.options(
        num_cpus=num_cpus,
        runtime_env={"py_executable": shlex.quote(interpreter), "env_vars": QUIET},
        scheduling_strategy=there,
        max_retries=1,
    )
    return ray.get(task.remote(interpreter, function, packed, options))  # type: ignore[no-any-return]


def _find(name: str) -> tuple[str, str]:
    """The node where Ray runs this task, and the sidecar's interpreter there or ""."""
    import ray

    return ray.get_runtime_context().get_node_id(), str(build.interpreter(name) or "")


def _prepare(name: str, source: Source) -> str:
    """Build the sidecar on the node where Ray runs this task; returns its interpreter."""
    return str(build.ensure(name, source))


def _run(interpreter: str, function: str, packed: dict[str, bytes], options: str) -> dict[str, Any]:
    """Run the function in the sidecar's worker; returns arrays and facts, or an error as text."""
    try:
        sidecar = Path(interpreter).parent.parent
        if sidecar not in Path(np.__file__).parents:
            raise RuntimeError(
                f"numpy came from {np.__file__}, not from {sidecar}: "
                "does PYTHONPATH or the job's pip list hold it?"
            )
        module, _, attribute = function.partition(":")
        work = getattr(importlib.import_module(module), attribute)
        arrays, facts = work(_unpack(packed), json.loads(options))
        return {"arrays": _pack(arrays), "facts": json.dumps(facts)}
    except Exception:
        return {"error": hidden(traceback.format_exc())}


@functools.cache
def _remotes() -> tuple[Any, Any, Any]:
    """`_find`, `_prepare` and `_run` as Ray tasks."""
    import ray

    return ray.remote(_find), ray.remote(_prepare), ray.remote(_run)


def _pack(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    packed = {}
    for key, array in arrays.items():
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        packed[key] = buffer.getvalue()
    return packed


def _unpack(packed: dict[str, bytes]) -> dict[str, np.ndarray]:
    return {key: np.load(io.BytesIO(data), allow_pickle=False) for key, data in packed.items()}
