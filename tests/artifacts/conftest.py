from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

log = logging.getLogger("raypipe")


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """As a Console leaves it: messages are let through."""
    before = log.level
    log.setLevel(logging.INFO)
    yield
    log.setLevel(before)
