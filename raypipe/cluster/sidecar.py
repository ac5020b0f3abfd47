"""Runs a function in another Python environment on a Ray node, with arrays and JSON in and out.

fastdup and Alibi Detect need numpy 1 and an old Pillow; the core runs numpy 2. Each lives in a
*sidecar*: a small virtual environment, built once per node from the pinned list in
`sidecars/NAME.txt`. The core's site-packages come behind its own, so that torch, ray and raypipe
are not installed twice. Ray starts the worker with the sidecar's interpreter (`py_executable`).

The protocol of `call`:

1. A task on some node builds the sidecar, if it is missing, under a file lock; it returns the node
   and the interpreter.
2. A second task on that node runs in the sidecar's interpreter. It gets arrays as .npy bytes and
   options as JSON, and returns the same. Nothing is pickled between the two environments: numpy 1
   cannot load a pickle of numpy 2.
3. An error in the function returns as text. The core may be unable to unpickle its class.

pip installs, because it knows the user's index, mirror and certificates. Nothing is built from
source. Cost, measured on 2 cores from a local index: fastdup 20 s and 0.7 GB, alibi 24 s and
0.5 GB, once per node; the first call 3-9 s (a worker and its imports), later ones 10 ms while Ray
keeps that worker.

The sidecar's worker imports this module too, and may hold another pydantic. So it must not import
raypipe.config.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from raypipe.errors import ClusterError, RaypipeError, nearest, one_line

LOG = logging.getLogger("raypipe")
LISTS = Path(__file__).parent / "sidecars"
BUILD_LIMIT_S = 1800

# The import that each sidecar is for; it proves that the sidecar works. Alibi Detect 0.11.4 needs
# pydantic 1, with which Ray 2.60 refuses to run. So it gets the copy of version 1 inside the core's
# pydantic 2.
PROBES = {
    "fastdup": "import fastdup",
    "alibi": "import pydantic.v1.fields, sys; m = sys.modules; m['pydantic'] = m['pydantic.v1'];"
    "m['pydantic.fields'] = m['pydantic.v1.fields']; import alibi_detect.cd",
}

# Set before the worker's first import. At import, fastdup starts Sentry and asks the package index
# for newer versions; transformers, which Alibi Detect imports, may ask a model hub. Sidecars
# compute on the CPU and leave GPUs alone.
QUIET = {
    "SENTRY_OPT_OUT": "1",
    "FASTDUP_PRODUCTION": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "MPLBACKEND": "Agg",
    "CUDA_VISIBLE_DEVICES": "",
}


def ensure(name: str) -> Path:
    """The interpreter of sidecar `name` on this node; the sidecar is built if it is missing.

    It lives in `$RAYPIPE_HOME/sidecars` (default `~/.cache/raypipe/sidecars`). Its folder's name
    holds a hash of its pins, the Python version and the core's location. A folder gets that name
    only when it is complete, so a half-built sidecar is never used. Raises RaypipeError if pip
    fails.
    """
    target = place(name)
    interpreter = target / "bin" / "python"
    # `exists` follows the link, so it is False too if the base Python has been removed.
    if interpreter.exists():
        return interpreter
    home, requirements = target.parent, LISTS / f"{name}.txt"
    home.mkdir(parents=True, exist_ok=True)
    lock = home / f"{target.name}.lock"
    try:
        with FileLock(lock, timeout=BUILD_LIMIT_S):
            # Another process may have built it while this one waited.
            if not interpreter.exists():
                _build(name, requirements, target)
    except Timeout:
        raise RaypipeError(
            f"Another process has been building the sidecar {name} for {BUILD_LIMIT_S} s",
            fix=f"Look for a hanging pip, then remove {lock.name} in {home}",
        ) from None
    return interpreter


def place(name: str) -> Path:
    """The folder of sidecar `name` on this node, whether it is there or not."""
    if name not in PROBES:
        raise RaypipeError("There is no such sidecar", got=name, fix=nearest(name, list(PROBES)))
    cache = Path(os.environ.get("RAYPIPE_HOME") or Path.home() / ".cache" / "raypipe")
    inputs = [
        (LISTS / f"{name}.txt").read_text(encoding="utf-8"),
        platform.python_version(),
        platform.machine(),
        *_core_sites(),
    ]
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:12]
    return cache.expanduser().absolute() / "sidecars" / f"{name}-{digest}"


def damage(name: str, limit_s: float) -> str:
    """Why the built sidecar `name` does not work, or "". It is tried as after its building.

    Raises subprocess.TimeoutExpired.
    """
    command = [str(place(name) / "bin" / "python"), "-c", PROBES[name]]
    tried = subprocess.run(
        command, capture_output=True, text=True, env=_quiet(), timeout=limit_s, check=False
    )
    return _tail(tried.stderr, 1) or f"exit code {tried.returncode}" if tried.returncode else ""


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
        raise RaypipeError(f"{function} failed in the sidecar {name}:\n{_tail(reply['error'])}")
    return _unpack(reply["arrays"]), json.loads(reply["facts"])


def _call(
    name: str, function: str, packed: dict[str, bytes], options: str, num_cpus: float
) -> dict[str, Any]:
    """Prepare the sidecar on some node, then run the function there; returns `_run`'s reply."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    prepare, run = _remotes()
    ready = prepare.options(num_cpus=num_cpus).remote(name)
    done, _ = ray.wait([ready], timeout=5)
    if not done:
        LOG.info("preparing the sidecar %s on a node: about half a minute, once per node", name)
    node_id, interpreter = ray.get(ready)
    task = run.options(
        num_cpus=num_cpus,
        runtime_env={"py_executable": shlex.quote(interpreter), "env_vars": QUIET},
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        max_retries=1,
    )
    return ray.get(task.remote(interpreter, function, packed, options))  # type: ignore[no-any-return]


def _prepare(name: str) -> tuple[str, str]:
    """Build the sidecar on the node where Ray runs this task; returns (node id, interpreter)."""
    import ray

    return ray.get_runtime_context().get_node_id(), str(ensure(name))


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
        return {"error": traceback.format_exc()}


@functools.cache
def _remotes() -> tuple[Any, Any]:
    """`_prepare` and `_run` as Ray tasks."""
    import ray

    return ray.remote(_prepare), ray.remote(_run)


def _build(name: str, requirements: Path, target: Path) -> None:
    """Build the sidecar in `TARGET.partial`, test it, and rename it to `target`."""
    started = time.monotonic()
    LOG.info("building the sidecar %s in %s: about half a minute, once per node", name, target)
    partial = target.with_name(target.name + ".partial")
    # Leftovers of a killed build, or a sidecar whose base Python has been removed.
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        python = str(partial / "bin" / "python")
        _shell(name, [sys.executable, "-m", "venv", "--without-pip", str(partial)])
        pip = [sys.executable, "-m", "pip", "--python", python]
        pip += ["--no-input", "--disable-pip-version-check"]
        install = ["install", "--no-deps", "--no-compile", "--only-binary", ":all:"]
        _shell(name, [*pip, *install, "-r", str(requirements)])

        # addsitedir also reads editable installs. It puts them behind the sidecar's own packages.
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own_sites = partial / "lib" / version / "site-packages"
        lines = [f"import site; site.addsitedir({path!r})\n" for path in _core_sites()]
        (own_sites / "_core.pth").write_text("".join(lines), encoding="utf-8")

        # One import proves that the pins work here, and compiles the modules in use: 4-7 s.
        # pip would compile all files, in 15 s.
        _shell(name, [python, "-c", PROBES[name]])
        # bin/python and pyvenv.cfg name the base Python, so they still work after the move.
        # Scripts in bin would not.
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    LOG.info("built the sidecar %s in %.0f s", name, time.monotonic() - started)


def _core_sites() -> list[str]:
    """The folders of the core's installed packages."""
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return [folder for folder in folders if Path(folder).is_dir()]


def _shell(name: str, command: list[str]) -> None:
    """Run a command. Raises RaypipeError with the end of its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=_quiet(), check=False)
    if done.returncode:
        raise RaypipeError(
            f"The sidecar {name} cannot be built:\n{_tail(done.stdout + done.stderr)}",
            fix="pip must be installed and reach a package index: "
            "set PIP_INDEX_URL to your mirror, and see that the disk has 1 GB",
        )


def _quiet() -> dict[str, str]:
    """The environment for a sidecar's own processes."""
    # pip takes packages on PYTHONPATH for installed. Without .pyc files, every first call of the
    # sidecar costs 3 s more.
    drop = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {k: v for k, v in os.environ.items() if k not in drop} | QUIET


def _tail(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _pack(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    packed = {}
    for key, array in arrays.items():
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        packed[key] = buffer.getvalue()
    return packed


def _unpack(packed: dict[str, bytes]) -> dict[str, np.ndarray]:
    return {key: np.load(io.BytesIO(data), allow_pickle=False) for key, data in packed.items()}
