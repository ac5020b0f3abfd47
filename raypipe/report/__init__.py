"""One HTML page that shows what a run found: verdicts first, evidence and pictures below, lineage last. The choices:

- One file, no JavaScript, nothing loaded, and a content security policy in the page that makes the browser hold that promise:
  it opens from a mail, an MLflow artifact view or a USB stick on the shop floor.
- Autoescape on and no `safe` filter anywhere: Python hands the template numbers and strings, never markup.
- Charts are SVG that follows light and dark (charts.py).
- Pictures shrink to 160 px, PNG or JPEG, whichever is smaller: 48 photographs of solar cells add 0.2 MB.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from raypipe.report.charts import curves, histogram, parallel, scatter

THUMBNAIL_PX = 160
Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Header:
    title: str
    subtitle: str
    run_id: str
    generated_at: datetime
    facts: Facts = ()


@dataclass(frozen=True)
class Picture:
    image: bytes  # encoded JPEG, PNG or WebP
    caption: str  # what it is
    note: str = ""  # why it is shown


@dataclass(frozen=True)
class Evidence:
    detector: str
    on: str  # what it looked at: embeddings, predictions, brightness ...
    statistic: float
    p_value: float | None
    threshold: float | None
    is_drift: bool


@dataclass(frozen=True)
class Check:
    name: str
    is_drift: bool
    p_value: float
    alpha: float
    reference_images: int
    batch_images: int
    evidence: tuple[Evidence, ...] = ()
    reference_scores: np.ndarray | Sequence[float] = ()  # 0..1
    batch_scores: np.ndarray | Sequence[float] = ()
    score_name: str = "Model score"
    projection: tuple[np.ndarray, np.ndarray] | None = (
        None  # reference_N2, batch_M2; near means similar
    )
    unusual: tuple[Picture, ...] = ()  # of the batch
    typical: tuple[Picture, ...] = ()  # of the reference


@dataclass(frozen=True)
class Dropped:
    picture: Picture
    reason: str
    partner: Picture | None = None  # for a duplicate: the image that stayed
    kept: bool = False  # flagged only: the policy does not drop for this reason


@dataclass(frozen=True)
class Cleaning:
    kept: int
    dropped: int
    verdict_counts: Mapping[str, int] = field(default_factory=dict)
    pictures: tuple[Dropped, ...] = ()


@dataclass(frozen=True)
class Trial:
    rank: int  # 1 is best
    trial: str
    hyperparameters: Mapping[str, Any]
    metric: float | None  # None: the trial failed
    epochs: int
    stopped_early: bool = False
    curve: Sequence[float] = ()  # the metric after each epoch


@dataclass(frozen=True)
class Search:
    metric: str
    rows: tuple[Trial, ...]
    full_epochs: int | None = None  # what all trials would have taken to their ends
    importance: Mapping[str, float] = field(default_factory=dict)  # shares by hyperparameter


@dataclass(frozen=True)
class Slice:
    name: str
    images: int
    champion: float  # accuracy, 0..1, on the same pinned images as the challenger's
    challenger: float
    difference: float
    p_value: float | None  # of the paired test


@dataclass(frozen=True)
class Gate:
    promoted: bool
    reason: str
    champion: str | int
    challenger: str | int
    rows: tuple[Slice, ...] = ()


@dataclass(frozen=True)
class Step:
    name: str
    what: str
    seconds: float | None = None
    status: str = "done"  # done, failed, skipped, or a word of your own


@dataclass(frozen=True)
class Timeline:
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Lineage:
    facts: Facts
    config_yaml: str = ""


@dataclass(frozen=True)
class Page:
    header: Header
    checks: tuple[Check, ...] = ()
    gate: Gate | None = None
    search: Search | None = None
    cleaning: Cleaning | None = None
    timeline: Timeline | None = None
    lineage: Lineage | None = None


def render(page: Page) -> str:
    """The page as HTML; equal input gives equal bytes."""
    folder = FileSystemLoader(Path(__file__).parent)
    env = Environment(
        loader=folder,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {do.__name__: do for do in (number, chance, points, thumbnail)}
    env.filters |= {draw.__name__: draw for draw in (histogram, scatter, curves, parallel)}
    return env.get_template("report.html.j2").render(page=page)


def write(page: Page, path: Path) -> Path:
    """Render to `path`; a reader sees the old page or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(render(page), encoding="utf-8")
    return unfinished.replace(path)


def number(value: Any) -> str:
    """1234567 -> 1,234,567; 0.000123456 -> 0.0001235; 1e-07 -> 1e-7; anything that is no number as it is."""
    if isinstance(value, float):
        text = f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}".replace("e-0", "e-")
        return (
            text.replace("-", "\N{MINUS SIGN}", 1) if value < 0 else text
        )  # an exponent keeps its hyphen: people copy it
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def chance(p: float) -> str:
    """A p-value in digits anybody reads. A plain 0 is a permutation test's "never seen", which is not "< 0.000001"."""
    return (
        f"{p:.{max(2, 1 - math.floor(math.log10(p)))}f}"
        if p >= 1e-6
        else "≈ 0"
        if p == 0
        else "< 0.000001"
    )


def points(difference: float) -> str:
    """A difference of two shares in percentage points, always signed, but never "-0.0"."""
    return f"{round(100 * difference, 1) or 0.0:+.1f}".replace("-", "\N{MINUS SIGN}")


def thumbnail(image: bytes) -> str | None:
    """A data URI of at most 160 px, PNG or JPEG, whichever is smaller; None for bytes that are no picture we can decode."""
    try:
        picture: Image.Image = Image.open(io.BytesIO(image), formats=("JPEG", "PNG", "WEBP"))
        if picture.mode.startswith(
            "I"
        ):  # 16-bit gray of industrial cameras: convert() would clip it to white
            deep = np.asarray(picture, np.float32)
            picture = Image.fromarray((deep * (255 / max(1.0, deep.max()))).astype(np.uint8))
        picture = picture.convert("L" if picture.mode == "L" else "RGB")
        picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
        encoded = {"jpeg": io.BytesIO(), "png": io.BytesIO()}
        picture.save(encoded["jpeg"], "jpeg", quality=85)
        picture.save(encoded["png"], "png", optimize=True)
    except Exception:  # a decoder may raise anything on hostile bytes, and one bad picture must not cost the whole report
        return None
    kind, data = min(
        ((k, buffer.getvalue()) for k, buffer in encoded.items()),
        key=lambda kind_data: len(kind_data[1]),
    )
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
