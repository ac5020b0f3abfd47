"""What a verb made arrives whole, once, without secrets; whatever fails costs one warning."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.artifacts import bundle, outbox, run_log
from raypipe.artifacts.settings import ArtifactsConfig
from raypipe.config import RunConfig, validate
from raypipe.errors import ConfigError, DataError, RaypipeError
from raypipe.tables.objects import Objects

log = logging.getLogger("raypipe")
Sent = Callable[..., None]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Path]:
    """A report, and a package of two files."""
    package = tmp_path / "package"
    (package / "deep").mkdir(parents=True)
    (package / "model.safetensors").write_bytes(os.urandom(100_000))
    (package / "deep" / "card.md").write_text("a card")
    (tmp_path / "report.html").write_text("<p>a report</p>")
    return {"report.html": tmp_path / "report.html", "package": package}


@pytest.fixture
def sent(tmp_path: Path, target: Path, made: dict[str, Path]) -> Sent:
    """`sent(name=…, fails=…, says=…)`: one run of a verb."""

    def once(name: str = "cells", fails: Any = None, says: str = "") -> None:
        run = RunConfig(name=name, dir=str(tmp_path / "run"))
        cfg = ArtifactsConfig(uri=str(target))
        with outbox.sent(run, cfg, "train") as outgoing:
            log.info("epoch 1 of 1%s", says)
            if fails is not None:
                raise fails
            outgoing.key, outgoing.said = "abc123", "val_loss 0.1"
            outgoing.files |= made

    return once


def manifests(target: Path) -> list[dict[str, Any]]:
    """Each manifest below, once its files are compared with what it says of them."""
    found = []
    for file in sorted(target.rglob(bundle.MANIFEST)):
        content = json.loads(file.read_text())
        for name, entry in content["files"].items():
            data = (file.parent / name).read_bytes()
            assert len(data) == entry["bytes"]
            assert hashlib.sha256(data).hexdigest() == entry["sha256"], name
        there = {p.relative_to(file.parent).as_posix() for p in file.parent.rglob("*.*")}
        assert there - {bundle.MANIFEST, "package/deep"} == set(content["files"])
        found.append(content)
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def pending(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "run" / "artifacts" / "pending").iterdir())


def test_what_a_run_made_is_there_with_its_log(sent: Sent, target: Path, tmp_path: Path) -> None:
    sent()
    (found,) = manifests(target)
    assert (target / "cells" / "train-abc123" / "manifest.json").exists()
    assert found["facts"] == {"run": "cells", "verb": "train", "status": "finished"}
    names = set(found["files"])
    logs = {name for name in names if name.startswith("logs/")}
    assert names - logs == {"report.html", "package/model.safetensors", "package/deep/card.md"}
    (name,) = logs
    text = (target / "cells" / "train-abc123" / name).read_text()
    assert "epoch 1 of 1\n" in text and "val_loss 0.1" in text
    assert pending(tmp_path) == []


def test_how_fast_files_went_is_told(tmp_path: Path, made: dict[str, Path]) -> None:
    """A search plans with that when it copies its model the next time."""
    store, files = Objects(str(tmp_path / "bucket"), None), bundle.expanded(made)
    told: list[tuple[float, float]] = []
    for _ in range(2):
        bundle.upload(store, "cells/k", files, {}, lambda *one: told.append(one))
    (mb, seconds), again = told
    assert mb == 0.1 and seconds > 0 and again[0] == 0, "what is there is not sent"


def test_many_small_files_say_nothing_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a third of a second for an answer, the pages of one drift check took the rate of a line
    of 10 MB a second to a thirtieth, and the next search kept minutes for its upload."""
    (tmp_path / "pages").mkdir()
    sizes = {f"{number}.html": 20_000 for number in range(60)} | {"weights": 2_000_000}
    for name, size in sizes.items():
        (tmp_path / "pages" / name).write_bytes(bytes(size))
    now = [0.0]
    store, write = Objects(str(tmp_path / "bucket"), None), Objects.write

    def slow(self: Objects, name: str, content: Any) -> None:
        write(self, name, content)
        now[0] += 0.3 + sizes.get(Path(name).name, 0) / 10e6

    monkeypatch.setattr(Objects, "write", slow)
    monkeypatch.setattr(bundle, "time", SimpleNamespace(monotonic=lambda: now[0]))
    told: list[tuple[float, float]] = []
    files = bundle.expanded({"pages": tmp_path / "pages"})
    bundle.upload(store, "p", files, {}, lambda *one: told.append(one))
    assert told[0] == (2.0, pytest.approx(0.5))


def test_a_rerun_sends_its_log_alone(
    sent: Sent, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent()
    wrote: list[str] = []
    write = Objects.write

    def noted(self: Objects, name: str, content: Any) -> None:
        wrote.append(name)
        write(self, name, content)

    monkeypatch.setattr(Objects, "write", noted)
    sent()
    (found,) = manifests(target)
    assert len(wrote) == 2 and "/logs/" in wrote[0] and wrote[1].endswith(bundle.MANIFEST)
    assert sum(name.startswith("logs/") for name in found["files"]) == 2


def test_a_failed_run_sends_its_log_with_the_reason(sent: Sent, target: Path) -> None:
    with pytest.raises(RaypipeError, match="Training diverged"):
        sent(fails=RaypipeError("Training diverged", fix="Lower train.lr"))
    (found,) = manifests(target)
    assert found["facts"]["status"] == "failed" and len(found["files"]) == 1
    (text,) = (p.read_text() for p in target.rglob("*.log"))
    assert "Failed: Training diverged. Lower train.lr." in text and "Traceback" not in text
    # A mistake of raypipe's has its traceback.
    with pytest.raises(ZeroDivisionError):
        sent(fails=ZeroDivisionError("ours"))
    assert any("Traceback" in p.read_text() for p in target.rglob("*.log"))


def test_a_store_that_is_down_costs_one_warning_and_a_later_run_sends_all(
    sent: Sent, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target.write_text("a file where the bucket should be")
    sent()
    (warning,) = warnings(caplog)
    assert "were not sent to artifacts.uri" in warning and "The same command" in warning
    with pytest.raises(RaypipeError, match="again"):
        sent(fails=RaypipeError("It failed again"))
    assert len(warnings(caplog)) == 2 and len(pending(tmp_path)) >= 2
    target.unlink()
    sent(says=", at last")
    assert {found["facts"]["status"] for found in manifests(target)} == {"finished", "failed"}
    assert pending(tmp_path) == []


def test_a_store_that_dies_midway_shows_nothing_until_all_is_there(
    sent: Sent, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = Objects.write, [2]

    def dies(self: Objects, name: str, content: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise DataError("the store is gone")
        write(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "write", dies)
        sent()
    assert left[0] < 0 and len(list(target.rglob("*.*"))) >= 2, "the fault came before any file"
    assert manifests(target) == [] and pending(tmp_path)
    sent()
    assert len(manifests(target)) == 1 and pending(tmp_path) == []


def test_a_report_that_is_drawn_again_has_no_manifest_meanwhile(
    sent: Sent, target: Path, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent()
    made["report.html"].write_text("<p>another report</p>")
    seen: list[bool] = []
    write = Objects.write

    def watched(self: Objects, name: str, content: Any) -> None:
        seen.append(bool(list(target.rglob(bundle.MANIFEST))))
        write(self, name, content)

    monkeypatch.setattr(Objects, "write", watched)
    sent()
    assert seen and not any(seen), "a reader would have found a manifest of other files"
    (_,) = manifests(target)
    assert "another report" in next(target.rglob("report.html")).read_text()


def test_no_secret_is_in_anything_that_is_sent(
    sent: Sent, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = "canary-7f3a9b2c1d"
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", canary)
    sent(says=f" with {canary} at https://someone:{canary}@host/x")
    with pytest.raises(RuntimeError):
        sent(fails=RuntimeError(f"refused: {canary}"))
    files = [p for p in target.rglob("*") if p.is_file()]
    assert any(b"***" in p.read_bytes() for p in files)
    assert not any(canary.encode() in p.read_bytes() for p in files)


@pytest.mark.parametrize("name", ["../../out", "a b/ü?#%2e", ".", "..", "x" * 300, "CON:1"])
def test_odd_names_stay_below_the_uri(name: str, sent: Sent, target: Path, tmp_path: Path) -> None:
    sent(name=name)
    assert len(manifests(target)) == 1
    (below,) = target.iterdir()
    assert below.is_dir() and len(below.name) < 100
    assert {p.name for p in tmp_path.iterdir()} == {"bucket", "run", "package", "report.html"}
    assert bundle.segment(name) != bundle.segment(name + "_") != "ok" == bundle.segment("ok")


def test_a_huge_log_ends(sent: Sent, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MOST_BYTES", 5000)
    sent(says="\n".join("x" * 100 for _ in range(30)))
    sent(says="y" * 100_000)
    texts = [p.read_text() for p in target.rglob("*.log")]
    assert len(texts) == 2
    for text in texts:
        assert len(text) < 6000 and ("xxx" in text or "The log ends here" in text)


KILLED = """
import os, signal, sys, logging
logging.getLogger("raypipe").setLevel(logging.INFO)
from raypipe.artifacts import outbox
from raypipe.artifacts.settings import ArtifactsConfig
from raypipe.config import RunConfig
run, cfg = RunConfig(name="cells", dir=sys.argv[1]), ArtifactsConfig(uri=sys.argv[2])
with outbox.sent(run, cfg, "train"):
    logging.getLogger("raypipe").info("about to die")
    if sys.argv[3] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_the_log_of_a_killed_run_is_sent_by_the_next_and_not_that_of_a_living_one(
    sent: Sent, target: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(target)]
    killed = subprocess.run([*command, "die"], timeout=60)
    assert killed.returncode == -signal.SIGKILL and manifests(target) == []
    living = subprocess.Popen(
        [*command, "live"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert living.stdin and living.stdout and living.stdout.readline() == "ready\n"
    try:
        sent()
        found = manifests(target)
        assert sorted(f["facts"]["status"] for f in found) == ["finished", "unfinished"]
        assert len(pending(tmp_path)) == 2, "the record and the lock of the run that lives"
        assert any("about to die" in p.read_text() for p in target.rglob("*.log"))
    finally:
        living.stdin.write("\n")
        living.stdin.close()
        assert living.wait(30) == 0
    assert len(manifests(target)) == 3 and pending(tmp_path) == []


def test_two_runs_at_once_leave_a_whole_bundle(tmp_path: Path, made: dict[str, Path]) -> None:
    store = Objects(str(tmp_path / "bucket"), None)
    facts = {"run": "cells", "verb": "train", "status": "finished"}
    files = bundle.expanded(made)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(bundle.upload, store, "cells/k", files, facts) for _ in range(8)]:
            done.result()
    (found,) = manifests(tmp_path / "bucket")
    assert len(found["files"]) == 3 and not list((tmp_path / "bucket").rglob("*.partial"))


def test_a_torn_record_is_left_alone(sent: Sent, target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "artifacts" / "pending"
    folder.mkdir(parents=True)
    (folder / "torn.json").write_text('{"format": 1, "uri"')
    sent()
    assert len(manifests(target)) == 1


def test_without_room_for_a_log_the_run_goes_on(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "artifacts").write_text("a file in the way")
    ran = False
    with outbox.sent(
        RunConfig(dir=str(tmp_path / "run")), ArtifactsConfig(uri=str(target)), "train"
    ):
        ran = True
    (warning,) = warnings(caplog)
    assert ran and "No log is kept" in warning


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"uri": "ftp://host/x"}, "ftp:// is no object store"),
        ({"uri": " "}, "uri is empty"),
        ({"uri": "s3://key:secretsecret@bucket/x"}, "credential"),
        ({"uri": "s3://b/x", "storage_options": {"AWS_ENDPOINT_ULR": "x"}}, "AWS_ENDPOINT_ULR"),
    ],
)
def test_a_wrong_place_is_refused_before_the_run(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        validate(ArtifactsConfig, given)
