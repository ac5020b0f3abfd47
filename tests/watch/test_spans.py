"""Several checks tested together: which images, at which level, and what a rerun may not count."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raypipe.config import RunConfig, validate
from raypipe.errors import ConfigError, DataError, Unreachable
from raypipe.registry import packing, promote, runs, versions
from raypipe.registry.package import Reference
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve.batch import PredictConfig
from raypipe.tables.table import TableConfig, TableVersion, append
from raypipe.watch import check, promise, records, spans
from raypipe.watch.check import CheckResult
from raypipe.watch.detect import DriftConfig, DriftReport, detect
from raypipe.watch.predicted import Batch
from raypipe.watch.settings import WatchConfig
from raypipe.watch.window_log import Entry
from tests.serve.conftest import CFG, CLASSES, Registered, registered

__all__ = ["registered"]  # the fixture
AT = datetime(2026, 11, 25, tzinfo=UTC)


def entry(number: int, window: int, event: str = "checked") -> Entry:
    return Entry(number, event, window, 1, window, "s", 5, AT, f"e{number}", "/p", f"k{number}")  # type: ignore[arg-type]


def row(number: int, **change: Any) -> dict[str, Any]:
    kept = {"key": f"e{number}", "model": "m/1", "is_drift": False, "promised": True, "seal": "s"}
    return kept | change


def test_a_span_looks_back_at_checked_windows_of_this_champion_and_this_promise() -> None:
    log = [entry(1, 1), entry(2, 2, "opened"), entry(3, 2, "left"), entry(4, 2), entry(5, 3)]
    rows = [row(1), row(4), row(5)]

    def windows(rows: list[dict[str, Any]], window: int = 4, most: int = 27) -> list[int]:
        return [e.window for e in spans.earlier(log, rows, "m/1", "s", window, most)]

    assert windows(rows) == [3, 2, 1]
    assert windows(rows, most=2) == [3, 2]
    assert windows(rows, window=3) == [2, 1], "a rerun of window 3 sees what its first run saw"
    assert windows([row(1), row(4, is_drift=True), row(5)]) == [3], "no image alarms twice"
    assert windows([row(1), row(4, model="m/2"), row(5)]) == [3]
    assert windows([row(1), row(4, promised=None), row(5)]) == [3]
    assert windows([row(1), row(4, seal="of another package"), row(5)]) == [3]
    assert windows([row(1), row(4, seal=None), row(5)]) == [3], "an older raypipe's"
    assert windows([row(1), row(4)]) == [], "evidence that is gone"


def batch(*images: str, value: float = 0.0, looks: bool = True) -> Batch:
    values = np.full((len(images), 2), value)
    seen = np.full((len(images), 5), value) if looks else None
    return Batch(TableVersion("/t", 1), list(images), list(images), values, values, seen)


def test_each_image_is_there_once_and_equal_spans_are_one() -> None:
    nights = {w: batch(f"i{w}", "same", value=w) for w in range(1, 40)}

    def together(mine: Batch, count: int, most: int = 100) -> dict[int, Batch]:
        before = [entry(w, w) for w in range(count, 0, -1)]
        return spans.together(mine, before, lambda e: nights[e.window], (7, 28), most)

    mine = batch("new", "same", "new", value=40.0)
    assert together(mine, 0) == {}
    few = together(mine, 3)
    assert list(few) == [4] and few[4].sha256 == ["new", "same", "i3", "i2", "i1"]
    assert few[4].features_ND[:, 0].tolist() == [40, 40, 3, 2, 1]
    assert few[4].looks_NK is not None and len(few[4].looks_NK) == 5
    assert list(together(mine, 6)) == [7] and list(together(mine, 7)) == [7, 8]
    assert list(together(mine, 30)) == [7, 28]
    assert together(mine, 30, most=3) == {}, "a night that fills max_rows"


def test_predictions_that_are_gone_end_the_look_back() -> None:
    def read(one: Entry) -> Batch:
        if one.window == 5:
            raise DataError("gone")
        return batch(f"i{one.window}", looks=one.window != 7)

    before = [entry(w, w) for w in range(8, 0, -1)]
    found = spans.together(batch("new"), before, read, (7,), 100)
    assert list(found) == [4] and found[4].ids == ["new", "i8", "i7", "i6"]
    assert found[4].looks_NK is None

    def away(one: Entry) -> Batch:
        raise Unreachable("the store is away")

    with pytest.raises(Unreachable):
        spans.together(batch("new"), before, away, (7,), 100)


def sides(seed: int, rows: int, move: float) -> Any:
    """A check of images, some of them new in each span."""
    rng = np.random.default_rng(seed)
    reference, mine = rng.normal(size=(150, 8)), rng.normal(size=(rows, 8)) + move
    scores = rng.dirichlet([2, 2], 150 + rows)
    return lambda cfg: detect(reference, mine, scores[:150], scores[150:], cfg, 1)


def test_the_spans_share_one_level_and_a_small_drift_that_lasts_is_found() -> None:
    mmd, alpha = DriftConfig(detectors=("mmd", "online")), 0.003
    asked: list[tuple[int, DriftConfig]] = []

    def of(count: int, move: float) -> Any:
        test = sides(3, 20 if count == 1 else 300, move)

        def found(cfg: DriftConfig) -> DriftReport:
            asked.append((count, cfg))
            return test(cfg)

        return found

    still = promise.over_spans(mmd, alpha, of(1, 0.28), {})
    assert not still.is_drift and still.alpha == alpha
    asked.clear()
    found = promise.over_spans(mmd, alpha, of(1, 0.28), {7: of(7, 0.28)})
    assert {cfg.alpha for _, cfg in asked} == {alpha / 2}
    assert {cfg.detectors for count, cfg in asked if count == 7} == {("mmd",)}
    assert found.is_drift and found.alpha == alpha and found.batch_images == 20
    assert [(e.on, e.is_drift) for e in found.evidence] == [
        ("embedding", False),
        ("embedding of 7 checks", True),
    ]
    assert found.p_value == pytest.approx(2 * found.evidence[1].p_value)
    assert "300 of 7 checks" in found.notes[-1]
    # Without a promise, or with nothing but a test of one night, spans change nothing.
    assert promise.over_spans(mmd, None, of(1, 0.28), {7: of(7, 0.28)}).alpha == mmd.alpha
    alone = mmd.model_copy(update={"detectors": ("online",)})
    with pytest.raises(DataError, match=r"watch\.arrived"):
        promise.over_spans(alone, alpha, of(1, 0.28), {7: of(7, 0.28)})


def judged(reference: np.ndarray, nights: list[np.ndarray], seed: int) -> Any:
    mine = np.concatenate(nights)
    scores = np.full((len(reference), 2), 0.5), np.full((len(mine), 2), 0.5)
    return lambda cfg: detect(reference, mine, *scores, cfg, seed)


@pytest.mark.slow
def test_years_without_drift_keep_the_promise() -> None:
    """60 horizons of 20 checks of 5 % each: more than 9 with an alarm have odds of 1 to 1,000."""
    mmd, checks = DriftConfig(detectors=("mmd",), alpha=0.05, permutations=500), 20
    ever = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        reference, nights = rng.normal(size=(60, 4)), [rng.normal(size=(20, 4)) for _ in range(20)]
        log: list[int] = []
        for t in range(checks):
            since = (log[-1] + 1) if log else 0

            first = max(since, t - 6)
            tests = [judged(reference, nights[begin : t + 1], t) for begin in (t, first)]
            more = {t - first + 1: tests[1]} if first < t else {}
            if promise.over_spans(mmd, 0.05 / checks, tests[0], more).is_drift:
                log.append(t)
        ever += bool(log)
    assert ever <= 9, ever


def test_spans_are_numbers_of_checks() -> None:
    given = validate(WatchConfig, {"horizon": {"spans": [7, 28]}})
    assert given.horizon is not None and given.horizon.spans == (7, 28)
    for wrong in ([1], [101], ["week"]):
        with pytest.raises(ConfigError, match="spans"):
            validate(WatchConfig, {"horizon": {"spans": wrong}})


class Nights:
    """A champion whose reference is real images, and a table that grows each night."""

    def __init__(self, registered: Registered, folder: Path) -> None:
        self.images = registered.images
        known = registered.package.predict(self.images[:60])
        reference = Reference(known.features_ND, known.scores_NC, tuple(f"r{n}" for n in range(60)))
        model = registered.package.model
        uri = str(folder / "t")
        info = {"config": {"table": {"uri": uri}}, "table": {"uri": uri, "version": 0}}
        built = packing.build(folder / "package", model, CFG, CLASSES, reference, info)
        self.run = RunConfig(name="spans", dir=str(folder / "run"))
        self.store: Store = open_store(self.run, RegistryConfig(model="spans"))
        with runs.run(self.store, "spans", "train", {}, None) as run_id:
            pass
        version = versions.register(self.store, run_id, built, "spans", {})
        promote.promote(self.store, version, expected=None)
        self.source = TableConfig(uri=uri)
        self.watch = validate(WatchConfig, {"horizon": {"spans": [3]}, "ask": 0})

    def add(self, first: int, count: int = 20) -> None:
        images = self.images[first : first + count]
        ids = [f"i{n}" for n in range(first, first + count)]
        columns = {"image_id": ids, "image": pa.array(images, pa.binary())}
        append(self.source.uri, pa.table(columns), "add")

    def check(self) -> CheckResult:
        cfg = DriftConfig(detectors=("mmd",))
        found = check.check_window(
            *(self.store, self.run, self.source, self.watch, PredictConfig(), cfg, print)
        )
        assert isinstance(found, CheckResult)
        return found


@pytest.mark.usefixtures("ray_session")
def test_nights_are_looked_back_at_as_the_tables_say(
    registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = Nights(registered, tmp_path)
    nights.add(60)
    first = nights.check()
    assert [e.on for e in first.report.evidence] == ["embedding"]
    nights.add(80)
    second = nights.check()
    assert [e.on for e in second.report.evidence] == ["embedding", "embedding of 2 checks"]
    assert second.report.notes[-1].endswith("40 of 2 checks")
    # The same again: the same evidence, stored once, and no longer look back.
    again = nights.check()
    assert (again.key, again.report) == (second.key, second.report)

    # Killed after the evidence, and run again; then a night that did not run.
    nights.add(100)
    monkeypatch.setattr(
        check.Windows, "checked", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        nights.check()
    monkeypatch.undo()
    nights.add(120)
    third = nights.check()
    assert third.report.notes[-1].endswith("60 of 3 checks")
    nights.add(140)
    fourth = nights.check()
    assert fourth.report.batch_images == 40 and fourth.report.notes[-1].endswith("80 of 3 checks")
    rows = records.checks(nights.run, nights.watch).rows
    assert len(rows) == 4 and len({r["alpha"] for r in rows}) == 1
    assert all(r["promised"] for r in rows)


@pytest.mark.usefixtures("ray_session")
def test_the_report_of_a_check_that_cannot_alarm_says_so(
    registered: Registered, tmp_path: Path
) -> None:
    """After another horizon was set, checks had no alpha left for a year, and nobody was told."""
    nights = Nights(registered, tmp_path)
    said = []
    for night, horizon in enumerate(({"checks": 1}, {"checks": 365}, {"false_alarm": 0.06})):
        nights.add(60 + 20 * night)
        nights.watch = validate(WatchConfig, {"horizon": horizon, "ask": 0})
        notes = nights.check().report.notes
        said.append([note for note in notes if "watch.horizon" in note])
    [blind] = said.pop(1)
    assert "8.2e-05, and it cannot alarm. Raise watch.horizon.false_alarm" in blind
    assert said == [[], []], "the way out that the note names"
