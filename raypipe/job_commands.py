"""A command for each verb that runs as a job: raypipe-train CONFIG is `raypipe train CONFIG`.

Ray and Databricks start a job by one name and a list of arguments. These are installed with the
package, so a job needs no checkout:

    ray job submit --address http://HOST:8265 -- raypipe-train CONFIG

and in a python_wheel_task `package_name: raypipe`, `entry_point: raypipe-drift`. Exit codes are the
verb's. On Databricks a task counts as failed by any SystemExit, and `raypipe.main.entry` raises one
only for a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raypipe.failures import report
from raypipe.main import entry


def _command(verb: str) -> Callable[[], None]:
    """A function without arguments, as a console script wants it."""

    def run() -> None:
        entry([verb, *sys.argv[1:]])

    run.__name__ = verb
    run.__doc__ = f"raypipe {verb} with this process's arguments."
    return run


ingest = _command("ingest")
clean = _command("clean")
train = _command("train")
tune = _command("tune")
predict = _command("predict")
evaluate = _command("evaluate")
retrain = _command("retrain")
serve = _command("serve")
promote = _command("promote")
rollback = _command("rollback")


def prepare() -> None:
    """raypipe table prepare with this process's arguments."""
    entry(["table", "prepare", *sys.argv[1:]])


def drift() -> None:
    """raypipe drift with this process's arguments.

    On Databricks the answers travel as task values: `is_drift`, and `retrain`, on which the job's
    condition starts the retrain job. An exit code other than 0 would look like a crash there, and
    be retried.
    """
    if os.environ.get("DATABRICKS_RUNTIME_VERSION"):
        try:
            _check_on_databricks(sys.argv[1], sys.argv[2:])
        except BaseException as e:
            # A bare traceback may hold a password of an address.
            sys.exit(report(e))
    else:
        entry(["drift", *sys.argv[1:]])


def _check_on_databricks(config: str, overrides: list[str]) -> None:
    from databricks.sdk.runtime import dbutils, is_local_implementation

    from raypipe.cli.app import run_verb
    from raypipe.cli.how import How

    if is_local_implementation:
        raise RuntimeError(
            "DATABRICKS_RUNTIME_VERSION is set, but this is no Databricks runtime: the task "
            "value would be lost"
        )
    result = run_verb("drift", Path(config), overrides, How(json=True))
    for key, value in task_values(result).items():
        dbutils.jobs.taskValues.set(key=key, value=value)


def task_values(result: Mapping[str, Any]) -> dict[str, str]:
    """What a drift check tells the tasks after it. A retrain may be called for without drift."""
    return {name: "true" if result[name] else "false" for name in ("is_drift", "retrain")}
