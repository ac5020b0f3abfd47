"""One HTML page that shows what a run found: verdicts first, evidence and pictures below, lineage last. The choices:

- One file, no JavaScript, nothing loaded, and a content security policy in the page that makes the browser hold that promise:
  it opens from a mail, an MLflow artifact view or a USB stick on the shop floor.
- Autoescape on and no `safe` filter anywhere: Python hands the template numbers and strings, never markup.
- Charts are bare SVG paths on a 1000 x 1000 square stretched to its box, and their text is HTML: labels keep their size on a
  phone, colours follow light and dark, equal input gives equal bytes. Matplotlib would freeze colours and fonts.
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

THUMBNAIL_PX = 160
BINS = 25
MAX_DOTS = 1500  # per group in a scatter; more only hide each other, at 12 bytes each
Facts = tuple[tuple[str, str], ...]
Chart = dict[str, Any]  # lines: (look, label, path), y down; ticks: (per cent of the axis, label); note: what the eye sees


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
    projection: tuple[np.ndarray, np.ndarray] | None = None  # reference_N2, batch_M2; near means similar
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
    env = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {do.__name__: do for do in (number, chance, points, thumbnail, histogram, scatter, curves)}
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
        return text.replace("-", "\N{MINUS SIGN}", 1) if value < 0 else text  # an exponent keeps its hyphen: people copy it
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def chance(p: float) -> str:
    """A p-value in digits anybody reads. A plain 0 is a permutation test's "never seen", which is not "< 0.000001"."""
    return f"{p:.{max(2, 1 - math.floor(math.log10(p)))}f}" if p >= 1e-6 else "≈ 0" if p == 0 else "< 0.000001"


def points(difference: float) -> str:
    """A difference of two shares in percentage points, always signed, but never "-0.0"."""
    return f"{round(100 * difference, 1) or 0.0:+.1f}".replace("-", "\N{MINUS SIGN}")


def thumbnail(image: bytes) -> str | None:
    """A data URI of at most 160 px, PNG or JPEG, whichever is smaller; None for bytes that are no picture we can decode."""
    try:
        picture: Image.Image = Image.open(io.BytesIO(image), formats=("JPEG", "PNG", "WEBP"))
        if picture.mode.startswith("I"):  # 16-bit gray of industrial cameras: convert() would clip it to white
            deep = np.asarray(picture, np.float32)
            picture = Image.fromarray((deep * (255 / max(1.0, deep.max()))).astype(np.uint8))
        picture = picture.convert("L" if picture.mode == "L" else "RGB")
        picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
        encoded = {"jpeg": io.BytesIO(), "png": io.BytesIO()}
        picture.save(encoded["jpeg"], "jpeg", quality=85)
        picture.save(encoded["png"], "png", optimize=True)
    except Exception:  # a decoder may raise anything on hostile bytes, and one bad picture must not cost the whole report
        return None
    kind, data = min(((k, buffer.getvalue()) for k, buffer in encoded.items()), key=lambda kind_data: len(kind_data[1]))
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def histogram(check: Check) -> Chart | None:
    """Shares of images per score, so that groups of different size compare; None if a group has no scores."""
    scores = [np.asarray(s, float) for s in (check.reference_scores, check.batch_scores)]
    scores = [s[np.isfinite(s)].clip(0, 1) for s in scores]
    if not all(s.size for s in scores):
        return None
    shares = [np.histogram(s, BINS, (0, 1))[0] / s.size for s in scores]
    top = float(np.max(shares))
    old, new = ("".join(f"V{1000 - 1000 * y / top:.0f}h{1000 // BINS}" for y in share) + "V1000" for share in shares)
    lines = (("area", "Reference", f"M0,1000{old}Z"), ("step", "New images", f"M0,1000{new}"))
    note = f"Median of the reference {np.median(scores[0]):.2f}, of the new images {np.median(scores[1]):.2f}."
    return {"lines": lines, "x_ticks": _ticks(0, 1), "y_ticks": _ticks(0, top, "%"), "note": note}


def scatter(check: Check) -> Chart | None:
    """Each group a cloud of dots of its own shape; the axes of a projection have no unit, so there are no ticks."""
    if check.projection is None or not all(len(group) for group in check.projection):
        return None
    groups = [np.asarray(group, float)[:: -(-len(group) // MAX_DOTS)] for group in check.projection]
    low, high = np.min(np.concatenate(groups), 0), np.max(np.concatenate(groups), 0)
    groups = [25 + 950 * (group - low) / np.maximum(high - low, 1e-12) for group in groups]
    old, new = ("".join(f"M{x:.0f},{1000 - y:.0f}h1" for x, y in group) for group in groups)  # h0 loses squares in print
    lines = (("round", "Reference", old), ("square", "New images", new))
    return {"lines": lines, "x_ticks": (), "y_ticks": (), "note": "Near means similar."}


def curves(search: Search) -> Chart | None:
    """The metric after each epoch: a stroke of its own for each of the three best trials, drawn last, the rest behind them."""
    rows = [row for row in sorted(search.rows, key=lambda row: -row.rank) if np.isfinite(row.curve).any()]
    if not rows:
        return None
    values = [v for row in rows for v in row.curve if math.isfinite(v)]
    low, high = min(values), max(values)
    low, high = low - 0.04 * (high - low or 1), high + 0.04 * (high - low or 1)
    last = max(2, *(len(row.curve) for row in rows))
    lines = []
    for row in rows:
        look = {1: "best", 2: "second", 3: "third"}.get(row.rank, "rest")
        spots = [(1000 * i / (last - 1), 1000 * (high - v) / (high - low)) for i, v in enumerate(row.curve) if math.isfinite(v)]
        lines.append((look, row.trial, "M" + "L".join(f"{x:.0f},{y:.0f}" for x, y in spots) + "h0"))
    epochs = [(100 * (t - 1) / (last - 1), f"{t}") for t in range(1, last + 1, -(-last // 10))]
    heights = _ticks(low, high, "%" if "acc" in search.metric.lower() else "")
    return {"lines": lines, "x_ticks": epochs, "y_ticks": heights, "note": ""}


def _ticks(low: float, high: float, unit: str = "") -> list[tuple[float, str]]:
    """About five round numbers inside [low, high]."""
    size = 10 ** math.floor(math.log10((high - low) / 6))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k * 6 >= (high - low) * 0.999)
    marks = [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [(100 * (m - low) / (high - low), f"{100 * m:g} %" if unit else f"{m:g}") for m in marks]
