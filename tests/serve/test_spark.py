"""Spark: the blocks of docs/serving.md, run on two local workers, say what the package says.

The tables are Parquet instead of Delta, for which Spark needs jars that no test may fetch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.serve.conftest import Registered
from tests.serve.test_same_everywhere import agree

pytestmark = pytest.mark.spark
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pyspark = pytest.importorskip("pyspark.sql", reason="raypipe[spark]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("SPARK_HOME", str(Path(pyspark.__file__).parents[1]))
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.schemaInference": "true",
            "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        }
        builder = pyspark.SparkSession.builder.master("local[2]").appName("raypipe tests")
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        yield session
        session.stop()


def block(start: str) -> str:
    """The code of the page that begins so, on Parquet."""
    (found,) = re.findall(rf"^```python\n({start}.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    return str(found).replace('"delta"', '"parquet"')


def write(images: list[bytes | None], table: Path, first: int = 0) -> None:
    table.mkdir(exist_ok=True)
    ids = pa.array(range(first, first + len(images)), pa.int64())
    rows = pa.table({"image_id": ids, "image": pa.array(images, pa.binary())})
    pq.write_table(rows, table / f"{first}.parquet", row_group_size=50)


def answers(out: Path) -> list[dict[str, Any]]:
    return pq.read_table(out).sort_by("image_id").to_pylist()


def test_spark_udf(spark: Any, registered: Registered, tmp_path: Path) -> None:
    table, out = tmp_path / "table", tmp_path / "out"
    write([*registered.images, b"no image", None], table)
    names = {"spark": spark, "model_uri": str(registered.files)}
    exec(block("import mlflow\n\npredict"), names | {"table": str(table), "out": str(out)})
    *found, broken, missing = answers(out)
    agree(registered, [row["label"] for row in found], [row["scores"] for row in found])
    assert {row["error"] for row in found} == {""}
    assert "not_an_image" in broken["error"] and "missing" in missing["error"]
    for row in (broken, missing):
        assert (row["label"], row["score"], row["scores"]) == ("", None, None)


def test_a_stream_goes_on_where_it_was(spark: Any, registered: Registered, tmp_path: Path) -> None:
    table, out = tmp_path / "table", tmp_path / "out"
    write([*registered.images[:120]], table)
    names = {"__name__": "__main__", "spark": spark, "model_uri": str(registered.files)}
    places = {"table": str(table), "out": str(out), "checkpoint": str(tmp_path / "checkpoint")}
    code = block("from collections.abc import Iterator")
    exec(code, names | places)
    assert len(answers(out)) == 120
    write([*registered.images[120:], b"no image"], table, first=120)
    exec(code, names | places)
    *found, broken = answers(out)
    assert [row["image_id"] for row in found] == list(range(200)), "each row once"
    assert [row["label"] for row in found] == registered.answers.labels
    scores_NC = registered.answers.scores_NC
    assert np.abs(scores_NC.max(1) - [row["score"] for row in found]).max() < 1e-4
    assert [row["top_labels"][0] for row in found] == registered.answers.labels
    assert {len(row["top_labels"]) for row in found} == {2} and "not_an_image" in broken["error"]


def test_the_recipe_loads_once_a_process(
    spark: Any, registered: Registered, tmp_path: Path
) -> None:
    """Twelve tasks on two cores: as many loads as processes."""
    table = tmp_path / "table"
    write(registered.images[:24], table)
    loads = tmp_path / "loads"
    loads.mkdir()
    code = block("from collections.abc import Iterator").partition("spark.conf.set")[0]
    told = f"""
    def counted(uri):
        import os, time
        open({str(loads)!r} + f"/{{os.getpid()}}-{{time.time_ns()}}", "w").close()
        return mlflow.pyfunc.load_model(uri)
"""
    code = code.replace("    # Spark sends", f"{told}\n    # Spark sends", 1)
    code = code.replace("= mlflow.pyfunc.load_model(model_uri)", "= counted(model_uri)")
    names: dict[str, Any] = {"__name__": "__main__", "model_uri": str(registered.files)}
    exec(code, names)
    rows = spark.read.parquet(str(table)).repartition(12)
    assert len(rows.select(names["likeliest"]("image").alias("a")).collect()) == 24
    processes = {path.name.partition("-")[0] for path in loads.iterdir()}
    assert len(list(loads.iterdir())) == len(processes) <= 2
