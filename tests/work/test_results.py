"""What verbs say to people."""

# Starts no Ray cluster.
from __future__ import annotations

from pathlib import Path

from raypipe.registry.promote import ModelVersion
from raypipe.work.results import Registered


def test_the_command_that_promotes_a_version_can_be_typed() -> None:
    """It named no configuration, which `raypipe promote` needs; and a folder may have a blank."""
    second, first = (ModelVersion("cells", number, "uri", {}) for number in (2, 1))
    said = str(Registered(second, first, "sqlite://").facts({}, Path("my runs/best.yaml"))["model"])
    assert "champion stays cells/1" in said
    assert "raypipe promote 'my runs/best.yaml' --version 2 " in said
    only = Registered(first, first, "sqlite://").facts({}, Path("best.yaml"))
    assert only["model"] == "cells/1 (champion)"
