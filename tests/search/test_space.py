"""Every draw lies where it should, and every slip in a space is one message with a way out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as with_
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config import replace, validate
from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.search import feasible, starts
from raypipe.search.searchers import tune_searchers
from raypipe.search.searchers.tune_searchers import plan
from raypipe.search.settings import SearchConfig
from raypipe.search.space import parse
from raypipe.search.space.space import MOST_TRIES, TRIES, Changes, Space, at_random, uniform
from raypipe.search.warm_start import Earlier

JOB = validate(Job, {"table": {"uri": "unused"}})


def trials(texts: dict[str, str], times: int = 200, job: Job = JOB) -> list[Changes]:
    parsed = parse.parse(texts, job.training)
    return [parsed.trial(job.run.seed, i) for i in range(times)]


def drawn(field: str, text: str, times: int = 200) -> list[Any]:
    return [trial[field] for trial in trials({field: text}, times)]


def test_a_choice_draws_its_members_and_keeps_their_types() -> None:
    assert Counter(map(type, drawn("model.dropout", "choice(0.0, 0.2, 0.5)"))) == {float: 200}
    assert set(drawn("model.dropout", "choice(0.0, 0.2, 0.5)")) == {0.0, 0.2, 0.5}
    assert set(drawn("train.batch_size", "choice(16, 32)")) == {16, 32}
    assert set(drawn("augment.flip_vertical", "choice(True, False)")) == {True, False}
    assert set(drawn("train.clip_norm", "choice(None, 1.0)")) == {None, 1.0}
    assert (
        120 < Counter(drawn("train.batch_size", "choice(16, 16, 16, 32)"))[16] < 180
    )  # said thrice, three times as often


@pytest.mark.parametrize(
    "text",
    ["choice(cosine, constant)", "choice('cosine', \"constant\")", " choice( cosine ,constant ) "],
)
def test_words_need_no_quotes(text: str) -> None:
    assert set(drawn("train.schedule", text)) == {"cosine", "constant"}


def test_uniform_and_loguniform_fill_their_range() -> None:
    flat = drawn("model.dropout", "uniform(0.1, 0.5)", 400)
    assert 0.1 <= min(flat) < 0.15 and 0.45 < max(flat) <= 0.5
    log = drawn("train.lr", "loguniform(1e-4, 1e-1)", 400)
    assert min(log) >= 1e-4 and max(log) <= 1e-1
    assert 0.2 < sum(lr < 1e-3 for lr in log) / 400 < 0.47  # a third of the decades


def test_steps_reach_both_ends_and_randint_leaves_out_the_last() -> None:
    assert set(drawn("model.dropout", "quniform(0.1, 0.4, 0.1)")) == {0.1, 0.2, 0.3, 0.4}
    assert set(drawn("train.batch_size", "quniform(16, 63, 16)")) == {16, 32, 48}
    whole = drawn("train.unfreeze_epochs", "randint(0, 4)")
    assert set(whole) == {0, 1, 2, 3} and {type(v) for v in whole} == {int}


def test_a_trial_is_a_function_of_seed_and_number_whatever_else_is_searched() -> None:
    lr = {"train.lr": "loguniform(1e-4, 1e-1)"}
    alone = trials(lr, 20)
    assert alone == trials(lr, 20)
    assert [t["train.lr"] for t in trials({"model.dropout": "uniform(0, 0.5)", **lr}, 20)] == [
        t["train.lr"] for t in alone
    ]
    assert (
        alone != trials(lr, 20, replace(JOB, {"run.seed": 8}))
        and len({t["train.lr"] for t in alone}) == 20
    )


@given(st.integers(), st.integers(0, 10**6))
def test_uniform_stays_below_one(seed: int, i: int) -> None:
    assert 0 <= uniform(seed, i) < 1


def test_a_grid_is_run_whole_and_each_time_with_other_draws() -> None:
    text = {
        "train.lr": "grid(1e-3, 1e-2)",
        "train.schedule": "grid(cosine, constant)",
        "model.dropout": "uniform(0, 0.5)",
    }
    job = replace(JOB, {"search.samples": 3})
    parsed = parse.parse(text, job.training)
    planned = tune_searchers.plan(job.training, job.search, parsed, [])
    assert len(parsed.cells) == 4 and len(planned) == 12
    for repeat in range(3):
        assert {
            (t["train.lr"], t["train.schedule"]) for t in planned[4 * repeat : 4 * repeat + 4]
        } == {(lr, schedule) for lr in (1e-3, 1e-2) for schedule in ("cosine", "constant")}
    assert len({t["model.dropout"] for t in planned}) == 12


def test_a_field_is_set_only_where_its_condition_holds() -> None:
    found = trials(
        {
            "model.frozen_blocks": "randint(1, 6) if model.mode == 'finetune'",
            "model.mode": "choice(frozen, finetune)",
            "train.layer_decay": (
                "choice(0.9) if not model.mode in ('frozen',) and model.frozen_blocks < 4"
            ),
            "train.lr": "uniform(0.1, 0.2) if model.mode == 'frozen' "
            "else uniform(0.3, 0.4) if model.frozen_blocks > 3 else choice(1)",
        }
    )
    assert {t["model.mode"] for t in found} == {"frozen", "finetune"}
    for t in found:
        tuned = t["model.mode"] == "finetune"
        assert ("model.frozen_blocks" in t) == tuned
        assert ("train.layer_decay" in t) == (tuned and t["model.frozen_blocks"] < 4)
        high = tuned and t["model.frozen_blocks"] > 3
        assert (
            (0.3 <= t["train.lr"] <= 0.4)
            if high
            else t["train.lr"] == 1
            if tuned
            else (0.1 <= t["train.lr"] <= 0.2)
        )


def test_conditions_ask_the_job_for_what_is_not_searched() -> None:
    text = {
        "model.frozen_blocks": "choice(2) if model.mode == 'finetune' and model.side_px != None"
    }
    assert trials(text, 3) == [{}] * 3
    assert (
        trials(text, 3, replace(JOB, {"model.mode": "finetune", "model.side_px": 64}))
        == [{"model.frozen_blocks": 2}] * 3
    )


def test_what_the_job_refuses_together_is_drawn_again() -> None:
    found = trials(
        {"model.mode": "choice(frozen, finetune)", "model.frozen_blocks": "choice(0, 3)"}, 100
    )
    assert {(t["model.mode"], t["model.frozen_blocks"]) for t in found} == {
        ("frozen", 0),
        ("finetune", 0),
        ("finetune", 3),
    }


def test_a_combination_of_grids_that_the_job_refuses_is_refused() -> None:
    text = {"model.mode": "grid(frozen, finetune)", "model.frozen_blocks": "grid(0, 3)"}
    with pytest.raises(
        ConfigError,
        match=(r"draws what the job refuses \(.*frozen_blocks needs pretrained.*Put a condition"),
    ):
        tune_searchers.plan(JOB.training, JOB.search, parse.parse(text, JOB.training), [])
    nested = {
        "model.mode": "grid(frozen, finetune)",
        "model.frozen_blocks": "grid(0, 3, 5) if model.mode == 'finetune'",
    }
    assert len(parse.parse(nested, JOB.training).cells) == 4


def test_finite_values_and_the_variants_of_arrays_are_known_before_a_search() -> None:
    text = {
        "model.mode": "choice(frozen, finetune)",
        "model.side_px": "choice(32, 64) if model.mode == 'finetune'",
        "train.lr": "loguniform(1e-4, 1e-1)",
    }
    parsed = parse.parse(text, JOB.training)
    assert parsed.values("model.side_px") == [32, 64]
    assert parsed.values("train.lr") == parsed.values("model.name") == []
    assert parsed.always == ("model.mode", "train.lr")
    variants = {(v["model.mode"], v.get("model.side_px")) for v in parsed.variants()}
    assert variants == {("frozen", None), ("finetune", 32), ("finetune", 64)}
    assert variants == {(t["model.mode"], t.get("model.side_px")) for t in trials(text)}


def test_a_space_may_be_nested_and_null_takes_a_field_out() -> None:
    nested = SearchConfig(
        space={"train.lr": "choice(1)", "model.dropout": "choice(0)", "train": {"lr": "choice(2)"}}
    )
    assert nested.space == {"train.lr": "choice(2)", "model.dropout": "choice(0)"}
    assert SearchConfig(
        space={"train.lr": "choice(1)", "train": {"lr": None, "ema": "choice(0.9)"}}
    ).space == {
        "train.lr": "choice(1)",
        "train.ema": "choice(0.9)",
    }


@given(low=st.floats(1e-6, 1), span=st.floats(1e-6, 1))
def test_any_range_that_rises_is_taken_and_any_that_falls_is_refused(
    low: float, span: float
) -> None:
    trial = parse.parse({"train.lr": f"loguniform({low}, {low + span})"}, JOB.training).trial(1, 0)
    assert low <= trial["train.lr"] <= low + span
    with pytest.raises(ConfigError, match=r"train\.lr is not a range.*low < high, low > 0"):
        parse.parse({"train.lr": f"loguniform({low + span}, {low})"}, JOB.training)


@pytest.mark.parametrize(
    ("field", "text", "says"),
    [
        (
            "train.lerning_rate",
            "uniform(0, 1)",
            r"unknown field train\.lerning_rate.*(Did you mean|Known)",
        ),
        (
            "train.epoch",
            "choice(1, 2)",
            r"unknown field train\.epoch\b.*Did you mean 'train\.epochs'",
        ),
        ("lr", "uniform(0, 1)", r"unknown field lr\b"),
        (
            "train.lr",
            "logunifrom(1e-4, 1e-1)",
            r"train\.lr is not a draw.*grid\(…\), choice\(…\), uniform\(…\), loguniform",
        ),
        ("train.lr", "0.1", r"train\.lr is not a draw.*got '0\.1'"),
        ("train.lr", "__import__('os')", r"train\.lr is not a draw"),
        ("train.lr", "uniform(0.1)", r"train\.lr is not a range"),
        (
            "train.lr",
            "loguniform(0, 1)",
            r"train\.lr draws a value the field refuses.*got 0|not a range",
        ),
        ("train.lr", "uniform(a, b)", r"train\.lr is not a range"),
        ("train.lr", "uniform(True, 2)", r"train\.lr is not a range"),
        ("train.lr", "uniform(1, 1e999)", r"train\.lr is not a range"),
        ("train.lr", "quniform(0, 1, 0)", r"train\.lr is not a range.*q > 0"),
        (
            "train.batch_size",
            "randint(8, 8)",
            r"train\.batch_size is not a range.*high itself is never drawn",
        ),
        ("train.batch_size", "randint(8, 9.5)", r"train\.batch_size is not a range.*whole numbers"),
        ("train.lr", "choice()", r"train\.lr has nothing to choose from"),
        (
            "train.lr",
            "choice(0.1, -3)",
            r"train\.lr draws a value the field refuses.*got -3.*a number above 0",
        ),
        (
            "model.name",
            "choice(efficientnet_lite)",
            r"model\.name draws a value the field refuses.*Did you mean 'efficientnet_lite0'",
        ),
        (
            "train.batch_size",
            "choice(16, many)",
            r"train\.batch_size draws a value the field refuses.*got 'many'.*a whole number from "
            r"1 up",
        ),
        (
            "model.dropout",
            "uniform(0, 1.5)",
            r"model\.dropout draws a value the field refuses.*got 1\.5.*less than 1",
        ),
        ("train.batch_size", "uniform(16, 64)", r"train\.batch_size .*(whole|integer|choice)"),
        (
            "model.side_px",
            "randint(64, 128)",
            r"model\.side_px draws too many values.*choice\(…\) of a few",
        ),
        (
            "model.frozen_blocks",
            "choice(0, 3)",
            r"frozen_blocks draws a value the job refuses.*got 3.*mode finetune",
        ),
        ("run.seed", "choice(1, 2)", r"cannot vary run\.seed.*share table"),
        ("table.version", "choice(1, 2)", r"cannot vary table\.version"),
        ("feed.sampling", "choice(natural, balanced)", r"cannot vary feed\.sampling"),
        ("model.task", "choice(single_label)", r"cannot vary model\.task.*one metric"),
        ("search.samples", "choice(1, 2)", r"unknown field search\.samples"),
        ("model.calibrate", "choice(true, false)", r"cannot vary model\.calibrate.*no trial"),
        ("model.views", "choice(1, 8)", r"cannot vary model\.views.*with one view"),
        ("train.workers", "choice(1, 2)", r"cannot vary train\.workers"),
        ("train.lr", "choice(1) if", r"train\.lr is not a draw"),
        (
            "train.lr",
            "choice(1) if model.mode = 'frozen'",
            r"condition that cannot be read.*got \"model\.mode = 'frozen'\"",
        ),
        (
            "train.lr",
            "choice(1) if open('x') == 1",
            r"condition that cannot be read.*compared with constants",
        ),
        (
            "train.lr",
            "choice(1) if model.mode.__class__ == 1",
            r"condition on an unknown field model\.mode\.__class__",
        ),
        (
            "train.lr",
            "choice(1) if model.modus == 'frozen'",
            r"unknown field model\.modus.*Did you mean 'model\.mode'",
        ),
        (
            "train.lr",
            "choice(1) if model.mode == frozen",
            r"unknown field frozen .*Words are quoted",
        ),
        (
            "train.lr",
            "choice(1) if model.mode == 'fozen'",
            r"cannot hold: model\.mode is never that.*got 'fozen'.*'frozen'",
        ),
        (
            "train.lr",
            "choice(1) if model.side_px > 64",
            r"compares what cannot be compared.*'model\.side_px': None",
        ),
        ("train.lr", "choice(1) if train.lr > 64", r"go in a circle.*train\.lr -> train\.lr"),
    ],
)
def test_a_slip_is_one_message(field: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse.parse({field: text}, JOB.training)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (
            {
                "train.lr": "choice(1) if train.ema == 0.9",
                "train.ema": "choice(0.9) if train.lr < 2",
            },
            r"go in a circle.*train\.(lr|ema) -> train\.(lr|ema) -> ",
        ),
        (
            {
                "train.lr": "grid(1, 2) if model.mode == 'frozen'",
                "model.mode": "choice(frozen, finetune)",
            },
            r"grid search\.space\.train\.lr depends on model\.mode, which is drawn.*Make "
            r"model\.mode a grid too",
        ),
    ],
)
def test_a_slip_of_two_fields_is_one_message(texts: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse.parse(texts, JOB.training)


def test_the_longest_trial_may_be_one_that_draws_its_epochs() -> None:
    """A scheduler ends trials at this number: with the job's, those that drew more were cut."""
    epochs = JOB.train.epochs

    def most(**texts: str) -> int:
        named = {name.replace("_", "."): text for name, text in texts.items()}
        return parse.parse(named or {"train.lr": "uniform(0.1, 0.2)"}, JOB.training).most_epochs

    assert most() == epochs
    assert most(train_epochs=f"choice(2, {epochs + 7}, 4)") == epochs + 7
    assert most(train_epochs="randint(1, 4)") == 3
    assert most(train_epochs="choice(1, 2) if model.mode == 'finetune'") == epochs


def test_a_slip_in_a_start_is_said() -> None:
    """It was left out without a word, and the first trial was another one."""
    job = JOB.training
    with pytest.raises(
        ConfigError, match=r"search\.start names an unknown field train\.lrr.*train"
    ):
        parse.check_start("search.start", {"train.lrr": 0.1}, job)
    with pytest.raises(ConfigError, match=r"search\.starts\.1 has a value that train\.lr refuses"):
        parse.check_start("search.starts.1", {"train.lr": "abc"}, job)
    start = {"train.lr": 5.0, "train.epochs": 3, "model.dropout": 0.2}
    parse.check_start("search.start", start, job)
    texts = {"train.lr": "loguniform(1e-4, 1e-1)", "model.dropout": "choice(0.0, 0.2)"}
    space = parse.parse(texts, job)
    assert parse.left_out(start, space) == ["train.lr=5.0", "train.epochs=3"]
    assert parse.left_out({"train.lr": 0.01}, space) == []
    # It was said of a value that the whole job sets, and that all trials have.
    own = {"model.mode": job.model.mode, "model.side_px": job.model.side_px}
    assert parse.left_out(own, space) == []
    assert parse.left_out({"model.side_px": 96}, space) == ["model.side_px=96"]


def test_a_start_is_read_as_the_job_reads_it() -> None:
    """YAML and the command line read 1e-3 as a text, and then no trial began with it."""
    job = JOB.training
    start = {"train.lr": "1e-3", "train.epochs": "3", "model.mode": "finetune"}
    cfg = starts.checked(SearchConfig(start=start, starts=(start,)), job)
    assert cfg.start == {"train.lr": 1e-3, "train.epochs": 3, "model.mode": "finetune"}
    assert cfg.starts == (cfg.start,)
    space = parse.parse({"train.lr": "loguniform(1e-4, 1e-1)"}, job)
    own = [("search.start", {"train.lr": "1e-3"})]
    assert starts.unused(cfg, space, own) == []
    assert plan(job, SearchConfig(samples=2, start=cfg.start), space, [])[0]["train.lr"] == 1e-3
    # What is no number stays a text, and a search without starts has none.
    assert parse.typed({"train.lr": "auto", "no.field": "1"}, job) == {
        "train.lr": "auto",
        "no.field": "1",
    }
    assert starts.checked(SearchConfig(), job) == SearchConfig()


def test_a_start_that_is_refused_as_a_whole_is_said() -> None:
    """Each of its values is allowed alone, and the first trial was another one without a word."""
    job = JOB.training
    texts = {"model.mode": "choice(frozen, finetune)", "model.frozen_blocks": "choice(0, 3)"}
    space = parse.parse(texts, job)
    refused = {"model.mode": "frozen", "model.frozen_blocks": 3}
    cfg = SearchConfig(samples=3, space=texts)
    (line,) = starts.unused(cfg, space, [("search.start", refused)])
    assert line.startswith("search.start: no trial begins with all of it: ")
    assert "frozen_blocks" in line
    # Nor is one beyond a third of the trials tried, or a value of a grid.
    fine = {"model.mode": "finetune", "model.frozen_blocks": 3}
    other = {"model.mode": "finetune", "model.frozen_blocks": 0}
    cfg = SearchConfig(samples=3, space=texts, start=fine, starts=(other,))
    (line,) = starts.unused(cfg, space, starts.of(cfg))
    assert line == "search.starts.0 is left out: of 3 trials 1 are starts"
    # Without a search.start it is the first trial.
    alone = SearchConfig(samples=3, space=texts, starts=(fine,))
    assert plan(job, alone, space, [])[0] == fine
    assert starts.unused(alone, space, starts.of(alone)) == []
    crossed = parse.parse({"train.lr": "grid(1e-3, 1e-2)"}, job)
    (line,) = starts.unused(cfg, crossed, [("search.start", {"train.lr": 1e-2})])
    assert "train.lr is a grid" in line


@pytest.mark.parametrize(
    ("start", "others"),
    [
        # The job has this value, and the space has none of it: no trial is spent on it.
        ({"train.epochs": JOB.train.epochs}, [{"train.lr": 0.02}]),
        # A start that is there twice is tried once.
        ({"train.lr": 0.01}, [{"train.lr": 0.01}, {"train.lr": 0.02}]),
        # The job refuses it.
        ({"model.mode": "frozen", "model.frozen_blocks": 3}, [{"train.lr": 0.02}]),
    ],
)
def test_a_start_after_one_that_has_no_trial_is_not_called_left_out(
    start: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    texts = {
        "train.lr": "loguniform(1e-4, 1e-1)",
        "model.mode": "choice(frozen, finetune)",
        "model.frozen_blocks": "choice(0, 3)",
    }
    space = parse.parse(texts, JOB.training)
    # All of these trials would be taken if each start had one.
    cfg = SearchConfig(samples=3 * len(others), space=texts, start=start, starts=tuple(others))
    planned = plan(JOB.training, cfg, space, [])
    assert planned[len(others) - 1]["train.lr"] == 0.02
    lines = starts.unused(cfg, space, starts.of(cfg))
    assert [line for line in lines if not line.startswith("search.start:")] == []


def test_the_best_trial_of_an_earlier_search_comes_before_all_starts() -> None:
    texts = {"train.lr": "loguniform(1e-4, 1e-1)"}
    space = parse.parse(texts, JOB.training)
    hint = Earlier({"train.lr": 0.03}, 0.9)
    cfg = SearchConfig(samples=3, space=texts, start={"train.lr": 0.01})
    assert plan(JOB.training, cfg, space, [hint])[0] == {"train.lr": 0.03}
    (line,) = starts.unused(cfg, space, starts.of(cfg), [hint])
    assert line == "search.start is left out: of 3 trials 1 are starts"
    assert starts.unused(cfg, space, starts.of(cfg)) == []
    # One that is the same start leaves the others where they were.
    same = Earlier({"train.lr": 0.01}, 0.9)
    assert starts.unused(cfg, space, starts.of(cfg), [same]) == []


def test_trials_are_counted_without_the_cells_that_break_a_limit() -> None:
    """A start that no trial began with was not named: it had room among trials that are not run."""
    texts = {"model.side_px": "grid(32, 42, 52)", "train.lr": "loguniform(1e-4, 1e-1)"}
    space = parse.parse(texts, JOB.training)
    shapes = {px: replace(space.job, {"model.side_px": px}).model.shape for px in (32, 42, 52)}
    barred = {shapes[px]: "" if px == 32 else "it is too slow" for px in shapes}
    rates = [{"train.lr": 0.01}, {"train.lr": 0.02}]
    cfg = SearchConfig(samples=3, space=texts, start=rates[0], starts=(rates[1],))
    assert starts.unused(cfg, space, starts.of(cfg)) == []
    (line,) = starts.unused(cfg, with_(space, barred=barred), starts.of(cfg))
    assert line == "search.starts.0 is left out: of 3 trials 1 are starts"


def one_in_ten(**more: str) -> Space:
    """A space of which search.limits leave one model of ten. more: further fields."""
    sides = range(32, 132, 10)
    texts = {"model.side_px": f"choice({', '.join(map(str, sides))})"}
    space = parse.parse(texts | more, JOB.training)
    shapes = {px: replace(space.job, {"model.side_px": px}).model.shape for px in sides}
    barred = {shapes[px]: "" if px == 32 else "it is too slow" for px in sides}
    return with_(space, barred=barred)


def test_a_trial_is_drawn_until_it_is_allowed() -> None:
    """Two to five of 2,000 trials were refused 64 times in a row, and the search ended with that
    although a model kept its limits."""
    space, seed = one_in_ten(), JOB.run.seed
    (field,) = space.fields
    (branch,) = field.branches

    def draws(i: int) -> set[Any]:
        seeds = ((seed, i, attempt) for attempt in range(TRIES))
        return {at_random(one, {}, branch.key, branch.sampler) for one in seeds}

    unlucky = next(i for i in range(2000) if 32 not in draws(i))
    with pytest.raises(ConfigError, match=rf"{TRIES} times in a row.*it is too slow"):
        space.trial(seed, unlucky, tries=TRIES)
    assert space.trial(seed, unlucky) == {"model.side_px": 32}
    # The job is asked once for each model.
    assert len(space._over_limits) == 9 and space.of(space.job)._over_limits == {}
    nothing = with_(space, barred=dict.fromkeys(space.barred or {}, "it is too slow"))
    with pytest.raises(ConfigError, match=rf"{MOST_TRIES} times in a row"):
        plan(space.job, SearchConfig(samples=3), nothing, [])


@pytest.mark.usefixtures("heard")
def test_a_few_trials_that_cannot_be_drawn_cost_only_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Trials that cannot repeat each other.
    space, real = one_in_ten(**{"train.lr": "loguniform(1e-4, 1e-2)"}), Space.trial

    def once(self: Space, seed: int, i: int, pins: Any = None, tries: int = 1) -> Changes:
        return real(self, seed, i, pins, 1)

    monkeypatch.setattr(Space, "trial", once)
    seed = next(
        n for n in range(999) if not space.refusal(space.draw(partial(at_random, (n, 0, 0), {})))
    )
    planned = plan(replace(space.job, {"run.seed": seed}), SearchConfig(samples=50), space, [])
    assert 1 <= len(planned) < 50 and f"{50 - len(planned)} trials are left out" in caplog.text


@pytest.mark.usefixtures("heard")
def test_no_trial_of_a_finite_space_repeats_another_one(caplog: pytest.LogCaptureFixture) -> None:
    """A budget planned 2,000 trials of two combinations, with the same weights."""
    texts = {"train.schedule": "choice(cosine, constant)", "model.dropout": "choice(0.0, 0.2, 0.5)"}
    start = {"model.dropout": 0.5}
    asked = {"start": start, "starts": ({"train.schedule": "cosine"}, start)}

    def tried(samples: int, texts: dict[str, str] = texts, **more: Any) -> list[Changes]:
        cfg = SearchConfig(samples=samples, space=texts, **more)
        return plan(JOB.training, cfg, parse.parse(texts, JOB.training), [])

    def different(trials: list[Changes]) -> int:
        return len({str(sorted(trial.items())) for trial in trials})

    many = tried(300, **asked)
    assert different(many) == len(many) == 6
    assert "294 of 300 trials are left out" in caplog.text
    assert many[0]["model.dropout"] == 0.5, "starts come first"
    # Others are drawn in the place of copies.
    assert different(tried(5)) == len(tried(5)) == 5
    assert tried(300, searcher="tpe") == tried(300)
    assert tried(300, **asked) == many, "the same after a kill"
    # Where copies become different, or there are none, all is as it was.
    assert len(tried(300, scheduler="pbt")) == 300
    endless = {"train.lr": "loguniform(1e-4, 1e-2)", "model.dropout": "choice(0.0, 0.2)"}
    assert len(tried(99, endless)) == 99


@pytest.mark.usefixtures("heard")
def test_no_trial_of_a_grid_repeats_another_one(caplog: pytest.LogCaptureFixture) -> None:
    """By default each cell was trained 16 times, with the same weights."""

    def tried(samples: int, texts: dict[str, str], **more: Any) -> list[tuple[Any, ...]]:
        cfg = SearchConfig(samples=samples, space=texts, **more)
        space = parse.parse(texts, JOB.training)
        planned = plan(JOB.training, cfg, space, [])
        assert len(planned) <= tune_searchers.number_of(cfg, space)
        return [tuple(str(trial.get(name)) for name in texts) for trial in planned]

    grid = {"train.lr": "grid(1e-3, 1e-2)", "train.schedule": "grid(cosine, constant)"}
    once = tried(1, grid)
    assert len(set(once)) == 4 and "left out" not in caplog.text
    for searcher in ("random", "tpe"):
        assert tried(16, grid, searcher=searcher) == once
        assert "60 of 64 trials are left out" in caplog.text
        caplog.clear()
    assert tried(3, grid, scheduler="pbt") == once * 3, "its members change their values"
    # The same where no other value can be drawn, and with a value that is written twice.
    assert len(tried(9, {"train.lr": "grid(1e-3, 1e-2)", "model.dropout": "choice(0.2, 0.2)"})) == 2
    assert len(tried(9, {"train.lr": "grid(1e-3, 1e-2, 1e-2)"})) == 2
    # Of each cell there are as many as there were, as far as it has so many.
    few = {"train.lr": "grid(1e-3, 1e-2)", "model.dropout": "choice(0.0, 0.2, 0.5)"}
    for samples in (2, 3, 9):
        found = tried(samples, few)
        assert len(set(found)) == len(found) == 2 * min(samples, 3)
        assert [rate for rate, _ in found].count("0.01") == min(samples, 3)
    cells = {
        "model.mode": "grid(frozen, finetune)",
        "train.lr": "loguniform(1e-4, 1e-2) if model.mode == 'finetune'",
    }
    start = {"train.lr": 0.004}
    found = tried(6, cells, start=start, starts=({"train.lr": 0.005},))
    assert [mode for mode, _ in found].count("frozen") == 1 and len(set(found)) == len(found) == 7
    assert tried(6, cells, searcher="tpe", start=start)[0] == ("frozen", "None")


@pytest.mark.usefixtures("heard")
def test_all_combinations_are_tried_where_there_are_as_many_trials(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """97 of 100 were, and the log said that three others would repeat them."""
    rates = ", ".join(f"0.{number}" for number in range(10, 20))
    sizes = ", ".join(map(str, range(8, 18)))
    texts = {"model.dropout": f"choice({rates})", "train.batch_size": f"choice({sizes})"}
    space = parse.parse(texts, JOB.training)
    for seed in range(3):
        job = replace(JOB.training, {"run.seed": seed})
        planned = plan(job, SearchConfig(samples=100, space=texts), space.of(job), [])
        assert len({str(sorted(trial.items())) for trial in planned}) == len(planned) == 100
    assert "left out" not in caplog.text
    # Of those that the job refuses, none is taken.
    modes = {"model.mode": "choice(frozen, finetune)", "model.frozen_blocks": "randint(0, 40)"}
    space = parse.parse(modes, JOB.training)
    planned = plan(JOB.training, SearchConfig(samples=50, space=modes), space, [])
    assert len(planned) == 41 and "9 of 50 trials are left out" in caplog.text


def test_numbers_that_are_written_in_two_ways_are_one_value() -> None:
    """1 and 1.0 of a grid were two trials, and so were a start's 0 and the space's 0.0."""

    def planned(texts: dict[str, str], hints: list[Earlier], **more: Any) -> list[dict[str, Any]]:
        space = parse.parse(texts, JOB.training)
        cfg = SearchConfig(samples=9, space=texts, **more)
        return plan(JOB.training, cfg, space, hints)

    for searcher in ("random", "tpe"):
        found = planned({"train.lr": "grid(1, 1.0, 1e-2, 1e-2)"}, [], searcher=searcher)
        assert found == [{"train.lr": 1.0}, {"train.lr": 0.01}]
    texts = {"model.dropout": "choice(0, 0.2)", "train.weight_decay": "quniform(0.0, 0.2, 0.1)"}
    space = parse.parse(texts, JOB.training)
    whole = {"model.dropout": 0, "train.weight_decay": 0.1}
    keyed = space.keyed(whole)
    assert str(keyed) == "{'model.dropout': 0.0, 'train.weight_decay': 0.1}"
    assert str(space.keyed({"train.weight_decay": 0})) == "{'train.weight_decay': 0.0}"
    hint = Earlier(keyed, 0.9)
    for found in (planned(texts, [], start=whole), planned(texts, [hint])):
        assert len(found) == 6 and found[0] == whole
    drawn = parse.parse({"model.dropout": "uniform(0, 0.5)"}, JOB.training)
    assert str(drawn.keyed({"model.dropout": 0})) == "{'model.dropout': 0.0}"


def test_a_start_that_its_cell_of_a_grid_leaves_out_is_said() -> None:
    """The first trial was a frozen one, and no line said that it has no train.lr."""
    texts = {
        "model.mode": "grid(frozen, finetune)",
        "train.lr": "loguniform(1e-4, 1e-2) if model.mode == 'finetune'",
    }

    def said(texts: dict[str, str], **given: Any) -> list[str]:
        cfg = SearchConfig(samples=6, space=texts, **given)
        return starts.unused(cfg, parse.parse(texts, JOB.training), starts.of(cfg))

    assert said(texts, start={"train.lr": 4e-3}, starts=({"train.lr": 5e-3},)) == [
        "search.start: train.lr is left out: its trial has model.mode=frozen of the grid"
    ]
    # Nor is what it has said to be left out, whatever the grid has elsewhere.
    both = {**texts, "model.dropout": "choice(0.0, 0.2) if model.mode == 'frozen'"}
    assert said(both, start={"train.lr": 4e-3, "model.dropout": 0.2}) == [
        "search.start: train.lr is left out: its trial has model.mode=frozen of the grid"
    ]
    blocks = {"model.mode": texts["model.mode"], "model.frozen_blocks": "choice(0, 3)"}
    (line,) = said(blocks, start={"model.frozen_blocks": 3})
    assert line.startswith(
        "search.start: no trial begins with all of it beside model.mode=frozen of the grid: "
    )
    assert "frozen_blocks" in line.partition(": Config")[2]
    turned = {**blocks, "model.mode": "grid(finetune, frozen)"}
    assert said(turned, start={"model.frozen_blocks": 3}) == []


def test_a_space_without_fields_is_no_search() -> None:
    def asked(**search: Any) -> None:
        job = validate(Job, {"table": {"uri": "unused"}, "search": {"space": {}, **search}})
        feasible.check(job.training, job.search, None, {"CPU": 2.0})

    with pytest.raises(ConfigError, match="all trials would be the same one"):
        asked()
    asked(samples=1)


def test_a_space_that_an_older_raypipe_pickled_can_be_asked() -> None:
    """Tune keeps a searcher with its space; a field of today is not in it."""
    space = parse.parse({"train.lr": "loguniform(1e-4, 1e-2)"}, JOB.training)
    for name in ("_over_limits", "by_clock"):
        del space.__dict__[name]
    assert space.refusal({"train.lr": 0.001}) is None
    assert space.refusal({"train.lr": -1.0}) is not None and not space.by_clock


def test_a_branch_that_is_no_grid_is_drawn_in_its_cell() -> None:
    """The whole cell was lost: no trial was frozen, and nothing said so."""
    texts = {
        "model.mode": "grid(frozen, finetune)",
        "train.lr": "grid(1e-3, 1e-2) if model.mode == 'finetune' else loguniform(1e-4, 1e-2)",
    }
    space = parse.parse(texts, JOB.training)
    assert len(space.cells) == 3 and {"model.mode": "frozen"} in space.cells
    planned = plan(JOB.training, SearchConfig(samples=2, space=texts), space, [])
    rates = [trial["train.lr"] for trial in planned if trial["model.mode"] == "frozen"]
    assert len(planned) == 4 and len(set(rates)) == 2
    del texts["model.mode"]
    assert parse.parse(texts, JOB.training).cells == [{}]
    # What is drawn in some cells cannot decide how a grid is crossed.
    depends = {"model.side_px": "grid(32, 48) if train.lr > 1e-3 else grid(64, 96)"}
    with pytest.raises(ConfigError, match=r"depends on train\.lr, which is drawn"):
        parse.parse({"model.mode": "grid(frozen, finetune)", **texts, **depends}, JOB.training)


def test_chosen_words_are_what_the_field_makes_of_them() -> None:
    """`true` was a text: no condition on it held, and a bare one always did."""
    assert set(drawn("augment.flip_vertical", "choice(true, false)")) == {True, False}
    assert set(drawn("train.batch_size", "choice('16', '32')")) == {16, 32}
    texts = {
        "model.pretrained": "choice(true, false)",
        "model.mode": "choice(frozen) if model.pretrained == True else choice(finetune)",
    }
    for trial in trials(texts):
        assert trial["model.mode"] == ("frozen" if trial["model.pretrained"] else "finetune")
    texts = {"train.epochs": "choice(1) if train.batch_size == '32' else choice(2)"}
    with pytest.raises(ConfigError, match=r"cannot hold: train\.batch_size is no text.*without"):
        parse.parse(texts, JOB.training)


def test_a_start_says_a_value_whose_branch_is_drawn() -> None:
    """Conditions were asked as if all other fields were None: a comparison by < was refused, and a
    value whose field has a condition was left out without a word."""
    job = JOB.training
    texts = {
        "train.epochs": "randint(1, 6)",
        "train.lr": "uniform(0.1, 0.2) if train.epochs < 3 else uniform(0.01, 0.15)",
        "model.mode": "choice(frozen, finetune)",
        "model.frozen_blocks": "randint(1, 6) if model.mode == 'finetune'",
        "train.warmup": "choice(None, 0.1)",
    }
    space = parse.parse(texts, job)
    # Only what is wanted, in each branch that may be drawn and can have it.
    assert space.keyed({}) == {}, "None is a value of train.warmup"
    assert space.keyed({"train.lr": 0.18}) == {"train.lr": 0.18}
    assert space.keyed({"train.lr": 0.12}) == {"train.lr": 0.12, "train.lr#2": 0.12}
    assert space.keyed({"train.lr": 0.12, "train.epochs": 4})["train.lr#2"] == 0.12
    assert "train.lr" not in space.keyed({"train.lr": 0.12, "train.epochs": 4})

    start = {"train.lr": 0.18, "model.frozen_blocks": 4}
    cfg = SearchConfig(samples=3, start=start)
    (first, *_) = plan(job, cfg, space, [])
    assert first["train.lr"] == 0.18 and first["train.epochs"] < 3
    assert first["model.frozen_blocks"] == 4 and first["model.mode"] == "finetune"
    assert starts.unused(cfg, space, starts.of(cfg)) == []
    # What its own values rule out is said.
    cfg = SearchConfig(samples=3, start={**start, "model.mode": "frozen"})
    (line,) = starts.unused(cfg, space, starts.of(cfg))
    assert line.startswith("search.start: no trial with its other values has model.frozen_blocks")


def test_a_value_whose_condition_no_draw_meets_is_said() -> None:
    """The first trial was drawn without it, and nothing said so."""
    texts = {
        "train.weight_decay": "uniform(0, 1)",
        "train.clip_norm": "uniform(1, 5) if train.weight_decay < 0.005",
    }
    space = parse.parse(texts, JOB.training)
    cfg = SearchConfig(samples=3, start={"train.clip_norm": 2})
    assert "train.clip_norm" not in plan(JOB.training, cfg, space, [])[0]
    (line,) = starts.unused(cfg, space, starts.of(cfg))
    assert line.startswith(f"search.start: train.clip_norm is left out: none of {TRIES} draws")
    # With a value that meets it, it is drawn.
    cfg = SearchConfig(samples=3, start={"train.clip_norm": 2, "train.weight_decay": 0.001})
    assert starts.unused(cfg, space, starts.of(cfg)) == []
