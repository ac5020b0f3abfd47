"""Result tables of a run as Spark sees them: raypipe's export to Parquet, registered as views.

Spark reads Delta only with jars that no test may fetch. What a query sees is the same: the names,
types and rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raypipe.tables import export
from raypipe.tables.table import ImageTable
from tests.local_spark import require_spark

SQL = Path(__file__).parents[2] / "infra" / "databricks" / "sql"


@contextmanager
def session(warehouse: Path, time_zone: str = "UTC") -> Iterator[Any]:
    """A Spark of one core on this machine, with the rules of Databricks SQL (ANSI)."""
    pyspark = require_spark()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("SPARK_HOME", str(Path(pyspark.__file__).parent))
        patch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.ansi.enabled": "true",
            "spark.sql.session.timeZone": time_zone,
            "spark.sql.warehouse.dir": str(warehouse),
        }
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master("local[1]").appName("raypipe tests")
        for name, value in settings.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        try:
            yield spark
        finally:
            spark.stop()


def view(spark: Any, table: Path, folder: Path, name: str | None = None) -> str:
    """A Delta table of raypipe's, exported to Parquet and registered; returns the view's name."""
    name = name or table.name
    opened = ImageTable(str(table))
    out = folder / f"{name}-{os.urandom(4).hex()}.parquet"
    export.export(opened, opened.pin(), out)
    spark.read.parquet(str(out)).createOrReplaceTempView(name)
    return name


def rows(spark: Any, query: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of QUERY.sql. given: its parameters; they are texts, as on a dashboard."""
    text = (SQL / f"{query}.sql").read_text("utf-8")
    found = spark.sql(text, args={name: str(value) for name, value in given.items()})
    return [row.asDict(recursive=True) for row in found.collect()]
