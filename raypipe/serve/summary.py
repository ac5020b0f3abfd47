"""What a prediction says as a whole, counted a batch of rows at a time."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.models.tasks import NUMERIC


class Summary:
    """Counts labels; of numbers, the least, the mean and the most."""

    def __init__(self, task: str) -> None:
        self._is_number = task in NUMERIC
        self._counts: Counter[str] = Counter()
        self._numbers: list[tuple[float, float, float, int]] = []  # least, sum, most, count
        self.images = 0
        self.broken = 0

    def add(self, rows: pa.Table) -> None:
        """rows: the columns label and error."""
        self.images += len(rows)
        self.broken += len(rows) - rows["error"].null_count
        labels = rows["label"].filter(pc.is_null(rows["error"]))
        if not len(labels):
            return
        if self._is_number:
            values = labels.cast(pa.float64())
            least, most = pc.min(values).as_py(), pc.max(values).as_py()
            self._numbers.append((least, pc.sum(values).as_py(), most, len(values)))
            return
        for entry in labels.combine_chunks().value_counts().to_pylist():
            self._counts[str(entry["values"])] += entry["counts"]

    @property
    def labels(self) -> dict[str, int] | dict[str, float]:
        if not self._is_number:
            return dict(self._counts)
        if not self._numbers:
            return {}
        least, total, most, count = zip(*self._numbers, strict=True)
        return {"least": min(least), "mean": sum(total) / sum(count), "most": max(most)}
