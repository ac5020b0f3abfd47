"""One HTML page with the results of a run: verdicts first, then evidence and pictures.

Fill in a `Page` (parts.py), then call `write(page, path)`. The design:

- A page is one file. It has no JavaScript and loads nothing, and its content security policy makes
  the browser enforce this. So it opens from a mail, an MLflow artifact view or a USB stick.
- Autoescape is on, and no `safe` filter is used. Python gives the template numbers and strings,
  never markup.
- Charts are SVG that follows light and dark mode (charts.py).
- Pictures are shrunk to 160 px and stored as PNG or JPEG, whichever is smaller (formats.py):
  48 photographs of solar cells add 0.2 MB.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from raypipe.files import write_atomic
from raypipe.report.charts import (
    curves,
    front,
    histogram,
    parallel,
    reliability,
    residuals,
    scatter,
    so_far,
)
from raypipe.report.formats import begun, cell, chance, number, points, tenths, thumbnail
from raypipe.report.parts import (
    Block,
    Check,
    Cleaning,
    Cost,
    Dropped,
    Event,
    Events,
    Evidence,
    Facts,
    Folded,
    Gate,
    Header,
    Lineage,
    Matrix,
    Page,
    Picture,
    Plot,
    Search,
    Slice,
    Step,
    Table,
    Timeline,
    Tone,
    Trial,
    Verdict,
)

__all__ = [
    "Block",
    "Check",
    "Cleaning",
    "Cost",
    "Dropped",
    "Event",
    "Events",
    "Evidence",
    "Facts",
    "Folded",
    "Gate",
    "Header",
    "Lineage",
    "Matrix",
    "Page",
    "Picture",
    "Plot",
    "Search",
    "Slice",
    "Step",
    "Table",
    "Timeline",
    "Tone",
    "Trial",
    "Verdict",
    "begun",
    "cell",
    "chance",
    "front",
    "number",
    "points",
    "reliability",
    "render",
    "residuals",
    "so_far",
    "thumbnail",
    "write",
]

TEMPLATE = "report.html.j2"
FILTERS = (number, begun, chance, points, tenths, thumbnail, histogram, scatter, curves, parallel)


def render(page: Page) -> str:
    """The page as HTML. Equal input gives equal bytes."""
    env = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in FILTERS:
        env.filters[function.__name__] = function
    return env.get_template(TEMPLATE).render(page=page)


def write(page: Page, path: Path) -> Path:
    """Render the page to `path`. The write is atomic: readers see the old page or the new one."""
    # A name from the command line may hold bytes that are no UTF-8: they become question marks.
    return write_atomic(path, render(page).encode("utf-8", "replace"))
