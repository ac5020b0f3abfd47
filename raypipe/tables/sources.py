"""Where images come from before they are a table: each source lists candidates, cheaply, and decodes nothing.

A source checks everything that can be checked without reading an image (does the folder exist, does the CSV name files that
are there) so that a typo costs a second and not a half-written table.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from raypipe.config import Section
from raypipe.errors import DataError, nearest

DEFECTIVE_FROM = 0.5  # Deitsch et al. 2019 call a cell defective from this probability on


@dataclass(frozen=True)
class Candidate:
    """An image file somebody says is worth having."""

    path: Path
    label: str | None
    split: str | None = None


class SourceConfig(Section):
    """`kind: folder` reads a folder and a CSV of labels; `kind: elpv` the installed solar cell data set."""

    kind: Literal["folder", "elpv"] = "folder"
    images: str = ""
    labels: str | None = None
    file_column: str = "file"
    label_column: str = "label"
    split_column: str | None = None
    type: Literal["mono", "poly", "all"] = "all"
    labelled: bool = True


def candidates(cfg: SourceConfig) -> list[Candidate]:
    """Every candidate, in a stable order. Raises DataError for what the user can mend."""
    found = {"folder": _folder, "elpv": _elpv}[cfg.kind](cfg)
    if not found:
        raise DataError("There is nothing to ingest", got=cfg.images or cfg.kind, rule="A source has at least one file")
    return found


def _folder(cfg: SourceConfig) -> list[Candidate]:
    root = Path(cfg.images).expanduser()
    if not cfg.images or not root.is_dir():
        raise DataError("The image folder does not exist", got=cfg.images, fix="Set ingest.from.images to a folder")
    labels = _labels_csv(Path(cfg.labels).expanduser(), cfg) if cfg.labels else {}
    skip = Path(cfg.labels).expanduser().resolve() if cfg.labels else None
    files = sorted(p for p in root.rglob("*") if p.is_file() and not p.name.startswith(".") and p.resolve() != skip)
    if not files:
        raise DataError(
            "The image folder is empty", got=str(root), rule="It holds at least one file", fix="Check ingest.from.images"
        )
    missing = sorted(set(labels) - {p.relative_to(root).as_posix() for p in files})
    if missing:
        raise DataError(
            f"{cfg.labels} names {len(missing)} of {len(labels)} files that are not in {root}",
            got=missing[0],
            rule=f"Column {cfg.file_column!r} holds paths relative to the folder",
            fix="Mend the CSV or ingest.from.images; nothing was written",
        )
    if cfg.labelled and not any(label for label, _ in labels.values()):
        raise DataError(
            "There are no labels",
            got=cfg.labels,
            fix="Set ingest.from.labels to a CSV with columns file,label, or ingest.from.labelled=false to ingest without",
        )
    return [Candidate(p, *labels.get(p.relative_to(root).as_posix(), (None, None))) for p in files]


def _labels_csv(path: Path, cfg: SourceConfig) -> dict[str, tuple[str | None, str | None]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as f:
            reader = csv.DictReader(f)
            have = list(reader.fieldnames or [])
            for column in filter(None, (cfg.file_column, cfg.label_column, cfg.split_column)):
                if column not in have:
                    raise DataError(f"{path} has no column {column!r}", fix=nearest(column, have))
            labels: dict[str, tuple[str | None, str | None]] = {}
            for line in reader:
                name, label = line[cfg.file_column] or "", (line[cfg.label_column] or "").strip() or None
                if name in labels and labels[name][0] != label:
                    raise DataError(
                        f"{path} gives {name} two labels", got=f"{labels[name][0]}, {label}", rule="One label a file"
                    )
                labels[name] = label, (line[cfg.split_column] or None) if cfg.split_column else None
            return labels
    except FileNotFoundError:
        raise DataError("The labels file does not exist", got=str(path), fix="Check ingest.from.labels") from None
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise DataError(f"The labels file cannot be read as a UTF-8 CSV: {e}", got=str(path)) from None


def _elpv(cfg: SourceConfig) -> list[Candidate]:
    spec = find_spec("elpv_dataset")
    if spec is None or spec.origin is None:
        raise DataError("The solar cell data set is not installed", got="elpv_dataset", fix="pip install 'raypipe[quickstart]'")
    root = Path(spec.origin).parent / "data"
    found = []
    for line in (root / "labels.csv").read_text().splitlines():
        name, probability, kind = line.split()
        if cfg.type in ("all", kind):
            label = "defective" if float(probability) >= DEFECTIVE_FROM else "functional"
            found.append(Candidate(root / name, label if cfg.labelled else None))
    return found
