"""What the story says of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from raypipe.quickstart.story import _searched
from raypipe.registry.versions import ModelVersion


def test_a_loss_is_no_share() -> None:
    """With train.stopping.metric=val_loss the best trial had a loss of "45.3%"."""
    found: Any = SimpleNamespace(
        drawn=4, metric="val_loss", trials=[SimpleNamespace(metric=0.4531)]
    )
    said = _searched(found, ModelVersion("solar", 1, "uri", {}))
    assert said == "4 trials, best val_loss 0.4531, registered as solar/1"
