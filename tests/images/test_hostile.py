"""Nothing in a file can crash or stall the decoder, or take memory out of proportion: it is an
image, or is told why not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.images import hostile

REASONS = {
    "accepted",
    "empty",
    "not_an_image",
    "too_large",
    "too_many_scans",
    "unsupported",
    "broken",
}
SECONDS = 10.0  # for four decodes of one file; the slowest takes 0.3 s on a quiet machine
# Address space beyond what an idle decoder has mapped. 64 megapixels of RGB take 256, and a copy.
MEGABYTES = 1_500

CHILD = """
import resource, runpy, sys
import torch
from raypipe.images import decode
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + {megabytes} * 2**20,) * 2)
sys.argv = ["hostile", sys.argv[1]]
runpy.run_module("tests.images.hostile", run_name="__main__")
"""


def decode_all(folder: Path) -> list[dict[str, Any]]:
    """What a process of its own says about each file, having come to the end of the folder within
    its memory.
    """
    code = CHILD.format(megabytes=MEGABYTES)
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, f"died after {lines[-1:]}: {child.stderr[-2_000:]}"
    assert len(lines) == sum(p.is_file() for p in folder.rglob("*"))
    return lines


def check(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert set(line["verdicts"].values()) <= REASONS, line
        assert line["seconds"] < SECONDS, line
        said = line["verdicts"]
        assert said["inspect"] == said["decode"] == said["small"], (
            f"ingest and training disagree: {line}"
        )
        assert said["inspect"] != "accepted" or said["any"] == "accepted", line


def test_cut_flipped_exploding_and_renamed_files(tmp_path: Path) -> None:
    count = hostile.generate(tmp_path)
    lines = decode_all(tmp_path)
    assert count == len(lines) > 500
    check(lines)
    said = {line["name"]: line["verdicts"]["inspect"] for line in lines}
    bombs = {name: verdict for name, verdict in said.items() if name.startswith("bomb-")}
    assert bombs == {
        "bomb-30000.png": "too_large",
        "bomb-scans.jpg": "too_many_scans",
        "bomb-webp.webp": "too_large",
        "bomb-text.png": "not_an_image",
        "bomb-nested-text.png": "accepted",  # one level is unpacked, and its 300 kB are harmless
    }
    assert said["renamed-JPEG.png"] == said["renamed-WEBP.png"] == said["pixel.png"] == "accepted"
    assert said["renamed-TIFF.png"] == said["renamed-BMP.png"] == "not_an_image"
    for kind in ("jpeg", "png", "webp"):
        cuts = [
            verdict
            for name, verdict in said.items()
            if name.startswith("cut-") and name.endswith(kind)
        ]
        assert len(cuts) >= 39 and set(cuts) <= {"broken", "not_an_image"}, (
            "a cut image was accepted"
        )
    assert "broken" in said.values()


@pytest.mark.slow  # a download and a minute
def test_the_images_that_pillow_tests_itself_with() -> None:
    try:
        folder = hostile.pillows_own()
    except OSError as e:
        pytest.skip(str(e))
    lines = decode_all(folder)
    assert len(lines) > 1_000
    check(lines)
    verdicts = [line["verdicts"] for line in lines]
    assert sum(v["inspect"] == "accepted" for v in verdicts) > 400
    assert sum(v["any"] == "accepted" for v in verdicts) > 550
