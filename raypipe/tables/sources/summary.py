"""How a source was understood, for people: images, labels, splits, and what is quarantined."""

from __future__ import annotations

from collections import Counter
from typing import Any

from raypipe.models.labels import NUMERIC
from raypipe.models.labels import Kind as Task
from raypipe.tables.sources import folder
from raypipe.tables.sources.candidate import Candidate, Part
from raypipe.tables.sources.config import SourceConfig

CLASSES_SHOWN = 20
STRAYS_SHOWN = 5
NAME_CHARACTERS = 40


def understood(cfg: SourceConfig, layout: str, parts: list[Part]) -> dict[str, Any]:
    """Facts about a source by name, in the order they are shown. `layout` may be empty."""
    listed: list[Candidate] = []
    for part in parts:
        listed += part.candidates
    accepted = [candidate for candidate in listed if not candidate.reason]
    labels = [candidate.label for candidate in accepted if candidate.label is not None]
    # Files that do not look like images have no label. The quarantine gives each its own reason
    # later.
    strays = folder.strays(parts) if cfg.kind == "folder" else Counter[str]()

    facts: dict[str, Any] = {
        "from": f"{cfg.kind} {cfg.images or cfg.labels or ''}".strip(),
        "files": len(listed),
    }

    if layout:
        facts["understood as"] = layout
    if cfg.labelled:
        facts["task"] = cfg.label_task
        facts["labels"] = _label_counts(cfg.label_task, labels)

    unlabelled = len(accepted) - len(labels)
    if cfg.labels is None:
        unlabelled -= strays.total()
    if unlabelled > 0:
        facts["without a label"] = unlabelled

    images = len(accepted) - strays.total()
    facts["splits"] = _split_counts(accepted, images)
    if strays:
        facts["not images by name"] = dict(strays.most_common(STRAYS_SHOWN))
    return facts | _refusals(listed)


def _label_counts(task: Task, labels: list[str]) -> Any:
    """The range of numeric labels; for others the images of the most frequent classes or tags."""
    if task in NUMERIC and labels:
        numbers = [float(label) for label in labels]
        low, high = min(numbers), max(numbers)
        return f"{len(numbers)} numbers from {low:g} to {high:g}"

    counts: Counter[str] = Counter()
    for label in labels:
        tags = label.split("|") if task == "multi_label" else [label]
        counts.update(tags)

    # The rest is one line: a data set may have thousands of classes.
    shown: dict[str, Any] = {}
    for name, count in counts.most_common(CLASSES_SHOWN):
        short = name[:NAME_CHARACTERS] or "(no tag)"
        # Long names may begin alike.
        shown[name if short in shown else short] = count
    if len(counts) > CLASSES_SHOWN:
        others = "(others)" if "others" in shown else "others"
        shown[others] = f"{len(counts) - CLASSES_SHOWN} more"
    return shown


def _split_counts(accepted: list[Candidate], images: int) -> Any:
    """Images a split as the source gives them; the rest, or all, will be drawn."""
    given = Counter(candidate.split for candidate in accepted if candidate.split)
    if not given:
        return "drawn"
    counts: dict[str, int] = dict(sorted(given.items()))
    if given.total() < images:
        counts["drawn"] = images - given.total()
    return counts


def _refusals(listed: list[Candidate]) -> dict[str, str]:
    """For each reason of the quarantine: how many, and the first example."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for candidate in listed:
        if candidate.reason:
            counts[candidate.reason] += 1
            examples.setdefault(candidate.reason, candidate.detail)

    return {
        f"refused: {reason}": f"{count}, like {examples[reason]}"
        for reason, count in counts.items()
    }
