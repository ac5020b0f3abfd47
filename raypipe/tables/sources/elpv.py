"""The installed solar cell data set (Deitsch et al. 2019): 2,624 electroluminescence images, read where pip put them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from raypipe.errors import DataError
from raypipe.tables.sources.candidate import Candidate, Files, Part

DEFECTIVE_FROM = 0.5  # Deitsch et al. 2019 call a cell defective from this probability on


def cells(kind: Literal["mono", "poly", "all"], labelled: bool) -> list[Part]:
    spec = find_spec("elpv_dataset")
    if spec is None or spec.origin is None:
        raise DataError("The solar cell data set is not installed", got="elpv_dataset", fix="pip install 'raypipe[quickstart]'")
    data = Path(spec.origin).parent / "data"
    found = []
    for line in (data / "labels.csv").read_text().splitlines():
        name, probability, module = line.split()
        if kind in ("all", module):
            label = "defective" if float(probability) >= DEFECTIVE_FROM else "functional"
            found.append(Candidate(name.removeprefix("images/"), label if labelled else None))
    return [Part(Files(str(data / "images")), found)]
