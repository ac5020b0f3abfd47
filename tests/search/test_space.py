"""Every draw lies where it should, and every slip in a space is one message that names the way out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.variant_generator import generate_variants

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.search import space
from raypipe.search.settings import SearchJob

JOB = validate(SearchJob, {"table": {"uri": "unused"}})


def drawn(field: str, text: str, times: int = 200) -> list[object]:
    parsed = space.parse({field: text}, JOB)[field]
    return [parsed.sample() for _ in range(times)]


def test_a_choice_draws_its_members_and_keeps_their_types() -> None:
    assert Counter(map(type, drawn("model.dropout", "choice(0.0, 0.2, 0.5)"))) == {float: 200}
    assert set(drawn("model.dropout", "choice(0.0, 0.2, 0.5)")) == {0.0, 0.2, 0.5}
    assert set(drawn("train.batch_size", "choice(16, 32)")) == {16, 32}
    assert set(drawn("augment.flip_vertical", "choice(True, False)")) == {True, False}
    assert set(drawn("train.clip_norm", "choice(None, 1.0)")) == {None, 1.0}


@pytest.mark.parametrize("text", ["choice(cosine, constant)", "choice('cosine', \"constant\")", " choice( cosine ,constant ) "])
def test_words_need_no_quotes(text: str) -> None:
    assert set(drawn("train.schedule", text)) == {"cosine", "constant"}


def test_uniform_and_loguniform_fill_their_range() -> None:
    flat = drawn("model.dropout", "uniform(0.1, 0.5)", 400)
    assert 0.1 <= min(flat) < 0.15 and 0.45 < max(flat) <= 0.5
    log = drawn("train.lr", "loguniform(1e-4, 1e-1)", 400)
    assert min(log) >= 1e-4 and max(log) <= 1e-1
    assert 0.2 < sum(lr < 1e-3 for lr in log) / 400 < 0.47  # a third of the decades


def test_a_grid_is_run_whole() -> None:
    text = {"train.lr": "grid(1e-3, 1e-2)", "train.schedule": "grid(cosine, constant)", "model.dropout": "uniform(0, 0.5)"}
    assert space.grid_size(text) == 4
    found = [v for _, v in generate_variants(space.parse(text, JOB), random_state=1)]
    assert {(v["train.lr"], v["train.schedule"]) for v in found} == {
        (lr, schedule) for lr in (1e-3, 1e-2) for schedule in ("cosine", "constant")
    }
    assert isinstance(BasicVariantGenerator(random_state=7), BasicVariantGenerator)


def test_finite_values_are_known_before_a_search() -> None:
    text = {"model.side_px": "choice(32, 64)", "train.lr": "loguniform(1e-4, 1e-1)"}
    assert space.values(text, "model.side_px") == [32, 64]
    assert space.values(text, "train.lr") == space.values(text, "model.name") == []


@given(low=st.floats(1e-6, 1), span=st.floats(1e-6, 1))
def test_any_range_that_rises_is_taken_and_any_that_falls_is_refused(low: float, span: float) -> None:
    parsed = space.parse({"train.lr": f"loguniform({low}, {low + span})"}, JOB)["train.lr"]
    assert low <= parsed.sample() <= low + span
    with pytest.raises(ConfigError, match=r"train\.lr is not a range.*low < high, low > 0"):
        space.parse({"train.lr": f"loguniform({low + span}, {low})"}, JOB)


@pytest.mark.parametrize(
    ("field", "text", "says"),
    [
        ("train.lerning_rate", "uniform(0, 1)", r"unknown field train\.lerning_rate.*(Did you mean|Known)"),
        ("train.epoch", "choice(1, 2)", r"unknown field train\.epoch\b.*Did you mean 'train\.epochs'"),
        ("lr", "uniform(0, 1)", r"unknown field lr\b"),
        ("train.lr", "logunifrom(1e-4, 1e-1)", r"train\.lr is not a draw.*grid\(…\), choice\(…\), uniform\(…\), loguniform"),
        ("train.lr", "0.1", r"train\.lr is not a draw.*got '0\.1'"),
        ("train.lr", "__import__('os')", r"train\.lr is not a draw"),
        ("train.lr", "uniform(0.1)", r"train\.lr is not a range"),
        ("train.lr", "loguniform(0, 1)", r"train\.lr draws a value the field refuses.*got 0|not a range"),
        ("train.lr", "uniform(a, b)", r"train\.lr is not a range"),
        ("train.lr", "uniform(True, 2)", r"train\.lr is not a range"),
        ("train.lr", "choice()", r"train\.lr has nothing to choose from"),
        ("train.lr", "choice(0.1, -3)", r"train\.lr draws a value the field refuses.*got -3.*a number above 0"),
        (
            "model.name",
            "choice(efficientnet_lite)",
            r"model\.name draws a value the field refuses.*Did you mean 'efficientnet_lite0'",
        ),
        (
            "train.batch_size",
            "choice(16, many)",
            r"train\.batch_size draws a value the field refuses.*got 'many'.*a whole number from 1 up",
        ),
        ("model.dropout", "uniform(0, 1.5)", r"model\.dropout draws a value the field refuses.*got 1\.5.*less than 1"),
        ("train.batch_size", "uniform(16, 64)", r"train\.batch_size .*(whole|integer|choice)"),
        ("run.seed", "choice(1, 2)", r"cannot vary run\.seed.*share table"),
        ("table.version", "choice(1, 2)", r"cannot vary table\.version"),
        ("train.workers", "choice(1, 2)", r"cannot vary train\.workers"),
    ],
)
def test_a_slip_is_one_message(field: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        space.parse({field: text}, JOB)
    assert "\n" not in str(caught.value)
