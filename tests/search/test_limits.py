"""Trials that cannot keep search.limits are not begun; if none is left, one message says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import limits as benchmark
from raypipe.config import replace, validate
from raypipe.errors import ConfigError, RaypipeError
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.models.ensemble import Member
from raypipe.models.zoo import ModelConfig
from raypipe.search import limits, starts, variants
from raypipe.search.limits import SearchLimits, Variant
from raypipe.search.searchers.tune_searchers import plan, searcher
from raypipe.search.settings import SearchConfig
from raypipe.search.space import parse
from raypipe.search.space.space import MOST_TRIES, Space
from tests.searching import search

JOB = validate(
    Job,
    {
        "table": {"uri": "unused"},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
    },
)


def variant(ms: float, mb: float = 10.0, text: str = "net at 96 px") -> Variant:
    return Variant(text, ms, 0.9 * ms, 1.1 * ms, mb)


def limited(texts: dict[str, str], most_px: int, job: Job = JOB) -> Space:
    """A space in which models of more than so many pixels are too slow."""
    space = parse.parse(texts, job.training)
    models = [replace(space.job, trial).model for trial in space.variants(variants.shaping(space))]
    measured = {m.shape: variant(1.0 if m.pixels <= most_px else 9.0) for m in models}
    barred = limits.barred(measured, SearchLimits(latency_ms=2))
    return Space(space.fields, space.job, barred)


def test_a_limit_is_kept_by_the_whole_interval() -> None:
    """As the gate of a retrain has it: too noisy to tell is a limit that is not kept."""
    assert not variant(10).breaks(SearchLimits(latency_ms=11.1))
    assert "needs 10 ms (9 to 11) an image" in variant(10).breaks(SearchLimits(latency_ms=10.5))
    assert "10 MB of weights" in variant(10).breaks(SearchLimits(size_mb=9.9))
    assert not variant(10).breaks(SearchLimits())
    nan = Variant("broken", float("nan"), float("-inf"), float("inf"), 1.0)
    assert nan.breaks(SearchLimits(latency_ms=1e9))


def test_nothing_left_names_the_nearest_and_what_to_raise() -> None:
    found = {"a": variant(30, 4, "large"), "b": variant(9, 12, "small at 96 px")}
    with pytest.raises(ConfigError, match="No model of the search can keep") as said:
        limits.barred(found, SearchLimits(latency_ms=5, size_mb=11))
    text = str(said.value)
    assert "latency_ms=5, size_mb=11" in text and "small at 96 px needs 9 ms" in text
    assert "search.limits.latency_ms to 11" in text and "search.limits.size_mb to 13" in text
    # Only what is broken is to be raised.
    with pytest.raises(ConfigError, match=r"latency_ms to 11, or") as said:
        limits.barred(found, SearchLimits(latency_ms=5, size_mb=20))
    assert "size_mb to" not in str(said.value)
    assert limits.barred(found, SearchLimits(latency_ms=20)) == {
        "a": "large needs 30 ms (27 to 33) an image",
        "b": "",
    }


def test_limits_that_only_heads_keep_leave_the_heads() -> None:
    trials, head = {"a": variant(30, 4, "trial")}, variant(9, 12, "head at 32 px")
    found = limits.barred(trials, SearchLimits(latency_ms=10), [head])
    assert found == {"a": "trial needs 30 ms (27 to 33) an image"}
    assert Space((), JOB.training, found).all_barred
    assert not Space((), JOB.training, found | {"b": ""}).all_barred
    assert not Space((), JOB.training).all_barred
    with pytest.raises(ConfigError, match="The nearest one: head at 32 px needs 9 ms"):
        limits.barred(trials, SearchLimits(latency_ms=5), [head])


@pytest.mark.parametrize("searcher", ["random", "tpe"])
def test_no_planned_trial_breaks_a_limit(searcher: str) -> None:
    texts = {"model.side_px": "choice(32, 48, 64)", "train.lr": "loguniform(1e-4, 1e-2)"}
    space = limited(texts, most_px=48)
    cfg = SearchConfig(samples=40, searcher=searcher, space=texts)  # type: ignore[arg-type]
    planned = plan(JOB.training, cfg, space, [])
    assert {trial["model.side_px"] for trial in planned} == {32, 48} and len(planned) == 40
    refused = space.refusal({"model.side_px": 64, "train.lr": 1e-3})
    assert refused is not None and "needs 9 ms" in refused.rule
    # What was not measured is refused, too; nothing is where nothing is limited.
    assert space.refusal({"model.side_px": 40}) is not None
    assert parse.parse(texts, JOB.training).refusal({"model.side_px": 40}) is None
    # Its data are not read, either.
    assert all(one["model.side_px"] <= 48 for one in space.variants())


def test_a_grid_loses_its_cells_that_break_a_limit() -> None:
    texts = {"model.side_px": "grid(32, 48, 64)", "train.lr": "grid(1e-3, 1e-2)"}
    cfg = SearchConfig(samples=1, space=texts)
    planned = plan(JOB.training, cfg, limited(texts, most_px=48), [])
    assert sorted((t["model.side_px"], t["train.lr"]) for t in planned) == [
        (32, 1e-3),
        (32, 1e-2),
        (48, 1e-3),
        (48, 1e-2),
    ]


def test_a_start_that_is_too_slow_keeps_its_other_values() -> None:
    texts = {"model.side_px": "choice(32, 48, 64)", "train.lr": "loguniform(1e-4, 1e-2)"}
    cfg = SearchConfig(samples=3, space=texts, start={"model.side_px": 64, "train.lr": 5e-3})
    first = plan(JOB.training, cfg, limited(texts, most_px=48), [])[0]
    assert first["train.lr"] == 5e-3 and first["model.side_px"] <= 48


def test_a_field_that_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    space = parse.parse({"model.dropout": "uniform(0, 0.5)"}, JOB.training)
    assert variants.shaping(space) == [], "it changes neither time nor size"
    monkeypatch.setattr(variants, "NOT_SHAPE", set())
    with pytest.raises(ConfigError, match=r"model\.dropout is continuous.*choice"):
        variants.shaping(space)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"limits": {"money": 1.0}}, "price_per_hour"),
        (
            {"limits": {"money": 1.0}, "stopping": {"price_per_hour": 1.0}, "refit": {}},
            "search.refit costs is not known",
        ),
        ({"limits": {"latency_ms": 0}}, "greater than 0"),
        ({"limits": {"size_mb": -1}}, "greater than 0"),
        ({"ensemble": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_kept_together_are_one_message(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(SearchConfig, given)


@pytest.mark.usefixtures("ray_session")
def test_each_limit_is_kept_where_the_best_trial_would_break_it(
    searches: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit trials of 256 px take part; with each, none of them begins."""

    def timed(models: list[Any], images: list[bytes], rounds: int = 1) -> list[Variant]:
        assert images, "of the table"
        return [variant(one.side_px / 32) for one in models]

    monkeypatch.setattr(variants, "timed", timed)
    space = {"model.side_px": "grid(32, 256)", "train.lr": "grid(0.01, 0.001)"}
    given = {"search.samples": 1, "search.scheduler": "none", "search.space": space}

    def run(**more: Any) -> Any:
        return search(searches(tmp_path, **(given | more)))

    def sides(found: Any) -> set[int]:
        return {trial.changes["model.side_px"] for trial in found.trials}

    # A trial's epoch takes some milliseconds, at 1 a millisecond.
    price = {"search.stopping.price_per_hour": 3.6e6}
    roomy = run(**{"search.limits.latency_ms": 9, "search.limits.money": 1e6} | price)
    assert sides(roomy) == {32, 256} and len(roomy.trials) == 4
    assert roomy.device_s * 1000 < 1e6
    kept = {one.text: one.latency_ms for one in variants.read(roomy.folder).values()}
    assert kept == {"small_cnn at 32 px": 1.0, "small_cnn at 256 px": 8.0}
    found = run(**{"search.limits.latency_ms": 5})
    assert sides(found) == {32} and len(found.trials) == 2
    assert found.reached and found.reached[-1].value == min(one.metric for one in found.trials)
    assert found.ran_s >= found.reached[-1].seconds
    nets = {"model.name": "grid(small_cnn, efficientnet_lite0)", "train.lr": "grid(0.01, 0.001)"}
    light = run(**{"search.limits.size_mb": 5, "search.space": nets, "model.side_px": 32})
    assert {trial.changes["model.name"] for trial in light.trials} == {"small_cnn"}
    # What cannot be kept is said before any trial begins.
    with pytest.raises(ConfigError, match=r"The model of search\.refit would break"):
        run(**{"search.limits.latency_ms": 5, "search.refit": {"model.side_px": 512}})
    with pytest.raises(ConfigError, match="No model of the search can keep"):
        run(**{"search.limits.size_mb": 0.001})
    begun = [folder for folder in (tmp_path / "search").iterdir() if (folder / "tune").exists()]
    assert sorted(begun) == sorted(one.folder for one in (roomy, found, light))
    try:
        poor = run(**price | {"search.limits.money": 1.0})
    except RaypipeError as e:
        assert "stopped before its first result" in str(e)
    else:  # what an epoch stored before the search stopped is an answer
        assert "of 1 in money" in str(poor.stopped) and len(poor.trials) <= 2


def test_the_benchmark_sets_limits_below_the_best_and_judges_the_slow_end() -> None:
    free = {"latency_ms": [10.0, 9.0, 12.0], "size_mb": 40.0, "money": 0.2}
    assert benchmark.limits_of("free", free) == {}
    limits_ = benchmark.limits_of("all", free)
    assert limits_ == {"latency_ms": 7.5, "size_mb": 30.0, "money": 0.15}
    took = {"latency_ms": [7.0, 6.0, 7.6], "size_mb": 30.0, "money": float("nan")}
    kept = benchmark.kept(limits_, took)
    assert kept == {"latency_ms": False, "size_mb": True, "money": False}
    assert list(benchmark.kept({"size_mb": 1.0}, took)) == ["size_mb"]


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_cells_that_are_left_are_tried_once_each(name: str, tmp_path: Path) -> None:
    """Optuna's trials counted the cells that break a limit: one was tried twice, one never."""
    if name == "tpe":
        pytest.importorskip("optuna")
    texts = {"model.side_px": "grid(64, 32, 48)", "train.lr": "loguniform(1e-4, 1e-2)"}
    space = limited(texts, most_px=48)
    cfg = SearchConfig.model_validate({"samples": 1, "space": texts, "searcher": name})
    planned = plan(JOB.training, cfg, space, [])
    made = searcher(JOB.training, cfg, space, planned, [], tmp_path, 9)
    assert sorted(made.suggest(str(i))["model.side_px"] for i in range(2)) == [32, 48]


def test_cells_that_break_a_limit_are_drawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MOST_TRIES times, until that is known; it was as often for whoever asked for cells."""
    texts = {"model.side_px": "grid(64, 32, 48)", "train.lr": "loguniform(1e-4, 1e-2)"}
    space = limited(texts, most_px=48)
    cfg = SearchConfig(samples=2, space=texts, start={"train.lr": 5e-3})
    drawn: list[int] = []
    draw = Space.draw

    def counted(self: Space, suggest: Any) -> Any:
        changes = draw(self, suggest)
        drawn.append(changes["model.side_px"])
        return changes

    monkeypatch.setattr(Space, "draw", counted)
    planned = plan(JOB.training, cfg, space, [])
    assert [one["model.side_px"] for one in planned] == [32, 48] * 2
    searcher(JOB.training, cfg, space, planned, [], tmp_path, 9)
    assert starts.unused(cfg, space, starts.of(cfg)) == []
    assert MOST_TRIES <= drawn.count(64) < MOST_TRIES + 9


def test_a_cell_whose_other_models_break_a_limit_is_tried_once() -> None:
    """Each of its trials was drawn until it was the one that is left: they were copies."""
    texts = {"train.lr": "grid(1e-3, 1e-2)", "model.side_px": "choice(32, 48, 64)"}
    cfg = SearchConfig(samples=4, space=texts)
    planned = plan(JOB.training, cfg, limited(texts, most_px=32), [])
    assert sorted((one["train.lr"], one["model.side_px"]) for one in planned) == [
        (1e-3, 32),
        (1e-2, 32),
    ]


@pytest.mark.usefixtures("heard")
def test_cells_that_break_a_limit_are_counted_and_others_are_refused_as_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Cells that the job refuses left without a word, too, where search.limits were set."""
    texts = {"model.side_px": "grid(64, 32, 48)", "train.lr": "grid(1e-3, 1e-2)"}
    cfg = SearchConfig(samples=1, space=texts)
    assert len(plan(JOB.training, cfg, limited(texts, most_px=48), [])) == 4
    assert "2 of 6 combinations of the grid are left out: their models break" in caplog.text
    texts = {"model.side_px": "grid(32, 64)", "model.frozen_blocks": "grid(0, 3)"}
    texts["model.mode"] = "grid(finetune, frozen)"
    cfg = SearchConfig(samples=1, space=texts)
    job = validate(Job, {"table": {"uri": "unused"}})
    for most_px in (32, 64):
        space = limited(texts, most_px, job)
        assert starts.unused(cfg, space, starts.of(cfg)) == []
        with pytest.raises(ConfigError, match=r"what the job refuses.*frozen_blocks needs"):
            plan(job.training, cfg, space, [])


def test_a_model_of_one_cell_among_many_is_measured() -> None:
    """64 random cells of a hundred missed it, and it was barred as if it broke a limit."""
    decays = ", ".join(str(i / 1000) for i in range(1, 101))
    for alone in (0.001, 0.05, 0.073, 0.1):
        texts = {
            "train.weight_decay": f"grid({decays})",
            "model.side_px": f"grid(32) if train.weight_decay == {alone} else grid(48, 64)",
        }
        planned = plan(
            JOB.training, SearchConfig(samples=1, space=texts), limited(texts, most_px=48), []
        )
        sides = [trial["model.side_px"] for trial in planned]
        assert sides.count(32) == 1 and sides.count(48) == 99 and len(sides) == 100


def test_heads_of_one_backbone_are_no_measure_of_fine_tuned_members(
    searches: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their shapes are equal: another search.refit found the time of one network for two."""
    job = searches(tmp_path).training
    pinned = pin(job.table, job.feed)
    head = ModelConfig(side_px=32)
    tuned = head.model_copy(update={"mode": "finetune"})
    assert head.shape == tuned.shape

    def timed(models: Any, images: Any, rounds: int = 1) -> list[Variant]:
        ms = [float(len(one.bodies)) for one in models]
        return [Variant("", one, one, one, 0.0) for one in ms]

    monkeypatch.setattr(variants, "timed", timed)
    monkeypatch.setattr(variants, "size_mb", lambda model: float(len(model.bodies)))
    for models, bodies in (((head, head), 1), ((tuned, head), 2), ((head, head), 1)):
        whole = variants.of_members([Member(one) for one in models], pinned, job, tmp_path)
        assert (whole.latency_ms, whole.size_mb) == (bodies, bodies)
