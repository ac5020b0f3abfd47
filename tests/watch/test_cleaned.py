"""A retrain that cleans first, killed at each step: one cycle, one cleaning, the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raypipe.config import validate
from raypipe.errors import RaypipeError
from raypipe.feed.dataset import Pinned, pin
from raypipe.registry.versions import ModelVersion
from raypipe.search.settings import SearchConfig
from raypipe.tables import clean as cleaning
from raypipe.tables import rewrite, scan
from raypipe.tables.changes import Place
from raypipe.tables.clean import CleanResult
from raypipe.tables.table import ImageTable, TableConfig, append
from raypipe.train.job import TrainJob
from raypipe.watch import retrain
from raypipe.watch.cycle import Held, Journal, hold
from raypipe.watch.decide import GateConfig
from raypipe.watch.retrain import RetrainConfigs
from raypipe.watch.settings import WatchConfig

CHAMPION = ModelVersion("m", 1, "models:/m/1", {})


class Killed(BaseException):
    """The process ends here."""


class Engine:
    """Stands for fastdup: it drops the first row, by a real commit, and may be away or killed."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.away = False
        self.killed = ""

    def __call__(self, source: TableConfig, cfg: Any) -> CleanResult:
        self.calls.append(int(source.version or 0))
        if self.away:
            raise RaypipeError("fastdup cannot start")
        if self.killed == "before":
            raise Killed
        table = ImageTable.open(source)
        raw = table.pin(source.version)
        [first, *_] = scan.plan(table, raw, {})[0]
        clean = rewrite.drop(table, raw, [Place(first.path, 0)], f"clean p of v{raw.version}")
        if self.killed == "after":
            raise Killed
        return CleanResult(raw, clean, "p", 10, 1, {})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = Engine()
    monkeypatch.setattr(cleaning, "clean", fake)
    return fake


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    given = {"table": {"uri": str(tmp_path / "t")}, "run": {"dir": str(tmp_path / "run")}}
    columns = {"image_id": [f"i{n}" for n in range(10)], "image": [b"x"] * 10}
    columns |= {"label": ["a", "b"] * 5, "split": ["train"] * 6 + ["val"] * 2 + ["test"] * 2}
    append(given["table"]["uri"], pa.table(columns), "add")
    return validate(TrainJob, given)


def configs(clean: str) -> RetrainConfigs:
    watch = validate(WatchConfig, {"clean": clean})
    return RetrainConfigs(SearchConfig(), watch, GateConfig())


def run(job: TrainJob, cfg: RetrainConfigs, said: list[str]) -> tuple[str, Pinned]:
    """As `retrain` does it: the name of the cycle, and the rows to train on."""
    past = Journal(cfg.watch.place(job.run, "retrains"), "m@champion", None)
    pinned = pin(job.table, job.feed)
    key = retrain._key(job, cfg, CHAMPION, pinned)
    cycle = retrain._cycle(past, key, retrain._asked(job, cfg, CHAMPION), pinned)
    with hold(past, cycle) as held:
        assert isinstance(held, Held)
        return cycle, retrain._cleaned(job, cfg, CHAMPION, pinned, held, said.append)


def cycles(job: TrainJob, cfg: RetrainConfigs) -> set[str]:
    past = Journal(cfg.watch.place(job.run, "retrains"), "m@champion", None)
    return {event.cycle for event in past.events}


@pytest.mark.parametrize("killed", ["before", "after", ""])
def test_killed_at_each_step_it_stays_one_cycle_with_the_same_rows(
    job: TrainJob, engine: Engine, killed: str
) -> None:
    cfg, said = configs("stop"), list[str]()
    engine.killed = killed
    if killed:
        with pytest.raises(Killed):
            run(job, cfg, said)
        assert ImageTable.open(job.table).pin().version == (1 if killed == "after" else 0)
    engine.killed = ""
    first, pinned = run(job, cfg, said)
    again, rows = run(job, cfg, said)
    assert first == again and cycles(job, cfg) == {first}
    assert pinned.version == rows.version and sum(rows.counts.values()) == 9
    assert ImageTable.open(job.table).pin().version == 1, "cleaned once"
    # A third run takes what was cleaned, and asks the engine no more.
    assert engine.calls == [0] * (2 if killed else 1)


def test_another_cleaning_is_no_part_of_this_retrain(job: TrainJob, engine: Engine) -> None:
    """Somebody else's rows came after the kill: that is another table, and another retrain."""
    cfg, said = configs("stop"), list[str]()
    engine.killed = "after"
    with pytest.raises(Killed):
        run(job, cfg, said)
    engine.killed = ""
    other = configs("go_on")
    assert run(job, other, said)[0] not in cycles(job, configs("stop")) - cycles(job, other)
    columns = {"image_id": ["n"], "image": [b"y"], "label": ["a"], "split": ["train"]}
    append(job.table.uri, pa.table(columns), "add")
    first, _ = run(job, cfg, said)
    assert len(cycles(job, cfg)) == 3 and first in cycles(job, cfg)


def test_where_it_cannot_start_stop_stops_and_go_on_stays_with_what_it_said(
    job: TrainJob, engine: Engine
) -> None:
    engine.away = True
    said: list[str] = []
    with pytest.raises(RaypipeError, match="fastdup cannot start"):
        run(job, configs("stop"), said)
    first, pinned = run(job, configs("go_on"), said)
    assert "going on with what ingest has checked" in said[-1] and pinned.version.version == 0
    # The engine is back: this retrain has its rows already, and has perhaps trained on them.
    engine.away = False
    calls = len(engine.calls)
    again, rows = run(job, configs("go_on"), said)
    assert (again, rows.version) == (first, pinned.version) and len(engine.calls) == calls
    assert "Not cleaned" in said[-1]
    # `stop` begins where it stopped.
    _, rows = run(job, configs("stop"), said)
    assert rows.version.version == 1
