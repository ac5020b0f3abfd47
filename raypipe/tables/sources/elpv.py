"""The installed solar cell data set (Deitsch et al. 2019): 2,624 electroluminescence images.

The images are read where pip installed them. Experts gave each cell a probability of a defect:
0, 1/3, 2/3 or 1. The label is this probability, or the class that follows from it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from raypipe.errors import DataError
from raypipe.models.labels import Kind
from raypipe.tables.sources.candidate import Candidate, Files, Part, with_label
from raypipe.tables.sources.fence import fence

DEFECTIVE_FROM = 0.5  # Deitsch et al. 2019 call a cell defective from this probability on


def cells(
    kind: Literal["mono", "poly", "all"], label_column: str | None, task: Kind = "single_label"
) -> list[Part]:
    """The cells as candidates, mono before poly.

    `label_column` is `label` (functional or defective), `probability`, or None for no label. Raises
    DataError for another column, and when the data set is not installed.
    """
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

    # Lines of labels.csv: image, probability, module type; separated by blanks.
    data = Path(spec.origin).parent / "data"
    text = (data / "labels.csv").read_text()
    lines = [line.split() for line in text.splitlines()]
    lines.sort(key=lambda line: line[2])

    # Another type of cell is left out.
    candidates = []
    for name, probability, module in lines:
        if kind not in ("all", module):
            continue
        label = _label(probability, label_column)
        cell = Candidate(name.removeprefix("images/"), None)
        candidates.append(with_label(cell, task, label, None))
    return [Part(Files(fence(data / "images", [])), candidates)]


def _label(probability: str, label_column: str | None) -> str | None:
    if label_column is None:
        return None
    if label_column == "probability":
        return probability
    return "defective" if float(probability) >= DEFECTIVE_FROM else "functional"
