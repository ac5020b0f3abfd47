"""The parts of a report page, as dataclasses. A room fills them in; `render` makes the HTML.

A part holds numbers, strings and encoded pictures. It holds no markup. Shares, scores and
accuracies lie between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import numpy as np

Tone = Literal["good", "alert", "up", "quiet", "fact"]  # the colour and the icon of a word
Facts = tuple[tuple[str, str], ...]  # (name, value) pairs, in the order in which they are shown


@dataclass(frozen=True)
class Header:
    """The top of the page."""

    title: str
    subtitle: str
    run_id: str
    generated_at: datetime
    facts: Facts = ()


@dataclass(frozen=True)
class Picture:
    """One image with its caption."""

    image: bytes  # encoded JPEG, PNG or WebP
    caption: str  # what it is
    note: str = ""  # why it is shown


@dataclass(frozen=True)
class Evidence:
    """The result of one drift test."""

    detector: str
    on: str  # the input of the test: embeddings, predictions, brightness ...
    statistic: float
    p_value: float | None
    threshold: float | None
    is_drift: bool


@dataclass(frozen=True)
class Check:
    """One drift check: a batch of new images against the reference of a model."""

    name: str
    is_drift: bool
    p_value: float
    alpha: float
    reference_images: int
    batch_images: int
    evidence: tuple[Evidence, ...] = ()
    reference_scores: np.ndarray | Sequence[float] = ()  # 0..1
    batch_scores: np.ndarray | Sequence[float] = ()  # 0..1
    score_name: str = "Model score"
    # reference_N2 and batch_M2: points in a plane, where near means similar
    projection: tuple[np.ndarray, np.ndarray] | None = None
    unusual: tuple[Picture, ...] = ()  # images of the batch
    typical: tuple[Picture, ...] = ()  # images of the reference
    cost: Cost | None = None  # None: nothing is said of it


@dataclass(frozen=True)
class Cost:
    """The accuracy that is estimated without labels. Shares, 0 to 1."""

    accuracy: float | None = None  # None: there is no estimate
    low: float | None = None
    high: float | None = None
    known: float | None = None  # on validation images like the batch
    why_not: str = ""


@dataclass(frozen=True)
class Dropped:
    """One image that cleaning dropped or flagged."""

    picture: Picture
    reason: str
    partner: Picture | None = None  # of a duplicate: the image that stays in the table
    kept: bool = False  # True: only flagged, because the policy does not drop for this reason


@dataclass(frozen=True)
class Cleaning:
    """The result of `raypipe clean`."""

    kept: int  # images
    dropped: int  # images
    verdict_counts: Mapping[str, int] = field(default_factory=dict)
    pictures: tuple[Dropped, ...] = ()


@dataclass(frozen=True)
class Trial:
    """One trial of a search."""

    rank: int  # 1 is best
    trial: str
    hyperparameters: Mapping[str, Any]
    metric: float | None  # None: the trial failed
    epochs: int
    stopped_early: bool = False
    curve: Sequence[float] = ()  # the metric after each epoch
    seconds: float = 0.0  # for which it held devices; 0: not known
    device_s: float = 0.0  # seconds times devices
    usd: float | None = None  # None: the price is not known
    fitted: bool = False  # at once, without epochs


@dataclass(frozen=True)
class Search:
    """A hyperparameter search and its trials."""

    metric: str
    rows: tuple[Trial, ...]
    full_epochs: int | None = None  # the epochs of all trials, if none had stopped early
    importance: Mapping[str, float] = field(default_factory=dict)  # shares by hyperparameter
    epochs: int | None = None  # that trials ran, without heads that were fitted at once; None: all


@dataclass(frozen=True)
class Slice:
    """Champion and challenger on the pinned test images of one slice."""

    name: str
    images: int
    champion: float  # accuracy
    challenger: float  # accuracy, on the same images
    difference: float
    p_value: float | None  # of the paired test


@dataclass(frozen=True)
class Gate:
    """The decision whether the challenger replaces the champion."""

    promoted: bool
    reason: str
    champion: str | int
    challenger: str | int
    rows: tuple[Slice, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step of a run."""

    name: str
    what: str
    seconds: float | None = None
    status: str = "done"  # done, failed, skipped, or any other word


@dataclass(frozen=True)
class Timeline:
    """The steps of a run, in order."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Lineage:
    """Where the results come from: table versions, code, configuration."""

    facts: Facts
    config_yaml: str = ""


Cell = str  # of a table: a number is formatted already


@dataclass(frozen=True)
class Table:
    """A table. columns: (name, kind); the kind is "num" for numbers, else empty."""

    title: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    open_rows: int = 12  # further rows are folded away


@dataclass(frozen=True)
class Matrix:
    """Counts of pairs: a row is a label, a column a prediction."""

    title: str
    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Plot:
    """A chart with its title and the names of its axes."""

    title: str
    chart: Any  # charts.Chart
    x_label: str = ""
    y_label: str = ""


@dataclass(frozen=True)
class Block:
    """A section of a page that belongs to one room: text, facts, charts, tables, pictures."""

    title: str
    text: str = ""
    facts: Facts = ()
    plots: tuple[Plot, ...] = ()
    matrix: Matrix | None = None
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    pictures_title: str = ""
    chip: tuple[Tone, str] | None = None  # beside the title
    notes: tuple[str, ...] = ()  # below the text, smaller


@dataclass(frozen=True)
class Verdict:
    """One line at the top of the page. target: the id of the section that says more."""

    tone: Tone
    text: str
    detail: str
    target: str


@dataclass(frozen=True)
class Event:
    """Something that happened. at: its time, as text; chip: a warning in a word, or ""."""

    at: str
    title: str
    what: str
    tone: Tone = "quiet"
    chip: str = ""


@dataclass(frozen=True)
class Folded:
    """Events of which nobody needs to read each; they are there when asked for."""

    title: str
    what: str
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Events:
    """What happened, newest first."""

    title: str
    text: str
    rows: tuple[Event | Folded, ...]
    open_rows: int = 60  # further rows are folded away


@dataclass(frozen=True)
class Page:
    """A whole page. A part that is left out does not appear on it."""

    header: Header
    checks: tuple[Check, ...] = ()
    gate: Gate | None = None
    search: Search | None = None
    cleaning: Cleaning | None = None
    blocks: tuple[Block, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    events: Events | None = None
    timeline: Timeline | None = None
    lineage: Lineage | None = None
