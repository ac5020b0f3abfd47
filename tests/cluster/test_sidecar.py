"""Arrays cross into another Python environment and back unchanged; no sidecar is half built."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.cluster import sidecar
from raypipe.errors import ClusterError, RaypipeError

# The functions below run in the sidecar. It imports this file by name from the driver's working
# directory.
HERE = "tests.cluster.test_sidecar"


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
@pytest.mark.parametrize("name", ["fastdup", "alibi"])
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
@pytest.mark.parametrize("name", ["fastdup", "alibi"])
def test_the_sidecar_has_its_own_numpy_the_cores_raypipe_and_no_telemetry(name: str) -> None:
    _, facts = sidecar.call(name, f"{HERE}:echo", {}, {})
    assert facts["numpy"].startswith("1.") and np.__version__.startswith("2.")
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


def test_an_unknown_sidecar_is_named() -> None:
    with pytest.raises(RaypipeError, match=r"no such sidecar.*'alibbi'.*Did you mean 'alibi'"):
        sidecar.ensure("alibbi")


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The real builder without 600 MB of wheels: own home, no pins, a probe of the core alone."""
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "tiny.txt").write_text("# no pins\n")
    monkeypatch.setenv("RAYPIPE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sidecar, "LISTS", lists)
    monkeypatch.setattr(
        sidecar,
        "PROBES",
        {"tiny": "import raypipe.errors" if "site-packages" in sidecar.__file__ else "import ray"},
    )
    commands: list[list[str]] = []
    real = sidecar._shell
    monkeypatch.setattr(
        sidecar, "_shell", lambda name, command: (commands.append(command), real(name, command))
    )
    return commands


def test_two_callers_build_once(builds: list[list[str]]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(sidecar.ensure, ["tiny", "tiny"])
    assert first == second == sidecar.ensure("tiny")
    assert sum("venv" in command for command in builds) == 1
    prefix = subprocess.run(
        [first, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    ).stdout
    assert Path(prefix.strip()) == first.parent.parent


def test_a_half_built_one_is_not_used(builds: list[list[str]]) -> None:
    whole = sidecar.ensure("tiny")
    folder = whole.parent.parent
    folder.rename(folder.with_name(folder.name + ".partial"))
    assert sidecar.ensure("tiny") == whole
    assert sum("venv" in command for command in builds) == 2
    assert not list(folder.parent.glob("*.partial"))


def test_one_whose_base_python_is_gone_is_built_again(builds: list[list[str]]) -> None:
    python = sidecar.ensure("tiny")
    (python.parent / python.readlink()).unlink()
    assert not python.exists()
    assert sidecar.ensure("tiny").exists()


def test_other_pins_are_another_sidecar(builds: list[list[str]]) -> None:
    before = sidecar.ensure("tiny")
    (sidecar.LISTS / "tiny.txt").write_text("# other\n")
    assert sidecar.ensure("tiny") != before


def test_a_failed_pip_shows_its_last_lines_and_leaves_nothing(
    builds: list[list[str]], tmp_path: Path
) -> None:
    (sidecar.LISTS / "tiny.txt").write_text(f"{tmp_path}/nowhere-1.0-py3-none-any.whl\n")
    with pytest.raises(
        RaypipeError, match=r"(?s)sidecar tiny cannot be built.*nowhere-1\.0.*PIP_INDEX_URL"
    ):
        sidecar.ensure("tiny")
    assert not [path for path in (tmp_path / "home" / "sidecars").iterdir() if path.is_dir()]


def test_without_a_connection_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterError, match=r"needs Ray, and there is no connection"):
        sidecar.call("alibi", f"{HERE}:echo", {}, {})
