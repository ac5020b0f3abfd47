"""raypipe drift as a Ray job or a scheduled check:

    ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- \
        python jobs/drift.py jobs/configs/solar.yaml watch.batch.uri=/tables/night --exit-code

On Databricks the answer travels as the task value `is_drift`, on which the job's condition starts
the retrain job: an exit code other than 0 would look like a crash there, and be retried.
"""

import os
import sys
from pathlib import Path

from raypipe.cli.app import run_verb
from raypipe.cli.how import How
from raypipe.main import entry


def check_on_databricks(config: str, overrides: list[str]) -> None:
    from databricks.sdk.runtime import dbutils, is_local_implementation

    if is_local_implementation:
        raise RuntimeError(
            "DATABRICKS_RUNTIME_VERSION is set, but this is no Databricks runtime: the task "
            "value would be lost"
        )
    result = run_verb("drift", Path(config), overrides, How(json=True))
    dbutils.jobs.taskValues.set(key="is_drift", value="true" if result["is_drift"] else "false")


if __name__ == "__main__":
    if os.environ.get("DATABRICKS_RUNTIME_VERSION"):
        check_on_databricks(sys.argv[1], sys.argv[2:])
    else:
        entry(["drift", *sys.argv[1:]])
