"""The installed solar cell data set (Deitsch et al. 2019): 2,624 electroluminescence images, read where pip put them.

Experts gave each cell a probability of a defect: 0, 1/3, 2/3 or 1. That is its label, or the class that follows from it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from raypipe.errors import DataError
from raypipe.models.labels import Kind
from raypipe.tables.sources.candidate import Candidate, Files, Part, told
from raypipe.tables.sources.fence import fence

DEFECTIVE_FROM = 0.5  # Deitsch et al. 2019 call a cell defective from this probability on


def cells(
    kind: Literal["mono", "poly", "all"], label_column: str | None, task: Kind = "single_label"
) -> list[Part]:
    """label_column: `label` (functional or defective) or `probability`; None lists the cells without. Mono come before poly."""
    if label_column not in ("label", "probability", None):
        raise DataError(
            f"The solar cells have no {label_column!r}",
            rule="They have label and probability",
            fix="Set ingest.from.label_column",
        )
    spec = find_spec("elpv_dataset")
    if spec is None or spec.origin is None:
        raise DataError(
            "The solar cell data set is not installed",
            got="elpv_dataset",
            fix="pip install 'raypipe[quickstart]'",
        )
    data = Path(spec.origin).parent / "data"
    found = []
    lines = [line.split() for line in (data / "labels.csv").read_text().splitlines()]
    for name, probability, module in sorted(lines, key=lambda line: line[2]):
        if kind in ("all", module):
            said = {
                "label": "defective" if float(probability) >= DEFECTIVE_FROM else "functional",
                "probability": probability,
            }
            cell = Candidate(name.removeprefix("images/"), None)
            found.append(told(cell, task, said[label_column] if label_column else None, None))
    return [Part(Files(fence(data / "images", [])), found)]
