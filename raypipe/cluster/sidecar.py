"""Run a function in another Python environment on a Ray node: arrays and JSON in, arrays and JSON out.

fastdup and Alibi Detect pin numpy 1 and an old Pillow; the core runs numpy 2. Each lives in a *sidecar*: a small virtual
environment, built once per node from the pinned list in `sidecars/NAME.txt`, with the core's site-packages behind its own, so
that torch, ray and raypipe are not installed twice. Ray starts the worker with the sidecar's interpreter (`py_executable`).

Only .npy bytes (never pickles) and JSON cross the border: a numpy 2 pickle does not load under numpy 1.
pip does the install, because it knows the user's own index, mirror and certificates. Nothing is built from source.
Cost, measured on 2 cores from a local index: fastdup 20 s and 0.7 GB, alibi 24 s and 0.5 GB, once per node; the first call
3-9 s (a worker and its imports), later ones 10 ms while Ray keeps that worker.
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

# Not raypipe.config: the sidecar's worker imports this module too, and a sidecar may hold another pydantic.
from raypipe.errors import ClusterError, RaypipeError, nearest

LOG = logging.getLogger("raypipe")
LISTS = Path(__file__).parent / "sidecars"
BUILD_LIMIT_S = 1800

# Sidecar -> the import that it is for. Alibi Detect 0.11.4 wants pydantic 1 and Ray 2.60 refuses to run beside that one, so it
# gets the copy of version 1 inside the core's pydantic 2.
PROBES = {
    "fastdup": "import fastdup",
    "alibi": "import pydantic.v1.fields, sys; m = sys.modules; m['pydantic'] = m['pydantic.v1'];"
    "m['pydantic.fields'] = m['pydantic.v1.fields']; import alibi_detect.cd",
}

# Set before the worker's first import: fastdup starts Sentry and asks the package index for its age when it is imported,
# and transformers (which Alibi Detect imports) may look for a model hub. Sidecars compute on the CPU and leave GPUs alone.
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
    """The interpreter of sidecar `name` on this node, built first when it is missing.

    It lives in `$RAYPIPE_HOME/sidecars` (default `~/.cache/raypipe/sidecars`) under a key of its pins, the Python version and
    the core's location. A half-built one is never used: it gets its name only when complete. RaypipeError when pip fails.
    """
    if name not in PROBES:
        raise RaypipeError("There is no such sidecar", got=name, fix=nearest(name, list(PROBES)))
    home = (
        Path(os.environ.get("RAYPIPE_HOME") or Path.home() / ".cache" / "raypipe")
        .expanduser()
        .absolute()
        / "sidecars"
    )
    requirements = LISTS / f"{name}.txt"
    about = [
        requirements.read_text(encoding="utf-8"),
        platform.python_version(),
        platform.machine(),
        *_core_sites(),
    ]
    target = home / f"{name}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]}"
    interpreter = target / "bin" / "python"
    if interpreter.exists():  # follows the link: False too when the base Python has been removed
        return interpreter
    home.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(home / f"{target.name}.lock", timeout=BUILD_LIMIT_S):
            if not interpreter.exists():
                _build(name, requirements, target)
    except Timeout:
        fix = f"Look for a hanging pip, then remove {target.name}.lock in {home}"
        raise RaypipeError(
            f"Another process has been building the sidecar {name} for {BUILD_LIMIT_S} s", fix=fix
        ) from None
    return interpreter


def call(
    name: str,
    function: str,
    arrays: dict[str, np.ndarray],
    options: dict[str, Any],
    *,
    num_cpus: float = 1,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Run `"package.module:function"` in sidecar `name` on some node of the connected cluster.

    The function has the signature `f(arrays, options) -> (arrays, facts)`; options and facts are JSON.
    RaypipeError with the end of the sidecar's traceback when it fails, ClusterError when its process or node is lost.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        raise ClusterError(
            f"The sidecar {name} needs Ray, and there is no connection",
            fix="Call cluster.connect first",
        )
    prepare, run = _remotes()
    try:
        ready = prepare.options(num_cpus=num_cpus).remote(name)
        if not ray.wait([ready], timeout=5)[0]:
            LOG.info("preparing the sidecar %s on a node: about half a minute, once per node", name)
        node_id, interpreter = ray.get(ready)
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        environment = {"py_executable": shlex.quote(interpreter), "env_vars": QUIET}
        task = run.options(
            num_cpus=num_cpus, runtime_env=environment, scheduling_strategy=here, max_retries=1
        )
        reply = ray.get(task.remote(interpreter, function, _pack(arrays), json.dumps(options)))
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, RaypipeError):
            raise e.cause from None
        raise
    except ray.exceptions.RayError as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:400]
        raise ClusterError(
            f"The sidecar {name} was lost: {reason}", fix="See the logs of Ray, then run it again"
        ) from e
    if "error" in reply:
        raise RaypipeError(f"{function} failed in the sidecar {name}:\n{_tail(reply['error'])}")
    return _unpack(reply["arrays"]), json.loads(reply["facts"])


def _prepare(name: str) -> tuple[str, str]:
    """(node id, interpreter), on the node where Ray puts this task."""
    import ray

    return ray.get_runtime_context().get_node_id(), str(ensure(name))


def _run(interpreter: str, function: str, packed: dict[str, bytes], options: str) -> dict[str, Any]:
    """In the sidecar's worker. Errors return as text: the core may be unable to unpickle their classes."""
    try:
        own = Path(interpreter).parent.parent
        if own not in Path(np.__file__).parents:
            raise RuntimeError(
                f"numpy came from {np.__file__}, not from {own}: does PYTHONPATH or the job's pip list hold it?"
            )
        module, _, attribute = function.partition(":")
        arrays, facts = getattr(importlib.import_module(module), attribute)(
            _unpack(packed), json.loads(options)
        )
        return {"arrays": _pack(arrays), "facts": json.dumps(facts)}
    except Exception:
        return {"error": traceback.format_exc()}


@functools.cache
def _remotes() -> tuple[Any, Any]:
    import ray

    return ray.remote(_prepare), ray.remote(_run)


def _build(name: str, requirements: Path, target: Path) -> None:
    started = time.monotonic()
    LOG.info("building the sidecar %s in %s: about half a minute, once per node", name, target)
    partial = target.with_name(target.name + ".partial")
    for leftover in (partial, target):  # what a killed builder or a removed base Python left behind
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        python = str(partial / "bin" / "python")
        _shell(name, [sys.executable, "-m", "venv", "--without-pip", str(partial)])
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "--no-input",
            "--disable-pip-version-check",
        ]
        _shell(
            name,
            [
                *pip,
                "install",
                "--no-deps",
                "--no-compile",
                "--only-binary",
                ":all:",
                "-r",
                str(requirements),
            ],
        )
        own = (
            partial
            / "lib"
            / f"python{sys.version_info.major}.{sys.version_info.minor}"
            / "site-packages"
        )
        # addsitedir reads editable installs too, and puts what it adds behind the sidecar's own packages
        lines = [f"import site; site.addsitedir({path!r})\n" for path in _core_sites()]
        (own / "_core.pth").write_text("".join(lines), encoding="utf-8")
        # Importing once proves that the pins work here and compiles what is used: 4-7 s, where pip spends 15 on all files.
        _shell(name, [python, "-c", PROBES[name]])
        partial.rename(
            target
        )  # bin/python and pyvenv.cfg name the base Python and survive the move; scripts do not
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    LOG.info("built the sidecar %s in %.0f s", name, time.monotonic() - started)


def _core_sites() -> list[str]:
    return [
        path
        for path in sys.path
        if path.endswith(("site-packages", "dist-packages")) and Path(path).is_dir()
    ]


def _shell(name: str, command: list[str]) -> None:
    # pip would take what lies on PYTHONPATH for installed; without .pyc files every first call costs 3 s more
    drop = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {k: v for k, v in os.environ.items() if k not in drop} | QUIET
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        fix = "pip must be installed and reach a package index: set PIP_INDEX_URL to your mirror, and see that the disk has 1 GB"
        raise RaypipeError(
            f"The sidecar {name} cannot be built:\n{_tail(done.stdout + done.stderr)}", fix=fix
        )


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
