"""A stream predicts each row once: while it runs, after a stop or a kill, and beside another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raypipe.config import RunConfig
from raypipe.errors import ConfigError, DataError
from raypipe.registry import promote
from raypipe.serve import batch, stream
from raypipe.serve.batch import Calls, PredictConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, append
from tests.conftest import Cli
from tests.serve.conftest import Registered

pytestmark = pytest.mark.usefixtures("ray_session")
ROOT = Path(__file__).parents[2]


def add(uri: Path, images: list[bytes], first: int) -> None:
    ids = [f"i{n}" for n in range(first, first + len(images))]
    columns = {"image_id": ids, "image": pa.array(images, pa.binary())}
    append(str(uri), pa.table(columns), "add")


def rows_of(out: Path, *columns: str) -> list[dict[str, Any]]:
    table = ImageTable(str(out))
    return scan.rows(table, table.pin(), ["image_id", *columns]).to_pylist()


def wait_for(reached: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.1)


def count(out: Path) -> int:
    return len(rows_of(out)) if ImageTable.exists(str(out)) else 0


def started(registered: Registered, folder: Path, **cfg: Any) -> tuple[Any, ...]:
    """The arguments of stream.follow."""
    settings = {"out": str(folder / "out"), "follow": "always", "latency_s": 1} | cfg
    run = RunConfig(name="mixed", dir=str(folder))
    source = TableConfig(uri=str(folder / "t"))
    return registered.store, run, source, PredictConfig(**settings)


def test_a_stream_follows_and_its_rows_are_those_of_a_batch(
    registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    images = registered.images
    add(tmp_path / "t", images[:20], 0)
    given = started(registered, tmp_path)
    found: list[stream.StreamResult] = []
    # Not the main thread: signals cannot stop it, so its event is ours.
    monkeypatch.setattr(stream, "stopping", lambda: nullcontext(stop))
    worker = threading.Thread(target=lambda: found.append(stream.follow(*given, Calls())))
    worker.start()
    out = tmp_path / "out"
    wait_for(lambda: count(out) == 20)
    for start in (20, 30, 40):
        add(tmp_path / "t", images[start : start + 10], start)
    began = time.monotonic()
    wait_for(lambda: count(out) == 50)
    assert time.monotonic() - began < 20
    stop.set()
    worker.join(60)
    assert (found[0].version, found[0].rows) == (3, 50) and found[0].micro_batches >= 2

    # The same rows as one batch; it finds them, and predicts nothing.
    store, run, source, cfg = given
    done = batch.predict(store, run, source, cfg)
    assert (done.made, done.images) == (0, 50)
    columns = ["image_id", "sha256", "label", "scores", "error", "width", "brightness"]
    other = batch.predict(store, run, source, PredictConfig(out=str(tmp_path / "other")))
    assert other.made == 50

    def sorted_rows(one: batch.PredictResult) -> pa.Table:
        return batch.read_rows(one.out.uri, one.key, columns).sort_by("image_id")

    assert sorted_rows(done).equals(sorted_rows(other))


def test_once_ends_and_goes_on_where_it_was(registered: Registered, tmp_path: Path) -> None:
    given = started(registered, tmp_path, follow="once")
    empty = {"image_id": pa.array([], pa.string()), "image": pa.array([], pa.binary())}
    append(str(tmp_path / "t"), pa.table(empty), "nothing yet")
    done = stream.follow(*given, Calls())
    assert (done.rows, done.micro_batches, done.version) == (0, 0, None)
    add(tmp_path / "t", registered.images[:10], 0)
    done = stream.follow(*given, Calls())
    assert (done.rows, done.version, done.model) == (10, 1, str(registered.version))
    done = stream.follow(*given, Calls())
    assert (done.rows, done.version) == (0, 1)
    assert Counter(row["image_id"] for row in rows_of(tmp_path / "out")) == Counter(
        f"i{n}" for n in range(10)
    )


def test_the_commands_of_the_page(registered: Registered, tmp_path: Path, cli: Cli) -> None:
    table, out = tmp_path / "t", tmp_path / "out"
    add(table, registered.images[:10], 0)
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"table: {{uri: {table}}}\n"
        f"run: {{name: mixed, dir: {registered.files.parent / 'run'}}}\n"
        f"predict: {{out: {out}}}\n"
    )

    def predicted(*arguments: str) -> dict[str, Any]:
        code, said, error = cli("predict", config, *arguments, "--json")
        assert code == 0, error
        summary: dict[str, Any] = json.loads(said.splitlines()[-1])
        return summary

    assert predicted("predict.table.uri=" + str(table))["images"] == 10
    add(table, registered.images[10:15], 10)
    more = predicted("predict.since=last")
    assert (more["images"], more["made"], more["since"]) == (15, 5, 0)
    add(table, registered.images[15:18], 15)
    once = predicted("--once")
    assert (once["rows"], once["version"], once["micro_batches"]) == (3, 2, 1)
    assert count(out) == 18
    code, _, error = cli("predict", config, "--follow", "table.version=1")
    assert code == 2 and "follows the newest version" in error and count(out) == 18


def test_a_begun_micro_batch_is_finished_before_the_next(
    registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raypipe.serve import pieces

    monkeypatch.setattr(pieces, "PIECE_ROWS", 5)
    for start in range(0, 20, 5):
        add(tmp_path / "t", registered.images[start : start + 5], start)
    store, run, source, cfg = started(registered, tmp_path, follow="once")
    asked = iter([False] * 2)
    calls = Calls(stop=lambda: next(asked, True))
    with pytest.raises(batch.Stopped):
        batch.predict(store, run, source, cfg, calls=calls)
    begun = count(tmp_path / "out")
    assert 0 < begun < 20
    add(tmp_path / "t", registered.images[20:25], 20)
    done = stream.follow(store, run, source, cfg, Calls())
    assert (done.rows, done.version) == (25 - begun, 4)
    names = [row["image_id"] for row in rows_of(tmp_path / "out")]
    assert len(names) == len(set(names)) == 25


def test_a_new_champion_begins_a_line_of_its_own(registered: Registered, tmp_path: Path) -> None:
    add(tmp_path / "t", registered.images[:10], 0)
    given = started(registered, tmp_path, follow="once")
    stream.follow(*given, Calls())
    store = registered.store
    again = registered.another("again")
    promote.promote(store, again, expected=registered.version.version)
    try:
        done = stream.follow(*given, Calls())
        assert (done.rows, done.model) == (10, str(again))
    finally:
        promote.promote(store, registered.version, expected=again.version)
    models = Counter(row["model"] for row in rows_of(tmp_path / "out", "model"))
    assert models == {str(registered.version): 10, str(again): 10}


def test_a_table_that_is_away_for_a_while_or_made_again_does_not_end_a_stream(
    registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    monkeypatch.setattr(stream, "stopping", lambda: nullcontext(stop))
    monkeypatch.setattr(stream, "MOST_RETRY_S", 0.2)
    said: list[str] = []
    table, out = tmp_path / "t", tmp_path / "out"
    add(table, registered.images[:10], 0)
    given = started(registered, tmp_path)
    found: list[stream.StreamResult] = []
    calls = Calls(say=said.append)
    worker = threading.Thread(target=lambda: found.append(stream.follow(*given, calls)))
    worker.start()
    wait_for(lambda: count(out) == 10)
    table.rename(tmp_path / "away")
    wait_for(lambda: len(said) == 1)
    time.sleep(1)
    # Another table at the same address, with as many versions.
    add(table, registered.images[10:15], 10)
    wait_for(lambda: count(out) == 15)
    wait_for(lambda: len(said) == 2)
    stop.set()
    worker.join(60)
    assert "waits, and tries again: " in said[0] and "goes on" in said[1]
    assert (found[0].rows, found[0].version) == (15, 0)


def test_a_stream_needs_the_newest_version(registered: Registered, tmp_path: Path) -> None:
    store, run, source, cfg = started(registered, tmp_path)
    with pytest.raises(ConfigError, match=r"follows the newest version.*version=1"):
        stream.follow(store, run, source.model_copy(update={"version": 1}), cfg, Calls())
    with pytest.raises(DataError, match="No Delta table here"):
        stream.follow(store, run, source, cfg, Calls())
    assert not (tmp_path / "out").exists()


def test_signals_stop_it_and_the_second_interrupt_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stream.stopping() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is before


STORM = """
import os, signal
from raypipe.serve.signals import stopping

with stopping() as stop:
    sender = os.fork()
    if not sender:
        for _ in range(50_000):
            os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    while os.waitpid(sender, os.WNOHANG) == (0, 0):
        stop.wait(0.001)
print("ended")
"""


def test_many_signals_at_once_do_not_lock_it_up() -> None:
    """`timeout`, a shell and a supervisor may all send theirs in the same moment."""
    done = subprocess.run(
        [sys.executable, "-c", STORM], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout == "ended\n", done.stderr


FOLLOWS = """
import os, signal, sys
from raypipe.cluster.connect import ClusterConfig, connect
from raypipe.config import RunConfig
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve import commits, pieces, stream, workers
from raypipe.serve.batch import Calls, PredictConfig
from raypipe.tables import parts
from raypipe.tables.table import TableConfig

folder, registry, point, turn, follow = sys.argv[1:]
pieces.PIECE_ROWS = commits.COMMIT_ROWS = 20
workers.MOST_PIECES = 1
count = 0

def after(function):
    def counted(*given, **more):
        global count
        count += 1
        if count == int(turn) and point != "committed":
            os.kill(os.getpid(), signal.SIGKILL)
        done = function(*given, **more)
        if count == int(turn):
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return counted

if point == "predicting":
    commits.whole = after(commits.whole)
elif point in ("committing", "committed"):
    parts.append_once = after(parts.append_once)
connect(ClusterConfig(address="auto"))
store = open_store(RunConfig(name="mixed", dir=registry), RegistryConfig())
cfg = PredictConfig(out=folder + "/out", follow=follow, latency_s=1)
run = RunConfig(name="mixed", dir=folder)
done = stream.follow(store, run, TableConfig(uri=folder + "/t"), cfg, Calls())
print("ended", done.version, flush=True)
"""


def command(registered: Registered, folder: Path, point: str, turn: int, follow: str) -> list[str]:
    registry = str(registered.files.parent / "run")
    return [sys.executable, "-c", FOLLOWS, str(folder), registry, point, str(turn), follow]


def run_it(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=200, cwd=ROOT)


@pytest.mark.chaos
@pytest.mark.parametrize("point", ["predicting", "committing", "committed"])
def test_sigkill_at_any_point_and_the_stream_again_every_row_once(
    point: str, registered: Registered, tmp_path: Path
) -> None:
    for start in range(0, 60, 10):
        add(tmp_path / "t", registered.images[start : start + 10], start)
    # The first commit of a micro-batch has no rows: it says what is begun.
    first = 0 if point == "predicting" else 1
    ended = run_it(command(registered, tmp_path, point, 2 + first, "once"))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert count(tmp_path / "out") == (40 if point == "committed" else 20)
    # Other versions come before it is started again, and it is killed in the second micro-batch.
    for start in range(60, 120, 10):
        add(tmp_path / "t", registered.images[start : start + 10], start)
    ended = run_it(command(registered, tmp_path, point, 4 + first, "once"))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert 60 < count(tmp_path / "out") <= 120
    again = run_it(command(registered, tmp_path, "none", 0, "once"))
    assert again.returncode == 0, again.stderr
    names = [row["image_id"] for row in rows_of(tmp_path / "out")]
    assert len(names) == len(set(names)) == 120


@pytest.mark.chaos
def test_two_streams_at_once_keep_every_row_once(registered: Registered, tmp_path: Path) -> None:
    for start in range(0, 60, 10):
        add(tmp_path / "t", registered.images[start : start + 10], start)
    arguments = command(registered, tmp_path, "none", 0, "always")
    both = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        wait_for(lambda: count(tmp_path / "out") >= 20, 120)
        for start in range(60, 120, 10):
            add(tmp_path / "t", registered.images[start : start + 10], start)
        wait_for(lambda: count(tmp_path / "out") >= 120, 120)
        # SIGTERM: both end with 0.
        for one in both:
            one.send_signal(signal.SIGTERM)
        for one in both:
            out, err = one.communicate(timeout=60)
            assert one.returncode == 0 and "ended" in out, err
    finally:
        for one in both:
            one.kill()
    again = run_it(command(registered, tmp_path, "none", 0, "once"))
    assert again.returncode == 0, again.stderr
    names = [row["image_id"] for row in rows_of(tmp_path / "out")]
    assert len(names) == len(set(names)) == 120
