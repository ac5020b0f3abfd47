"""How long an image takes, from its table to pixels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.feed import image_seconds
from raypipe.feed.dataset import FeedConfig, pin
from raypipe.feed.encoded import encoded
from raypipe.feed.locate import locate
from raypipe.images.decode import decode_good
from raypipe.tables.table import TableConfig

FEED = FeedConfig()


def test_an_image_takes_its_part_of_a_row_group_and_its_own_decoding(
    half_labelled: TableConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group takes two seconds to be read, and an image a tenth to be decoded."""
    pinned = pin(half_labelled, FEED)
    now, reads = [0.0], list[Any]()

    def read(*given: Any) -> Any:
        now[0] += 2.0
        reads.append(given)
        return encoded(*given)

    def decode(images: Any, *more: Any) -> Any:
        now[0] += 0.1 * len(images)
        found = decode_good(images, *more)
        assert len(found.good) == len(images)
        return found

    monkeypatch.setattr(image_seconds, "encoded", read)
    monkeypatch.setattr(image_seconds, "decode_good", decode)
    monkeypatch.setattr(image_seconds, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    images = int(locate(pinned, "val", FEED).sizes_F[0])
    took_s = image_seconds.measured(pinned, "val", 32, FEED)
    assert took_s == pytest.approx(2.0 / images + 0.1)
    assert len(reads) == 1, "it was slow enough to be known"
    assert image_seconds.measured(pinned, "no such split", 32, FEED) == 0


def test_the_fastest_of_few_row_groups_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one of them waits for others."""
    took_s = [0.03, 0.001, 0.002, 0.0001]
    small = SimpleNamespace(bytes=1000)
    rows = SimpleNamespace(fragments=[small] * 9)
    monkeypatch.setattr(image_seconds, "locate", lambda *given: rows)
    monkeypatch.setattr(image_seconds, "_of_group", lambda rows, group, *more: took_s[group])
    nothing: Any = None
    assert image_seconds.measured(nothing, "val", 32, FEED) == 0.001
    # One of half a gigabyte is not read for an estimate.
    rows.fragments = [SimpleNamespace(bytes=500_000_000)] + [small] * 3
    assert image_seconds.measured(nothing, "val", 32, FEED) == 0.0001
    rows.fragments = rows.fragments[:1]
    assert image_seconds.measured(nothing, "val", 32, FEED) == 0
