"""`artifacts.uri` on real servers: S3 (moto) and Azure Blob (Azurite)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts import bundle, outbox
from raypipe.artifacts.settings import ArtifactsConfig
from raypipe.config import RunConfig, dump
from raypipe.stores import CHUNK
from raypipe.tables.objects import Objects

from .conftest import Store, relayed

pytestmark = pytest.mark.cloud
log = logging.getLogger("raypipe")


@dataclass
class Case:
    """A run's folder with a package that takes several parts to send, and an address."""

    run: RunConfig
    files: dict[str, Path]
    uri: str
    options: dict[str, str]

    def send(self, **options: str) -> None:
        cfg = ArtifactsConfig(uri=self.uri, storage_options={**self.options, **options})
        with outbox.sent(self.run, cfg, "train") as outgoing:
            log.warning("a line")
            outgoing.key = "abc"
            outgoing.files |= self.files

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, once every file is as it says; None if there is none."""
        store = Objects(self.uri, self.options)
        place = "c_lls-" + hashlib.sha256("cälls".encode()).hexdigest()[:6] + "/train-abc"
        content = store.read(f"{place}/{bundle.MANIFEST}")
        if content is None:
            return None
        found = json.loads(content)
        for name, entry in found["files"].items():
            data = store.read(f"{place}/{name}")
            assert data is not None and hashlib.sha256(data).hexdigest() == entry["sha256"], name
        return dict(found)

    def pending(self) -> list[str]:
        return [p.name for p in (self.run.path / "artifacts" / "pending").glob("*.json")]


@pytest.fixture
def case(store: Store, tmp_path: Path) -> Case:
    package = tmp_path / "package"
    package.mkdir()
    (package / "model.safetensors").write_bytes(os.urandom(2 * CHUNK + 5))
    (package / "empty").touch()
    (package / "ü #1?.md").write_text("odd")
    run = RunConfig(name="cälls", dir=str(tmp_path / "run"))
    return Case(run, {"package": package}, store.uri("artifacts"), store.options)


def test_a_bundle_arrives_whole_and_a_rerun_adds_its_log(case: Case) -> None:
    case.send()
    first = case.manifest()
    assert first is not None and len(first["files"]) == 4 and not case.pending()
    case.send()
    second = case.manifest()
    assert second is not None and len(second["files"]) == 5
    (case.files["package"] / "empty").write_text("no more")
    case.send()
    third = case.manifest()
    assert third is not None and third["files"]["package/empty"]["bytes"] == 7


def test_wrong_credentials_are_one_warning_without_them(
    case: Case, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Azurite checks signatures; moto does not, and takes any key."""
    if store.root.startswith("s3"):
        pytest.skip("moto takes any key")
    wrong = "d3Jvbmcgd3Jvbmcgd3Jvbmcgd3Jvbmc="
    case.send(azure_storage_account_key=wrong)
    said = [r.getMessage() for r in caplog.records if "were not sent" in r.getMessage()]
    assert len(said) == 1 and "refuses the credentials" in said[0]
    assert wrong not in caplog.text and case.pending()
    cfg = ArtifactsConfig(uri=case.uri, storage_options=case.options)
    assert store.secret not in dump(cfg) and store.endpoint_option in dump(cfg)


def test_a_store_that_dies_midway(
    case: Case, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay to the store is ended after two files: the run neither fails nor hangs."""
    endpoint = store.options[store.endpoint_option]
    address, _, path = endpoint.partition("://")[2].partition("/")
    quick = {"max_retries": "1", "retry_timeout": "4s", "connect_timeout": "2s"}
    write, sent = Objects.write, list[str]()
    with ExitStack() as relay, pytest.MonkeyPatch.context() as patch:
        through, _ = relay.enter_context(relayed(f"http://{address}", tmp_path))

        def until_two(self: Objects, name: str, content: Any) -> None:
            if len(sent) == 2:
                relay.close()
            sent.append(name)
            write(self, name, content)

        patch.setattr(Objects, "write", until_two)
        began = time.monotonic()
        case.send(**quick, **{store.endpoint_option: f"{through}/{path}".rstrip("/")})
    assert len(sent) == 3 and time.monotonic() - began < 60
    assert "cannot be reached" in caplog.text and "artifacts.storage_options" in caplog.text
    assert case.manifest() is None and case.pending()
    case.send()
    assert case.manifest() is not None and not case.pending()
