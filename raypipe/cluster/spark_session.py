"""The Spark application of this process: its active session, or one that is made here.

A session that is made here takes its master from spark-submit or spark-defaults.conf, and ends with
`close`, or with this process. Any other is left as it is.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.errors import ClusterError, one_line

OLDEST_JAVA = 17
_own: list[Any] = []


@dataclass(frozen=True)
class Purpose:
    """What wants Spark, as messages name it."""

    who: str
    setting: str
    """The setting that asked for Spark."""
    instead: str
    """What to set where there is no Spark."""
    alone: str
    """What to set where Spark has no executors, but this machine."""
    fewer: str
    """What to lower where there is too little room."""


def get(purpose: Purpose) -> Any:
    """The active Spark session, else a new one. Raises ClusterError if there can be none."""
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.sql import SparkSession
    except ImportError as e:
        raise ClusterError(
            f"{purpose.setting} needs pyspark: {one_line(e)}",
            fix=f"pip install 'raypipe[spark]', or set {purpose.instead}",
        ) from e
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    # Databricks and spark-submit have started Java already.
    if "PYSPARK_GATEWAY_PORT" not in os.environ and SparkContext._gateway is None:
        require_java()
    is_new = SparkContext._active_spark_context is None
    try:
        # What spark-submit and spark-defaults.conf say wins.
        conf = SparkConf()
        conf.setIfMissing("spark.app.name", "raypipe")
        conf.setIfMissing("spark.ui.enabled", "false")
        conf.setIfMissing("spark.ui.showConsoleProgress", "false")
        session = SparkSession.builder.config(conf=conf).getOrCreate()
    except Exception as e:
        raise ClusterError(
            f"Spark does not start: {one_line(e)}",
            rule="Its master comes from spark-submit, spark-defaults.conf or an active session",
            fix="Make a SparkSession first, or run `spark-submit --master …`",
        ) from e
    if is_new and "DATABRICKS_RUNTIME_VERSION" not in os.environ:
        _own.append(session)
        atexit.register(close)
    return session


def close() -> None:
    """Stop the session that `get` made; nothing happens if it made none."""
    atexit.unregister(close)
    while _own:
        with suppress(Exception):
            _own.pop().stop()


def has_ended(session: Any) -> bool:
    """Has the application of this session ended, or its Java process?"""
    try:
        return bool(session.sparkContext._jsc.sc().isStopped())
    except Exception:
        # Its Java process does not answer.
        return True


def require_java() -> None:
    """Raise ClusterError where there is no Java that Spark takes."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    said = "none"
    if java is not None:
        done = subprocess.run([java, "-version"], capture_output=True, text=True)
        said = one_line(done.stderr, 80)
        found = re.search(r'version "(\d+)', said)
        if found and int(found[1]) >= OLDEST_JAVA:
            return
    raise ClusterError(
        "Spark needs Java",
        got=said,
        rule=f"Java {OLDEST_JAVA} or newer, in JAVA_HOME or on PATH",
        fix=f"Install it (apt install openjdk-{OLDEST_JAVA}-jre-headless) or set JAVA_HOME",
    )
