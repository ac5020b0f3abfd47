"""Verbs with `artifacts.uri`: their log arrives, also of one that fails, and no secret with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..conftest import Cli


def bundles(target: Path) -> list[tuple[dict[str, str], str]]:
    """(facts, text of the logs) of each bundle."""
    found = []
    for manifest in sorted(target.rglob("manifest.json")):
        texts = [p.read_text() for p in sorted(manifest.parent.glob("logs/*.log"))]
        found.append((json.loads(manifest.read_text())["facts"], "".join(texts)))
    return found


def test_an_ingest_and_a_failed_training(
    cli: Cli, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = "canary-0f1e2d3c4b"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", canary)
    target, config = tmp_path / "bucket", tmp_path / "a.yaml"
    config.write_text(
        f"table: {{uri: {tmp_path / 'table'}}}\nrun: {{name: cells, dir: {tmp_path / 'run'}}}\n"
        f"artifacts: {{uri: {target}}}\n"
        f"ingest: {{from: {{images: {photos}, labels: {photos / 'labels.csv'}}}, workers: 0}}\n"
    )
    code, _, err = cli("train", config, "cluster.address=none", f"run.name={canary}")
    assert code == 2 and "No Delta table here" in err
    code, _, err = cli("ingest", config)
    assert code == 0 and "Artifacts: " in err, err
    failed, ingested = sorted(bundles(target), key=lambda b: b[0]["verb"], reverse=True)
    assert failed[0]["verb"] == "train" and failed[0]["status"] == "failed"
    assert "No Delta table here" in failed[1]
    assert ingested[0] == {"run": "cells", "verb": "ingest", "status": "finished"}
    assert "accepted" in ingested[1] and "60" in ingested[1]
    files = [p for p in target.rglob("*") if p.is_file()]
    assert not any(canary in p.read_text(errors="replace") for p in files if p.suffix == ".log")


def test_without_a_uri_nothing_is_kept(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(f"table: {{uri: {tmp_path / 'none'}}}\nrun: {{dir: {tmp_path / 'run'}}}\n")
    code, _, _ = cli("train", config, "cluster.address=none")
    assert code == 2 and not (tmp_path / "run" / "artifacts").exists()


def test_a_dry_run_of_an_ingest_sends_nothing(cli: Cli, photos: Path, tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(
        f"table: {{uri: {tmp_path / 'table'}}}\nrun: {{dir: {tmp_path / 'run'}}}\n"
        f"artifacts: {{uri: {tmp_path / 'bucket'}}}\n"
        f"ingest: {{from: {{images: {photos}, labels: {photos / 'labels.csv'}}}}}\n"
    )
    code, _, err = cli("ingest", config, "--dry-run")
    assert code == 0, err
    assert not (tmp_path / "bucket").exists() and not (tmp_path / "run").exists()


def test_a_place_in_the_table_is_refused(cli: Cli, tmp_path: Path) -> None:
    config, table = tmp_path / "a.yaml", tmp_path / "table"
    config.write_text(f"table: {{uri: {table}}}\nrun: {{dir: {tmp_path / 'run'}}}\n")
    for uri in (table, f"file://{table}/deep", f"{table}/"):
        code, _, err = cli("train", config, "cluster.address=none", f"artifacts.uri={uri}")
        assert code == 2 and "artifacts.uri lies in the folder of the table" in err
    code, _, err = cli("train", config, "cluster.address=none", f"artifacts.uri={table}-copies")
    assert code == 2 and "No Delta table here" in err
