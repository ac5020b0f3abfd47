"""The portfolio of first trials, and what a trial is expected to cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.start_costs import Cost, Speed, cost
from raypipe.config import validate
from raypipe.errors import RaypipeError
from raypipe.job import Job
from raypipe.search.searchers.tune_searchers import plan
from raypipe.search.settings import SearchConfig
from raypipe.search.space import defaults, parse, portfolio
from raypipe.search.warm_start import Earlier

COUNTS = {"train": 1500, "val": 400, "test": 600}
SPEED = {"efficientnet_lite0": Speed(forward_s=0.02, side_px=224)}


def job(**sections: Any) -> Job:
    return validate(Job, {"table": {"uri": "unused"}, **sections})


def planned(of: Job, gpu: bool = False, *hints: dict[str, Any]) -> list[dict[str, Any]]:
    """hints: the values of earlier trials, best first."""
    search = defaults.with_default_space(of.training, of.search, COUNTS, gpu)
    space = parse.parse(search.space or {}, of.training)
    earlier = [Earlier(space.keyed(values), 0.9) for values in hints]
    return plan(of.training, search, space, earlier)


def is_of(start: dict[str, Any], trial: dict[str, Any]) -> bool:
    """Has the trial the start's values? Those that the space does not have are drawn."""
    return all(trial[name] == value for name, value in start.items() if name in trial)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("task", ["single_label", "regression"])
def test_every_start_can_be_drawn_and_the_first_trials_are_they(gpu: bool, task: str) -> None:
    trials = planned(job(model={"task": task}), gpu)
    starts = portfolio.learned()
    for trial, start in zip(trials, starts[: portfolio.most(16)], strict=False):
        known = {name: value for name, value in start.items() if name != "train.batch_size"}
        assert is_of(known, trial)
    assert 5 <= len(starts) <= 8
    assert not any(is_of(dict(starts[0]), trial) for trial in trials[1:])


@pytest.mark.parametrize(("samples", "most"), [(1, 1), (2, 1), (6, 2), (16, 5), (100, 33)])
def test_a_third_of_a_search_are_starts_and_the_first_always_is(samples: int, most: int) -> None:
    assert portfolio.most(samples) == most
    few = planned(job(search={"samples": samples}))
    without = planned(job(search={"samples": samples, "starts": [], "start": {}}))
    changed = [a != b for a, b in zip(few, without, strict=True)]
    assert is_of(dict(portfolio.learned()[0]), few[0])
    # The rest is drawn as it is without starts: a portfolio moves no other trial.
    assert not any(changed[most:]) and any(changed[1:most]) == (most > 1)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"task": "regression"}},
        {"model": {"mode": "finetune"}},
        {"model": {"mode": "frozen"}},
        {"model": {"name": "small_cnn", "mode": "finetune", "pretrained": False}},
        {"search": {"preset": "fast"}},
        {"search": {"preset": "good"}},
        {"search": {"budget_s": 120}},
        {"search": {"start": {"train.lr": 0.001, "model.mode": "finetune"}}},
    ],
    ids=str,
)
def test_a_start_of_a_default_space_says_the_branches_that_its_own_values_choose(
    sections: dict[str, Any], gpu: bool
) -> None:
    of = job(**sections)
    search = defaults.with_default_space(of.training, of.search, COUNTS, gpu)
    space = parse.parse(search.space or {}, of.training)
    for start in (search.start or {}, *(search.starts or ())):
        said: dict[str, Any] = {}
        for field in space.fields:
            branch = field.branch(space.known(start))
            value = start.get(field.name)
            if branch is not None and branch.sampler.code(value) is not None:
                said[branch.key] = value
        assert space.keyed(start) == said


@pytest.mark.parametrize("mode", ["frozen", "finetune"])
def test_a_job_that_sets_its_mode_gets_starts_of_that_mode(mode: str) -> None:
    of = job(model={"mode": mode})
    search = defaults.with_default_space(of.training, SearchConfig(), COUNTS, False)
    rates = [start["train.lr"] for start in (search.start or {}, *(search.starts or ()))]
    assert rates == [s["train.lr"] for s in portfolio.learned() if s["model.mode"] == mode]


def test_what_the_user_sets_is_the_first_trial_and_what_the_job_refuses_is_left_out() -> None:
    # The first start of the mode that the user's start has: rates differ a lot between modes.
    tuned = next(s for s in portfolio.learned() if s["model.mode"] == "finetune")
    own = planned(job(search={"start": {"model.mode": "finetune", "train.weight_decay": 0.123}}))
    assert own[0]["train.weight_decay"] == 0.123 and own[0]["train.lr"] == tuned["train.lr"]
    given = job(
        search={
            "space": {
                "model.mode": "choice(frozen, finetune)",
                "model.frozen_blocks": "choice(0, 2)",
                "train.lr": "loguniform(1e-4, 1e-2)",
            },
            "samples": 9,
            "start": {"model.mode": "finetune", "model.frozen_blocks": 2},
            # Frozen features have no blocks to freeze.
            "starts": [
                {"model.mode": "frozen", "model.frozen_blocks": 2},
                {"model": {"mode": "finetune", "frozen_blocks": 2}},
                {"model.mode": "frozen", "model.frozen_blocks": 0},
            ],
        }
    )
    first, second, *_ = planned(given)
    assert (first["model.mode"], first["model.frozen_blocks"]) == ("finetune", 2)
    assert (second["model.mode"], second["model.frozen_blocks"]) == ("frozen", 0)


def test_after_a_warm_start_the_portfolio_comes_next() -> None:
    of = job(model={"mode": "finetune"})
    trials = planned(of, False, {"train.lr": 0.00099}, {"train.lr": 0.00088})
    starts = [start for start in portfolio.learned() if start["model.mode"] == "finetune"]
    assert trials[0]["train.lr"] == 0.00099
    assert trials[1]["train.lr"] == starts[0]["train.lr"]


def test_a_damaged_portfolio_is_named(tmp_path: Path) -> None:
    file = tmp_path / "portfolio.yaml"
    file.write_text("starts: [{values: {train.lr: 0.1}}]")
    with pytest.raises(RaypipeError, match="portfolio of starts is damaged"):
        portfolio.learned(file)


def test_a_trial_costs_more_with_more_pixels_and_less_with_frozen_blocks() -> None:
    of = job().training

    def epoch_s(**changed: Any) -> float:
        found = cost(of, {"model.mode": "finetune", "model.side_px": 96} | changed, COUNTS, SPEED)
        assert found is not None
        return found.epoch_s

    assert epoch_s(**{"model.side_px": 192}) == pytest.approx(4 * epoch_s())
    by_blocks = [epoch_s(**{"model.frozen_blocks": blocks}) for blocks in range(17)]
    assert by_blocks == sorted(by_blocks, reverse=True) and by_blocks[0] > 2 * by_blocks[14]
    frozen = cost(of, {"model.mode": "frozen"}, COUNTS, SPEED)
    assert frozen == Cost(pytest.approx(1900 * 0.02), pytest.approx(1900 * 2.5e-5))
    assert cost(of, {"model.name": "small_cnn"}, COUNTS, SPEED) is None, "it was not measured"
