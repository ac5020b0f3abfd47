"""fastdup finds what is planted among distinct images, and flags none of the others."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from raypipe.cluster import sidecar
from raypipe.errors import RaypipeError

pytestmark = pytest.mark.usefixtures("ray_session")
DISTINCT = 40
FIND = "raypipe.tables.fastdup_sidecar:find"


def texture(seed: int) -> Image.Image:
    """Shapes, bands and colours drawn at random over a gradient and grain: no two seeds look alike
    to a network.
    """
    rng = np.random.default_rng(seed)
    ramp = rng.integers(
        0, 256, (int(rng.integers(1, 4)), int(rng.integers(1, 4)), 3), dtype=np.uint8
    )
    image = Image.fromarray(ramp).resize((160, 160), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(1, 12))):
        colour, corner, side = (
            tuple(rng.integers(0, 256, 3).tolist()),
            rng.integers(-20, 140, 2),
            rng.integers(8, 110, 2),
        )
        box = [*corner.tolist(), *(corner + side).tolist()]
        kind = seed % 5
        if kind == 0:
            draw.ellipse(box, fill=colour)
        elif kind == 1:
            draw.rectangle(box, fill=colour)
        elif kind == 2:
            draw.line(box, fill=colour, width=int(rng.integers(1, 14)))
        elif kind == 3:
            draw.polygon(
                [tuple(point) for point in rng.integers(0, 160, (3, 2)).tolist()], fill=colour
            )
        else:
            draw.arc(
                box, 0, int(rng.integers(90, 360)), fill=colour, width=int(rng.integers(2, 12))
            )
    grain = Image.fromarray(rng.integers(0, 256, (160, 160, 3), dtype=np.uint8))
    return Image.blend(image, grain, float(rng.uniform(0.02, 0.12)))


def encode(image: Image.Image, kind: str = "PNG", **how: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def pack(images: list[bytes]) -> dict[str, np.ndarray]:
    return {
        "data": np.frombuffer(b"".join(images), dtype=np.uint8),
        "offsets": np.cumsum([0, *map(len, images)], dtype=np.int64),
    }


@pytest.fixture(scope="module")
def planted() -> tuple[dict[str, np.ndarray], dict[str, int]]:
    distinct = [texture(seed) for seed in range(DISTINCT)]
    extra = {
        "copy": encode(distinct[0]),
        "jpeg": encode(distinct[1], "JPEG", quality=85),
        "resized": encode(
            distinct[2].resize((128, 128), Image.Resampling.LANCZOS), "JPEG", quality=90
        ),
        "black": encode(Image.new("RGB", (160, 160), (0, 0, 0))),
        "white": encode(Image.new("RGB", (160, 160), (255, 255, 255))),
        "blurred": encode(distinct[3].filter(ImageFilter.GaussianBlur(12))),
        "broken": encode(distinct[4])[:60],
    }
    images = [encode(image) for image in distinct] + list(extra.values())
    found, facts = sidecar.call("fastdup", FIND, pack(images), {"threshold": 0.8})
    assert facts["images"] == len(images)
    return found, {name: DISTINCT + i for i, name in enumerate(extra)}


def test_copies_are_found_and_distinct_images_are_not(
    planted: tuple[dict[str, np.ndarray], dict[str, int]],
) -> None:
    found, at = planted
    pairs = {
        (int(a), int(b)): float(s)
        for a, b, s in zip(found["pair_a"], found["pair_b"], found["pair_similarity"], strict=True)
    }
    assert pairs[(0, at["copy"])] == pytest.approx(1, abs=1e-4)
    assert pairs[(1, at["jpeg"])] > 0.96
    assert pairs[(2, at["resized"])] > 0.9
    assert all(a < b for a, b in pairs)
    among_distinct = [s for (a, b), s in pairs.items() if b < DISTINCT]
    assert max(among_distinct, default=0.0) < 0.96, "distinct images were taken for duplicates"
    assert found["component"][0] == found["component"][at["copy"]] != -1


def test_dark_bright_blurred_and_broken_images_show_in_the_statistics(
    planted: tuple[dict[str, np.ndarray], dict[str, int]],
) -> None:
    found, at = planted
    assert found["stat_mean"][at["black"]] < 1
    assert found["stat_mean"][at["white"]] > 254
    assert found["stat_blur"][at["blurred"]] < 0.2 * np.nanmin(found["stat_blur"][:DISTINCT])
    assert found["invalid"].tolist() == [at["broken"]]
    assert np.isnan(found["stat_mean"][at["broken"]])
    assert not np.isnan(found["stat_mean"][:DISTINCT]).any()


def test_flat_images_are_unlike_all_others(
    planted: tuple[dict[str, np.ndarray], dict[str, int]],
) -> None:
    found, at = planted
    assert set(found["outlier"].tolist()) & {at["black"], at["white"], at["blurred"]}
    assert (np.diff(found["outlier_similarity"]) >= 0).all()


def test_distinct_images_alone_give_no_duplicates() -> None:
    found, _ = sidecar.call(
        "fastdup",
        FIND,
        pack([encode(texture(seed)) for seed in range(100, 130)]),
        {"threshold": 0.96},
    )
    assert len(found["pair_a"]) == 0
    assert (found["component"] == -1).all()
    assert found["pair_a"].dtype == np.int64


def test_foreign_formats_are_refused() -> None:
    images = [encode(texture(seed)) for seed in range(11)] + [encode(texture(11), "BMP")]
    with pytest.raises(RaypipeError, match=r"image 11 is neither PNG nor JPEG"):
        sidecar.call("fastdup", FIND, pack(images), {})


def test_too_few_images_and_unknown_options_are_named() -> None:
    with pytest.raises(RaypipeError, match=r"needs 10 images, got 3"):
        sidecar.call("fastdup", FIND, pack([encode(texture(seed)) for seed in range(3)]), {})
    with pytest.raises(RaypipeError, match=r"unknown options \['treshold'\]"):
        sidecar.call(
            "fastdup", FIND, pack([encode(texture(seed)) for seed in range(10)]), {"treshold": 0.9}
        )


# Every name look-up and connection of the process is written down and refused.
SPY = """
import socket, sys, io, numpy as np
seen = open(sys.argv[1], "a", buffering=1)
def refuse(*a, **k):
    seen.write(f"NETWORK {a[:2]}\\n")
    raise OSError("refused by the test")
socket.getaddrinfo = refuse
socket.socket.connect = lambda self, at: refuse(at) if self.family != socket.AF_UNIX else None
from PIL import Image
from raypipe.tables.fastdup_sidecar import find
images = []
for seed in range(12):
    image = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(image, "PNG")
    images.append(image.getvalue())
data = np.frombuffer(b"".join(images), dtype=np.uint8)
find({"data": data, "offsets": np.cumsum([0, *map(len, images)])}, {})
seen.write("DONE\\n")
"""


@pytest.mark.parametrize("quiet", [True, False])
def test_no_network(quiet: bool, tmp_path: Path) -> None:
    """With our settings nothing is looked up; without them fastdup asks the package index on
    import, so the spy can see.
    """
    environment = {k: v for k, v in os.environ.items() if k not in sidecar.QUIET} | {
        "PYTHONPATH": str(Path.cwd())
    }
    environment |= sidecar.QUIET if quiet else {"SENTRY_OPT_OUT": "1"}
    seen = tmp_path / "seen"
    command = [sidecar.ensure("fastdup"), "-c", SPY, seen]
    subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    text = seen.read_text()
    assert text.rstrip().endswith("DONE")
    assert ("NETWORK" in text) is not quiet
