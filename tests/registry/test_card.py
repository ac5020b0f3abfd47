"""A card is complete for every task, and what users wrote in names stays text."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import numpy as np
import pytest

from raypipe.models.labels import NUMERIC, Kind
from raypipe.models.quality import quality
from raypipe.models.tasks import Task
from raypipe.registry.card import Card, Judged, SliceMetrics, html, markdown

HOSTILE = ("<script>alert(1)</script>", "a|b", "[x](http://e.vil)", "`cat`\nnew", "ä\\")
RNG = np.random.default_rng(2)


def card(kind: Kind, classes: tuple[str, ...] = HOSTILE, use: str = "") -> Card:
    task = Task(kind, classes if kind not in NUMERIC else ("value",))
    width = len(task.classes)
    scores_NC = RNG.dirichlet(np.ones(width), 60) if width > 1 else RNG.random((60, 1))
    targets_NC = np.eye(width)[RNG.integers(0, width, 60)] if width > 1 else RNG.random((60, 1))
    counts = tuple((name, 9 + i) for i, name in enumerate(classes))
    judged = Judged(
        split="val",
        caution="It chose the epoch.",
        quality=quality(task, scores_NC, targets_NC, {"accuracy": 0.51234, "mae": 1.25}),
        slices=(SliceMetrics("day", 40, {"mae": 1.0}), SliceMetrics(HOSTILE[0], 20, {"mae": 2.0})),
    )
    return Card(
        name=HOSTILE[0],
        task=task,
        made_at=datetime(2026, 11, 23, tzinfo=timezone.utc),
        facts=(("Backbone", "small_cnn"), ("Key", "abc")),
        data=(("Table", "t@v3"), ("Labelled images", "train 100, val 60")),
        balance=() if kind in NUMERIC else counts,
        quantiles=(("least", 0.125), ("all", 0.875)) if kind in NUMERIC else (),
        judged=judged,
        calibrated="",
        intended_use=use,
        data_licence="",
        licences=(("numpy", "2.4.6", "BSD-3-Clause"),),
        environment=(("Python", "3.11"),),
    )


def test_what_the_rows_by_source_leave_out_is_said() -> None:
    plain = card("single_label")
    assert plain.judged is not None and "without an id of their own" not in markdown(plain)
    judged = replace(plain.judged, left_out=1, unclear=2)
    said = markdown(replace(plain, judged=judged))
    assert "1 more source, later in the alphabet, are left out" in said
    assert "2 more images without an id of their own" in said


@pytest.mark.parametrize("kind", ["single_label", "multi_label", "probability", "regression"])
def test_every_task_has_its_whole_card(kind: Kind) -> None:
    page, text = html(card(kind)), markdown(card(kind))
    for heading in ("Intended use", "How good it is", "What it was made from", "What it needs"):
        assert f"<h2>{heading}</h2>" in page and f"## {heading}\n" in text
    for said in ("51.2 %", "t@v3", "It chose the epoch.", "BSD-3-Clause", "registry.intended_use"):
        assert said in page and said in text
    assert ("Training images by class" in page) == (kind not in NUMERIC)
    for said in ("Training labels", "0.125", "0.875"):
        assert (said in page) == (said in text) == (kind in NUMERIC)
    assert ("By class, worst first" in page) == (kind not in NUMERIC)
    assert ('class="matrix"' in page) == (kind == "single_label")
    assert ("Below the dotted line" in page) == (kind != "regression")
    assert ("On the dotted line a prediction is its label" in page) == (kind in NUMERIC)
    assert "By source" in page and "By source" in text


def test_the_share_of_a_tag_is_of_the_images() -> None:
    """It was of all tags together: of 100 images a tag on 80 of them had 57.1 %."""
    tagged = replace(card("multi_label"), balance=(("a", 80), ("b", 60)), trained=100)
    assert "| a | 80 | 80.0 % |" in markdown(tagged) and "| b | 60 | 60.0 % |" in markdown(tagged)
    one = replace(card("single_label"), balance=(("a", 80), ("b", 20)))
    assert "| a | 80 | 80.0 % |" in markdown(one)


def test_sources_that_are_left_out_are_said() -> None:
    """The card of a table of a hundred cameras had thirty of them, without a word."""
    whole = card("single_label")
    cut = replace(whole, judged=replace(whole.judged, left_out=70))
    assert "70 more sources, later in the alphabet, are left out." in markdown(cut)
    assert "left out" not in markdown(whole)


def test_names_of_users_are_text_and_never_markup() -> None:
    page, text = html(card("single_label")), markdown(card("single_label"))
    assert "<script" not in page and "<script" not in text
    # A cell holds one cell: its bars are escaped, its line does not break.
    for line in text.splitlines():
        if line.startswith("| a"):
            assert line.startswith("| a\\|b |")
    assert "\\[x](http" in text and "\\`cat\\` new" in text


def test_underscores_and_tildes_of_a_name_are_no_emphasis() -> None:
    """The classes `__init__` and `_x_` stood in bold and in italics; small_cnn was right."""
    names = ("__init__", "_x_", "a__b", "~~old~~", "big_red_cell")
    text = markdown(card("single_label", names))
    for said in (r"\_\_init\_\_", r"\_x\_", r"a\_\_b", r"\~\~old\~\~", "big_red_cell"):
        assert f"| {said} | " in text
    assert "Backbone: small_cnn\n" in text


@pytest.mark.parametrize(
    "start", ["# Best", "> Best", "- Best", "===", "<b>", "![x](y)", "\n\n# Best"]
)
def test_the_intended_use_is_one_paragraph(start: str) -> None:
    use = f"{start}\n\n# Safe for surgery\n<script>alert(1)</script> | [a](http://e.vil) *sure*"
    text = markdown(card("single_label", use=use))
    line = next(line for line in text.splitlines() if "surgery" in line)
    assert not line.startswith(("#", ">", "-", "=")) and "sure\\*" in line
    assert "<" not in line and "[a](" not in line.replace("\\[", "")
    assert "<script" not in html(card("single_label", use=use))


def test_many_classes_are_listed_by_their_mistakes_and_not_as_a_matrix() -> None:
    page = html(card("single_label", tuple(f"class {i:03d}" for i in range(200)), "For tests."))
    assert 'class="matrix"' not in page and "Most frequent mistakes" in page
    assert "188 more" in page, "of 200 classes twelve are open"
    assert "For tests." in page and len(page) < 400_000
