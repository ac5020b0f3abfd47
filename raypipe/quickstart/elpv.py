"""The installed solar cell data set (Deitsch et al. 2019): 2,624 electroluminescence images.

A source of the kind python: `ingest.from: {kind: python, images: "raypipe.quickstart.elpv:cells"}`.
The images are read where pip installed them. Experts gave each cell a probability of a defect:
0, 1/3, 2/3 or 1. The label is this probability, or the class that follows from it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from raypipe.errors import DataError

DEFECTIVE_FROM = 0.5  # Deitsch et al. 2019 call a cell defective from this probability on


def cells() -> tuple[Path, list[dict[str, str]]]:
    """(the folder of the images, a row for each), mono before poly.

    Columns: file; label, `functional` or `defective`; probability; type, `mono` or `poly`. Raises
    DataError when the data set is not installed.
    """
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
    rows = []
    for name, probability, module in lines:
        is_defective = float(probability) >= DEFECTIVE_FROM
        row = {
            "file": name.removeprefix("images/"),
            "label": "defective" if is_defective else "functional",
            "probability": probability,
            "type": module,
        }
        rows.append(row)
    return data / "images", rows
