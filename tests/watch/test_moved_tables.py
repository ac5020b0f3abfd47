"""Tables that are restored, renamed, vacuumed or overwritten between checks: no row twice, no lie."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from deltalake import DeltaTable, write_deltalake

from raypipe.models.zoo import ImageModel
from raypipe.registry import package, promote, tracking
from raypipe.registry.package import Package, Reference
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve.batch import PredictConfig
from raypipe.tables.table import Columns, TableConfig
from raypipe.watch import check
from raypipe.watch.detect import DriftConfig
from raypipe.watch.windows import Waiting
from tests.serve.conftest import CFG, CLASSES, Registered, registered
from tests.tables import handmade as by_hand
from tests.watch.test_spans import Nights
from tests.watch.test_windows import Night, night

__all__ = ["night", "registered"]  # the fixtures
pytestmark = pytest.mark.usefixtures("ray_session")


def test_rows_that_a_restore_brings_back_were_checked_before(night: Night) -> None:
    assert sum(night.check().values()) == 30  # type: ignore[union-attr]
    DeltaTable(night.case.uri).restore(0)
    night.case.add(40, 5)
    assert sum(night.check().values()) == 5  # type: ignore[union-attr]
    DeltaTable(night.case.uri).restore(2)
    assert night.check() == Counter(), "these 20 images were in window 1"
    assert any("was restored" in text for text in night.said)
    # What comes beside them is in a window, once; also after a kill.
    night.case.add(50, 5)
    night.windows().next()
    found = night.check()
    assert isinstance(found, Counter) and {i for i, _ in found} == {f"i{n}" for n in range(50, 55)}
    night.case.add(60, 4)
    found = night.check()
    assert isinstance(found, Counter) and {i for i, _ in found} == {f"i{n}" for n in range(60, 64)}
