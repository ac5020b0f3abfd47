"""The quality of a model as parts of a page: the same on its card and in an evaluation."""

from __future__ import annotations

import numpy as np

from raypipe import report
from raypipe.models.metrics import ClassMetrics
from raypipe.models.quality import Quality
from raypipe.models.tasks import Task
from raypipe.report.formats import tenths

MOST_CLASSES = 12  # in a matrix; with more, the most frequent confusions are listed
MOST_CONFUSIONS = 40  # of that list


def block(
    quality: Quality,
    text: str = "",
    facts: report.Facts = (),
    tables: tuple[report.Table, ...] = (),
) -> report.Block:
    """Metrics, charts, confusions and classes; `facts` and `tables` come after them."""
    shown = [(name, value(name, found)) for name, found in quality.metrics.items()]
    # Charts: what scores mean, and for numbers how far predictions are from their labels.
    plots = []
    if quality.calibration is not None:
        shown.append(("Calibration error", percent(quality.calibration.error)))
        bins = [(b.confidence, b.right) for b in quality.calibration.bins]
        plots.append(report.Plot("Calibration", report.reliability(bins), "Score", "Right"))
    if quality.numbers is not None:
        chart = report.residuals(*quality.numbers)
        plots.append(report.Plot("Labels and predictions", chart, "Label", "Prediction"))
    # A matrix of few classes shows all confusions; of many, the most frequent ones are listed.
    matrix = None
    listed = []
    if quality.confusion_CC is not None:
        if len(quality.confusion_CC) <= MOST_CLASSES:
            matrix = _matrix(quality.task, quality.confusion_CC)
        else:
            listed.append(_confusions(quality.task, quality.confusion_CC))
    if quality.classes:
        listed.append(_classes(quality.classes))
    return report.Block(
        "How good it is",
        text,
        facts=(*shown, *facts),
        # A chart without anything to show is None.
        plots=tuple(plot for plot in plots if plot.chart is not None),
        matrix=matrix,
        tables=(*listed, *tables),
    )


def _matrix(task: Task, confusion_CC: np.ndarray) -> report.Matrix:
    counts = tuple(tuple(int(n) for n in row) for row in confusion_CC)
    return report.Matrix("Labels and predictions", task.classes, counts, "A row is a label.")


def _confusions(task: Task, confusion_CC: np.ndarray) -> report.Table:
    """The most frequent mistakes, for more classes than a matrix shows."""
    # The diagonal is what is right.
    is_wrong_CC = 1 - np.eye(len(confusion_CC), dtype=np.int64)
    wrong_CC = confusion_CC * is_wrong_CC
    most_first = np.argsort(-wrong_CC, axis=None, kind="stable")
    rows = []
    for place in most_first[:MOST_CONFUSIONS]:
        label, predicted = np.unravel_index(place, wrong_CC.shape)
        count = int(wrong_CC[label, predicted])
        if count:
            names = task.classes[label], task.classes[predicted]
            rows.append((*names, report.number(count)))
    columns = (("Label", ""), ("Predicted as", ""), ("Images", "num"))
    return report.Table("Most frequent mistakes", columns, tuple(rows))


def _classes(classes: tuple[ClassMetrics, ...]) -> report.Table:
    """The class that does worst comes first; one without images has nothing to say."""
    worst_first = sorted(classes, key=lambda m: (m.f1 is None, m.f1 or 0.0, m.name))
    rows = []
    for m in worst_first:
        images = report.number(m.images)
        rows.append((m.name, images, percent(m.precision), percent(m.recall), percent(m.f1)))
    numbers = (
        ("Images", "num"),
        ("Precision", "num"),
        ("Recall", "num"),
        ("F1", "num"),
    )
    note = "Precision: of those predicted as it. Recall: of those labelled as it."
    return report.Table("By class, worst first", (("Class", ""), *numbers), tuple(rows), note)


def value(metric: str, found: float) -> str:
    """A metric as people read it: shares in per cent, errors in the labels' unit."""
    is_share = "accuracy" in metric or metric == "f1"
    return percent(found) if is_share else report.number(found)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{tenths(share)} %"
