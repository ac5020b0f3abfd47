"""Arrays cross into another Python environment and back unchanged."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.cluster import sidecar
from raypipe.cluster.sidecars import pins
from raypipe.errors import ClusterError, RaypipeError

# The functions below run in the sidecar. It imports this file by name from the driver's working
# directory.
HERE = "tests.cluster.test_sidecar"
# fastdup has no release for Python 3.13.
NAMES = ["fastdup", "alibi"] if sys.version_info < (3, 13) else ["alibi"]


def echo(
    arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    import raypipe

    quiet = {name: os.environ.get(name) for name in sidecar.QUIET}
    return arrays, {
        "options": options,
        "numpy": np.__version__,
        "prefix": sys.prefix,
        "raypipe": raypipe.__file__,
        "quiet": quiet,
    }


def fail(
    arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    raise KeyError("no such thing as a free lunch")


def die(
    arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    os._exit(3)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", NAMES)
def test_arrays_and_json_come_back_unchanged(name: str) -> None:
    arrays = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f16": np.array([0.5, np.nan, np.inf], dtype=np.float16),
        "i64": np.array([-(2**60), 2**60]),
        "u8": np.zeros((2, 4, 4, 3), dtype=np.uint8),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 7), dtype=np.float32),
        "scalar": np.array(3.0),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "text": np.array(["mono", "polycrystalline"]),
    }
    options = {"alpha": 0.01, "names": ["a", "ü"], "none": None}
    back, facts = sidecar.call(name, f"{HERE}:echo", arrays, options)
    assert set(back) == set(arrays)
    for key, array in arrays.items():
        assert (back[key].dtype, back[key].shape) == (array.dtype, array.shape), key
        np.testing.assert_array_equal(back[key], array)
    assert facts["options"] == options


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", NAMES)
def test_the_sidecar_has_its_own_numpy_the_cores_raypipe_and_no_telemetry(name: str) -> None:
    _, facts = sidecar.call(name, f"{HERE}:echo", {}, {})
    assert f"numpy=={facts['numpy']}" in pins.pins(name, pins.here())
    assert facts["numpy"] != np.__version__
    assert Path(facts["prefix"]) == sidecar.ensure(name).parent.parent != Path(sys.prefix)
    assert Path(facts["raypipe"]).parent == Path(sidecar.__file__).parent.parent
    assert facts["quiet"] == sidecar.QUIET


@pytest.mark.usefixtures("ray_session")
def test_an_error_in_the_sidecar_names_itself() -> None:
    with pytest.raises(
        RaypipeError,
        match=r"(?s)test_sidecar:fail failed in the sidecar alibi.*KeyError: 'no such thing",
    ) as caught:
        sidecar.call("alibi", f"{HERE}:fail", {}, {})
    assert "raise KeyError" in str(caught.value)


@pytest.mark.usefixtures("ray_session")
def test_a_sidecar_that_dies_is_a_cluster_error() -> None:
    with pytest.raises(ClusterError, match=r"The sidecar alibi was lost"):
        sidecar.call("alibi", f"{HERE}:die", {}, {})


def test_objects_never_cross() -> None:
    with pytest.raises(ValueError, match=r"Object arrays cannot be saved"):
        sidecar._pack({"x": np.array([{}, []], dtype=object)})


def test_without_a_connection_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterError, match=r"needs Ray, and there is no connection"):
        sidecar.call("alibi", f"{HERE}:echo", {}, {})
