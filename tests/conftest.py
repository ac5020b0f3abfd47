"""What all tests share: one Ray cluster a session, small pictures drawn by seed, and the command
line in this process.
"""

from __future__ import annotations

import os
import sys

from raypipe.cluster import connect

# Before anything imports Ray or MLflow: both read their switches at import.
connect.prepare_environment()

import functools  # noqa: E402
import gc  # noqa: E402
import io  # noqa: E402
import logging  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import sqlite3  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from PIL import Image, ImageDraw  # noqa: E402

from raypipe import errors  # noqa: E402
from raypipe.registry import made_whole  # noqa: E402

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("raypipe", deadline=None)
hypothesis.settings.load_profile("raypipe")
# Only a file with this word may start or join a Ray cluster in the process of the tests: tests
# elsewhere cannot (`no_cluster`).
USES_RAY = re.compile(r"\bray_session\b")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Whatever the modules of 5,000 tests make stays: the garbage collector need not look at it."""
    gc.disable()
    try:
        result = yield
    finally:
        gc.freeze()
        gc.enable()
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`-n 2`: all files that may use a Ray cluster run in one process, one after the other, any
    other file in one of the two.

    So there is one cluster, and a file's fixtures are made once. (`--dist loadgroup` groups nothing
    with pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class OneCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "ray" if _uses_ray(config.rootpath / file) else file

    return OneCluster(config, log)


@functools.cache
def _uses_ray(file: Path) -> bool:
    return bool(USES_RAY.search(file.read_text("utf-8")))


@pytest.fixture(autouse=True)
def no_cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without `ray_session` starts no cluster: it runs beside another process's."""
    if not _uses_ray(request.path):
        import ray

        def refused(*given: object, **more: object) -> None:
            raise AssertionError(f"{request.path.name} uses Ray without the fixture ray_session")

        monkeypatch.setattr(ray, "init", refused)


@pytest.fixture(autouse=True)
def secrets_of_one_test() -> Iterator[None]:
    """A test's secrets are forgotten after it.

    A process looks for each secret that it knows in each line that it logs. Tests that draw secrets
    would leave thousands: a line of another test took seconds.
    """
    before = set(errors._kept)
    yield
    errors._kept.clear()
    errors._kept.update(before)


@pytest.fixture(scope="session", autouse=True)
def quick_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """MLflow makes the tables of a new SQLite store once for each process of tests: hundreds of
    stores are copies of that file.

    And no commit to SQLite waits for the disk. Tests kill processes, and what a process has
    committed survives that; after a power cut nobody reads these stores.
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    made = tmp_path_factory.mktemp("mlflow") / "new.db"
    make = made_whole.make

    def copied(file: Path) -> None:
        if not made.exists():
            make(made)
        shutil.copyfile(made, file)

    def connected(connection: Any, record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", connected)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(made_whole, "make", copied)
        yield
    event.remove(Engine, "connect", connected)


Draw = Callable[..., bytes]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A local cluster of two CPUs; what the tests start joins it. Workers import `tests` from the
    working directory.
    """
    import ray

    from raypipe.search.trials import tune_patches
    from tests import forked_workers

    before = os.environ.pop("RAY_ADDRESS", None)
    # A job runs `python`: the cluster's must be the one of these tests, as if it were activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # As raypipe starts a cluster for a search. Nobody looks at metrics.
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    connect.prepare_workers(tune_patches.PRELOAD)
    with forked_workers.installed(tmp_path_factory.mktemp("forks")):
        context = ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=300 * 2**20,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    # What is started from here may be a cluster of its own, for which raypipe sets it.
    del os.environ[connect.PRELOAD], os.environ[connect.WORKER_PRELOAD]
    # A second cluster on this host would break Ray Train's placement-group cleaner.
    address = os.environ["RAY_ADDRESS"] = context.address_info["address"]
    connect._quiet_data()
    yield address
    ray.shutdown()
    os.environ.pop("RAY_ADDRESS", None)
    if before is not None:
        os.environ["RAY_ADDRESS"] = before


@pytest.fixture
def own_ray() -> Iterator[dict[str, str]]:
    """Variables of a process that starts a Ray cluster of its own.

    Ray's test cluster records itself as `ray start` does, and other terminals of this host must not
    join it. The path is short, as the paths of Ray's sockets have to be.
    """
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rp", ignore_cleanup_errors=True) as name:
        yield {"RAY_TMPDIR": name}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """caplog hears raypipe's log, whatever other tests have done: a command takes the log over, and
    a connection to Ray silences the handlers of Ray Data, where pytest puts its own.
    """
    monkeypatch.setattr(logging.getLogger("raypipe"), "propagate", True)
    monkeypatch.setattr(caplog.handler, "level", logging.NOTSET)


def encode(image: Image.Image, kind: str = "PNG", **how: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def texture(seed: int, side_px: int = 64) -> Image.Image:
    """Shapes over a gradient with grain: to a perceptual hash or a network no two look alike."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (*rng.integers(1, 4, 2), 3), dtype=np.uint8))
    image = image.resize((side_px, side_px), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(2, 9))):
        corner, size = rng.uniform(-0.1, 0.9, 2) * side_px, rng.uniform(0.1, 0.7, 2) * side_px
        shape = (draw.ellipse, draw.rectangle)[seed % 2]
        shape(
            [*corner.tolist(), *(corner + size).tolist()],
            fill=tuple(rng.integers(0, 256, 3).tolist()),
        )
    grain = Image.fromarray(rng.integers(0, 256, (side_px, side_px, 3), dtype=np.uint8))
    return Image.blend(image, grain, 0.1)


def striped(seed: int, label: str, side_px: int = 32) -> Image.Image:
    """`warm`: reddish upright stripes; `cold`: bluish level ones. Period, phase, colour and grain
    differ by seed.
    """
    rng = np.random.default_rng(seed)
    wave_S = np.sin(np.arange(side_px) * 2 * np.pi / rng.uniform(4, 12) + rng.uniform(0, 6))
    wave_HW = (
        np.tile(wave_S, (side_px, 1)) if label == "warm" else np.tile(wave_S[:, None], (1, side_px))
    )
    tint = np.array([1.0, 0.6, 0.4] if label == "warm" else [0.4, 0.6, 1.0]) * rng.uniform(
        0.8, 1.1, 3
    )
    pixels_HWC = (120 + 70 * wave_HW)[..., None] * tint + rng.normal(0, 18, (side_px, side_px, 3))
    return Image.fromarray(pixels_HWC.clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def textured() -> Draw:
    """`textured(seed, side_px=64, kind="PNG", **how)` -> encoded bytes of a picture of its own."""
    return lambda seed, side_px=64, kind="PNG", **how: encode(texture(seed, side_px), kind, **how)


@pytest.fixture(scope="session")
def two_hundred() -> list[bytes]:
    """Encoded images of ten kinds: JPEG, PNG, grey, RGBA, CMYK, turned by EXIF and others."""
    from tests.mixed_images import mixed_images

    return mixed_images()


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 PNGs of 32 px, and labels.csv (file,label): 30 `warm` and 30 `cold`. Read it,
    do not change it.
    """
    folder = tmp_path_factory.mktemp("photos")
    lines = ["file,label"]
    for seed in range(60):
        label = ("warm", "cold")[seed % 2]
        (folder / f"{seed:02d}.png").write_bytes(encode(striped(seed, label)))
        lines.append(f"{seed:02d}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted or not os.path.ismount(folder):
        pytest.skip("this user may not mount")
    yield folder
    # -l: a file may still be open.
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("train", "x.yaml", …)` -> (exit code, stdout, stderr) of the real command line, without
    5 s of imports a call.
    """
    from raypipe import main as command_line

    monkeypatch.setattr(
        "raypipe.cluster.connect.close", lambda: None
    )  # the session's cluster is not the verb's to stop

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = command_line.main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run
