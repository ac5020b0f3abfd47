"""The projection treats both sides alike, and imports nothing but numpy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from raypipe.watch import projection
from raypipe.watch.projection import median_width, project


def test_it_is_a_function_of_the_union() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(90, 12)) @ rng.normal(size=(12, 12))
    whole = np.concatenate(project(rows[:50], rows[50:]))
    np.testing.assert_array_equal(whole, np.concatenate(project(rows[:20], rows[20:])))
    dead = np.ones((30, 4))
    assert [side.shape for side in project(dead, dead[:9])] == [(30, 1), (9, 1)]


def test_the_width_of_many_rows_is_that_of_a_sample_of_pairs() -> None:
    rng = np.random.default_rng(0)
    many = rng.normal(size=(1500, 8)).astype(np.float32)
    assert len(many) * (len(many) - 1) // 2 > projection.PAIRS
    all_pairs = ((many[:, None] - many[None]) ** 2).sum(2)[np.triu_indices(1500, 1)]
    assert median_width(many, 0) == pytest.approx(np.sqrt(0.5 * np.median(all_pairs)), rel=0.01)


def test_distances_do_not_depend_on_blocks() -> None:
    rng = np.random.default_rng(0)
    reference, batch = rng.normal(size=(1100, 6)), rng.normal(size=(30, 6))
    found = projection.unusual(reference, batch)
    scaled, moved = ((s - reference.mean(0)) / reference.std(0) for s in (reference, batch))
    away = np.sort(np.linalg.norm(moved[:, None] - scaled[None], axis=2), axis=1)[:, :5].mean(1)
    own = np.sort(np.linalg.norm(scaled[:, None] - scaled[None], axis=2), axis=1)[:, 1:6].mean(1)
    assert found == pytest.approx(away / np.median(own), rel=1e-5)


def test_a_sidecar_can_import_it() -> None:
    """Its numpy is another one, and of raypipe it may load nothing heavy."""
    code = (
        "import sys, raypipe.watch.projection, raypipe.watch.alibi_sidecar;"
        "print([n for n in ('ray', 'torch', 'pydantic', 'scipy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
