"""The space of a search that names none: it can be drawn from, whatever is set, and stays within
what the machine can do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.config import load, replace, validate
from raypipe.job import Job
from raypipe.models.tasks import Kind
from raypipe.search import feasible, starts
from raypipe.search.schedulers import pbt
from raypipe.search.searchers.tune_searchers import plan
from raypipe.search.settings import SearchConfig
from raypipe.search.space import defaults, parse, portfolio
from raypipe.search.space.space import Changes


def job(**sections: Any) -> Job:
    return validate(Job, {"table": {"uri": "unused"}, **sections})


def with_space(of: Job, images: int, gpu: bool) -> SearchConfig:
    return defaults.with_default_space(of.training, of.search, {"train": images}, gpu)


def trials(of: Job, images: int, gpu: bool, times: int = 150) -> list[Changes]:
    parsed = parse.parse(with_space(of, images, gpu).space or {}, of.training)
    return [parsed.trial(1, i) for i in range(times)]


@pytest.mark.parametrize("task", ["single_label", "multi_label", "probability", "regression"])
@pytest.mark.parametrize("gpu", [False, True])
def test_what_the_issue_names_is_searched_for_every_task(task: Kind, gpu: bool) -> None:
    found = trials(job(model={"task": task}), 2000, gpu)
    drawn = {name for t in found for name in t}
    wanted = {
        "model.name",
        "model.mode",
        "model.side_px",
        "train.batch_size",
        "train.lr",
        "train.weight_decay",
        "train.schedule",
    }
    assert wanted <= drawn and {"augment.policy_magnitude", "model.frozen_blocks"} <= drawn
    assert ("train.label_smoothing" in drawn) == (task == "single_label")
    scratch = [t for t in found if t["model.name"] == "small_cnn"]
    assert 0.05 < len(scratch) / len(found) < 0.3
    assert all(
        t["model.mode"] == "finetune" and t["model.side_px"] <= 64 and not t["model.pretrained"]
        for t in scratch
    )


def test_without_a_gpu_it_is_light_and_of_many_images_only_the_head_is_trained() -> None:
    light = [
        t
        for t in trials(job(), 2000, gpu=False)
        if t["model.mode"] == "finetune" and t["model.name"] != "small_cnn"
    ]
    assert light and all(t["model.side_px"] <= 128 and t["model.frozen_blocks"] >= 3 for t in light)
    assert all(
        "model.mode" not in t and "augment.policy" not in t
        for t in trials(job(), 20_000, gpu=False)
    )
    assert any(t["model.mode"] == "finetune" for t in trials(job(), 20_000, gpu=True))


def test_resolutions_that_do_not_fit_the_cache_are_not_searched() -> None:
    assert all("model.side_px" not in t for t in trials(job(), 200_000, gpu=True, times=20))
    assert any(
        "model.side_px" in t
        for t in trials(job(feed={"cache_mb": 60_000}), 200_000, gpu=True, times=20)
    )


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"mode": "frozen"}, "train": {"lr": 0.01}},
        {"model": {"mode": "finetune"}},
        {"model": {"mode": "finetune", "frozen_blocks": 3, "views": 8}},
        {"model": {"mode": "finetune", "pretrained": False}},
        {"model": {"name": "small_cnn", "pretrained": False, "mode": "finetune"}},
        {
            "model": {"name": "efficientnet_lite0", "side_px": 64},
            "augment": {"flip_horizontal": True},
        },
        {"model": {"pretrained": True}, "train": {"batch_size": 8, "schedule": "step"}},
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_what_the_job_sets_stays_as_it_is_set(
    sections: dict[str, dict[str, Any]], gpu: bool
) -> None:
    found = trials(job(**sections), 100, gpu, times=40)
    given = {f"{section}.{name}" for section, fields in sections.items() for name in fields}
    assert found and not given & {name for t in found for name in t}
    assert len({str(t) for t in found}) == 40


def test_a_space_that_is_given_is_taken_and_a_job_that_sets_everything_searches_its_rate() -> None:
    given = job(search={"space": {"train.lr": "choice(1)"}})
    assert with_space(given, 10, gpu=False) is given.search
    assert with_space(job(search={"space": {}}), 0, gpu=False).space == {}
    everything_set = replace(job(), {"run.seed": 1})
    assert with_space(everything_set, 0, gpu=False).space == defaults.RATE


def test_the_command_line_may_name_single_fields_of_the_space() -> None:
    overrides = [
        "table.uri=x",
        "search.space.train.lr=loguniform(1e-4, 1e-2)",
        "search.space.model.dropout=choice(0, 0.2)",
    ]
    found = load(Job, None, overrides).search.space
    assert found == {"train.lr": "loguniform(1e-4, 1e-2)", "model.dropout": "choice(0, 0.2)"}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("mode", [None, "frozen", "finetune"])
def test_the_first_trial_is_the_portfolios_first_start_and_the_users_start_wins(
    gpu: bool, mode: str | None
) -> None:
    given = job(model={"mode": mode} if mode else {})
    learned = [s for s in portfolio.learned() if mode in (None, s["model.mode"])]
    search = with_space(given, 2000, gpu)
    parsed = parse.parse(search.space or {}, given.training)
    first, second = plan(given.training, search, parsed, [])[:2]
    for trial, start in ((first, learned[0]), (second, learned[1])):
        assert trial["train.lr"] == start["train.lr"]
        assert trial["train.weight_decay"] == start["train.weight_decay"]
        if start["model.mode"] == "finetune":
            # What the file leaves open depends on job and machine.
            assert trial["model.name"] == "efficientnet_lite0"
            assert trial["model.side_px"] == (224 if gpu else start.get("model.side_px", 128))
    own = {"train.weight_decay": 0.1, "train.epochs": 3}
    with_start = job(model={"mode": mode} if mode else {}, search={"start": own})
    search = with_space(with_start, 2000, gpu)
    again = plan(with_start.training, search, parsed, [])[0]
    assert again == first | {"train.weight_decay": 0.1}, "what is not drawn is no start"


@pytest.mark.parametrize("own", [{"model.frozen_blocks": 4}, {"train.lr": 2e-4}], ids=str)
def test_a_start_is_filled_up_with_values_beside_which_it_is_drawn(own: dict[str, Any]) -> None:
    """The portfolio's first start has frozen features, which left them out in every search."""
    of = job(search={"start": own})
    search = with_space(of, 2000, gpu=False)
    parsed = parse.parse(search.space or {}, of.training)
    first = plan(of.training, search, parsed, [])[0]
    assert own.items() <= first.items() and first["model.mode"] == "finetune"
    assert starts.unused(search, parsed, starts.of(of.search)) == []


def test_what_the_portfolio_leaves_out_is_said_so() -> None:
    """`Its other values` were blamed, and it had none."""
    of = job(search={"start": {"augment.policy_magnitude": 0.3}})
    search = with_space(of, 2000, gpu=False)
    parsed = parse.parse(search.space or {}, of.training)
    (line,) = starts.unused(search, parsed, starts.of(of.search))
    assert line.startswith("search.start: no trial with the portfolio's values beside it has")


def test_a_short_budget_has_fewer_and_smaller_arrays() -> None:
    """All of them are made before the first trial."""

    def arrays(budget_s: float | None, mode: str | None = None) -> set[Any]:
        model = {"mode": mode} if mode else {}
        of = job(search={"budget_s": budget_s}, train={"epochs": 10}, model=model)
        found = trials(of, 2000, gpu=False)
        return {(t.get("model.name"), t.get("model.mode"), t.get("model.side_px")) for t in found}

    name = "efficientnet_lite0"
    assert arrays(3600) == arrays(None) and (name, "frozen", None) in arrays(None)
    # No time to fine-tune, unless somebody wants it.
    assert arrays(60) == {(None, None, 128)} and arrays(20) == {(None, None, 96)}
    assert arrays(60, "finetune") == {(None, None, 96), (None, None, 128)}
    assert arrays(8, "finetune") == {(None, None, 96)}


def test_after_a_first_answer_trials_fine_tune_if_they_may() -> None:
    answered: dict[str, Any] = {"first_answer": True}
    of = job(search=answered)
    assert {t["model.mode"] for t in trials(of, 2000, gpu=False)} == {"finetune"}
    # More images than two cores can fine-tune on: trials are heads, with or without a first answer.
    assert all("model.mode" not in t for t in trials(of, 20_000, gpu=False))
    set_by_the_user = job(search=answered, model={"mode": "frozen"})
    assert all("model.mode" not in t for t in trials(set_by_the_user, 2000, gpu=False))
    # Its first trial is a start that fine-tunes.
    search = with_space(of, 2000, gpu=False)
    parsed = parse.parse(search.space or {}, of.training)
    starts = plan(of.training, search, parsed, [])[: portfolio.most(search.samples)]
    assert {start["model.mode"] for start in starts} == {"finetune"}
    assert starts[0]["train.lr"] == 0.001 and starts[0]["model.side_px"] == 128


def test_a_budget_decides_whether_trials_fine_tune_and_for_how_many_epochs() -> None:
    def epochs(images: int, search: dict[str, Any], gpu: bool = False, **more: Any) -> int | None:
        """None: no trial fine-tunes."""
        of = job(search=search, **more)
        counts = {"train": images * 4 // 5, "val": images // 5}
        shortened = defaults.within_budget(of.training, of.search, counts, gpu)
        drawn = with_space(of, images, gpu).space or {}
        may = "finetune" in drawn.get("model.mode", of.model.mode)
        return shortened.train.epochs if may else None

    assert epochs(2000, {}) == 20 and epochs(2600, {}) is None
    assert epochs(2600, {"preset": "fast", "first_answer": False}) is None
    assert epochs(2600, {"preset": "good"}) == 4
    assert epochs(2600, {"preset": "best"}) == 7
    assert epochs(300, {"preset": "best"}) == 20, "never more than the job has"
    assert epochs(2600, {"preset": "good"}, train={"epochs": 12}) == 12
    assert epochs(2600, {"preset": "good"}, gpu=True) == 20
    assert epochs(2600, {"preset": "fast"}, model={"mode": "finetune"}) == 4
    # Heads take milliseconds an epoch.
    heads = job(search={"preset": "fast"}, model={"mode": "frozen"})
    of_heads = defaults.within_budget(heads.training, heads.search, {"train": 9000}, False)
    assert of_heads.train.epochs == 20
    scratch = {"name": "small_cnn", "pretrained": False, "mode": "finetune"}
    assert epochs(2600, {"preset": "good"}, model=scratch) == 20, "its rate is another one"


def test_where_rungs_take_too_long_a_few_trials_train_by_the_clock() -> None:
    """Heads exist then: some fine-tuned networks are worth more than hundreds of other heads."""

    def clocked(images: int, search: dict[str, Any], **more: Any) -> tuple[Any, ...] | None:
        """(their side, scheduler, epochs), and the first starts; None: no trial does."""
        of = job(search={"preset": "fast"} | search, **more)
        counts = {"train": images}
        is_clocked = defaults.trains_by_clock(of.training, of.search, counts, gpu=False)
        training = defaults.within_budget(of.training, of.search, counts, gpu=False)
        cfg = defaults.with_default_space(training, of.search, counts, gpu=False)
        if not is_clocked:
            assert cfg.scheduler == of.search.scheduler
            return None
        first = plan(training, cfg, parse.parse(cfg.space or {}, training), [])[:2]
        assert [one["train.lr"] for one in first] == [0.001, 0.0015]
        assert {one["model.mode"] for one in first} == {"finetune"}
        (side,) = {one.get("model.side_px", training.model.side_px) for one in first}
        return side, cfg.scheduler, training.train.epochs

    assert clocked(1000, {}) == (128, "none", 20)
    # As a search asks, after it has looked at starts.
    of = job(search={"preset": "fast"})
    rows: Any = SimpleNamespace(counts={"train": 1000})
    cfg, space = feasible.check(of.training, of.search, rows, {"CPU": 2.0})
    assert space.by_clock and cfg.scheduler == "none"
    assert clocked(2600, {}) == (96, "none", 20)
    assert clocked(1000, {}, model={"side_px": 160}) == (160, "none", 20)
    # All of their epochs would fit, and leave the rest of the time unused.
    assert clocked(2600, {}, model={"side_px": 32}) is None
    # Rungs fit, or not even one training does.
    assert clocked(700, {}) is None and clocked(5000, {}) is None
    # Without heads trials have to be some; a refit is the longer training.
    assert clocked(2600, {"first_answer": False}) is None
    assert clocked(1000, {"refit": {}}) is None and clocked(2600, {"preset": "good"}) is None
    # What somebody has said about the trials counts.
    for own in ({"scheduler": "asha"}, {"samples": 30}, {"start": {"model.mode": "frozen"}}):
        assert clocked(2600, own) is None, own
    assert clocked(2600, {"starts": [{"train.lr": 0.1}]}) is None
    # The pixels would not fit.
    assert clocked(2600, {}, feed={"cache_mb": 30}) is None
    assert clocked(2600, {}, train={"epochs": 5}) is None
    assert clocked(2600, {}, train={"anneal_s": 180}) is None
    # What ends them before their time would end them before their rate has fallen.
    assert clocked(2600, {"limits": {"money": 1}, "stopping": {"price_per_hour": 1}}) is None
    assert clocked(2600, {"stopping": {"price_per_hour": 1}}) is not None
    assert clocked(2600, {}, model={"mode": "frozen"}) is None


def test_after_a_first_answer_trials_fine_tune_unless_somebody_wants_frozen_ones() -> None:
    frozen = {"model.mode": "frozen", "train.lr": 0.0123}
    good = {"preset": "good"}
    assert {t["model.mode"] for t in trials(job(search=good), 2000, gpu=False)} == {"finetune"}
    for more in ({"start": frozen}, {"starts": [frozen]}):
        of = job(search=good | more)
        search = with_space(of, 2000, gpu=False)
        parsed = parse.parse(search.space or {}, of.training)
        first = plan(of.training, search.model_copy(update={"samples": 6}), parsed, [])[:2]
        assert frozen.items() <= first["starts" in more].items()
    # A solver refuses to fine-tune: the default space was refused with it.
    solved = job(search=good, train={"solver": "closed"})
    assert all("model.mode" not in trial for trial in trials(solved, 2000, gpu=False))


@pytest.mark.parametrize("scheduler", ["pbt", "pb2"])
@pytest.mark.parametrize("mode", ["frozen", "finetune"])
def test_a_population_draws_what_can_change_while_a_trial_trains(scheduler: str, mode: str) -> None:
    """It was refused for fields that nobody had set."""
    model = {} if mode == "frozen" else {"mode": mode}
    of = job(search={"scheduler": scheduler}, model=model)
    search = with_space(of, 2000, gpu=False)
    parsed = parse.parse(search.space or {}, of.training)
    pbt.check(search, parsed)
    names = {field.name for field in parsed.fields}
    assert {"train.lr", "train.weight_decay"} <= names
    assert ("augment.crop_area" in names) == (mode == "finetune")
    assert ("train.batch_size" in names) == (scheduler == "pbt"), "pb2 draws ranges alone"
    # The rate of the job's own mode, and first trials of it.
    lr = "loguniform(3e-4, 3e-2)" if mode == "frozen" else "loguniform(1e-4, 5e-3)"
    assert search.space is not None and search.space["train.lr"] == lr
    first = plan(of.training, search, parsed, [])[0]
    assert {"train.lr", "train.weight_decay"} <= set(first)
    # What the user sets is not drawn.
    fixed = job(search={"scheduler": scheduler}, model=model, train={"lr": 0.01})
    assert "train.lr" not in (with_space(fixed, 2000, gpu=False).space or {})


def test_a_budget_without_samples_is_for_trials_until_it_is_over() -> None:
    assert job(search={"budget_s": 60}).search.samples == 2000
    assert job(search={"budget_s": 60, "samples": 5}).search.samples == 5
    assert job(search={"budget_s": 60, "scheduler": "pbt"}).search.samples == 16
    assert job(search={}).search.samples == 16


def test_a_first_trial_needs_no_array_of_its_own() -> None:
    of = job(search={"budget_s": 60}, model={"mode": "frozen"})
    found = with_space(of, 2624, gpu=False)
    assert found.space and "choice(128)" in found.space["model.side_px"]
    assert found.start and found.start.get("model.side_px", 128) == 128


@pytest.mark.parametrize("workers", [1, "auto"])
def test_a_search_with_one_worker_searches_what_the_user_left_open(workers: int | str) -> None:
    """A job whose every field counted as set was searched for its rate alone."""
    from raypipe.search.feasible import one_worker

    of = job(train={"workers": workers, "epochs": 10})
    one = one_worker(of.training)
    assert one.train.workers == 1
    given = defaults.space(of.training, 2000, gpu=False)
    assert set(defaults.space(one, 2000, gpu=False)) == set(given) and len(given) > 5


@pytest.mark.parametrize("solver", ["closed", "lbfgs"])
def test_a_head_that_is_fitted_at_once_is_tried_once(solver: str) -> None:
    def samples(search: dict[str, Any]) -> int:
        of = job(search=search, train={"solver": solver})
        return defaults.with_default_space(of.training, of.search, {"train": 2000}, False).samples

    assert samples({}) == samples({"preset": "good"}) == 1
    assert samples({"space": {"model.head": "choice(linear, kernel)"}}) == 16
