"""Asks a question in a Python process of its own, with a time limit.

The question's function is named as "module:function", and gets and returns JSON. The process has
this one's `sys.path` and environment. Questions go through stdin: they may hold credentials, and
every user of the host sees command lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from raypipe.errors import RaypipeError, hidden, one_line

# Ends the answer's line; libraries print what they like before and after it.
MARK = "raypipe-doctor-answer "
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
_START += "from raypipe.doctor.process import answer; answer(sys.argv[2])"


class Died(Exception):
    """The process ended without an answer: by a signal, an exception or its time limit."""


def ask(
    function: str, limit_s: float, environment: Mapping[str, str] | None = None, **question: Any
) -> dict[str, Any]:
    """Call `function` in a process of its own.

    environment: variables that it has besides this process's.
    Raises RaypipeError if the function does, and Died with one line if the process ends without an
    answer or takes longer than `limit_s`.
    """
    command = [sys.executable, "-c", _START, json.dumps(sys.path), function]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=limit_s,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Died(f"no answer within {limit_s:.0f} s") from None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return _unwrap(json.loads(line.removeprefix(MARK)))
    # Without an answer: a segmentation fault, for example, of a library built for another one.
    if done.returncode < 0:
        raise Died(f"its process was killed by signal {-done.returncode}")
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    raise Died(hidden(one_line(last[0])))


def answer(function: str) -> None:
    """In the process: call the function with the question on stdin, and print its answer."""
    import importlib

    module, _, name = function.partition(":")
    question = json.loads(sys.stdin.read())
    try:
        wrapped = {"answer": getattr(importlib.import_module(module), name)(**question)}
    except RaypipeError as e:
        wrapped = {"error": [e.what, e.got, e.rule, e.fix]}
    except Exception as e:
        wrapped = {"died": f"{type(e).__name__}: {one_line(e)}"}
    # A library may have printed the beginning of a line.
    print("\n" + MARK + json.dumps(wrapped, default=str), flush=True)


def _unwrap(wrapped: dict[str, Any]) -> dict[str, Any]:
    if "error" in wrapped:
        what, got, rule, fix = wrapped["error"]
        raise RaypipeError(what, got=got, rule=rule, fix=fix)
    if "died" in wrapped:
        raise Died(hidden(wrapped["died"]))
    return dict(wrapped["answer"])
