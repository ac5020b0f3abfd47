"""The label and the split of every row of a pinned version, as small numbers.

`pin` reads both columns once. `locate` finds the rows of any split in them and reads nothing. A
text takes one or two bytes a row: its place among the column's different texts. As Python strings,
a million rows took 160 MB, and 100 million rows more memory than a machine has.

Legend: P physical rows of all planned row groups, end to end, deleted ones included; V different
texts; F row groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.models.labels import NUMERIC, Kind
from raypipe.models.tasks import VALUE, Task
from raypipe.tables import label_column, scan
from raypipe.tables.fragment import Fragment
from raypipe.tables.table import ImageTable, TableVersion

# What is looked at together: what is computed of it takes some 100 MB.
BLOCK = 2**22  # rows
GROUPS = 2**14  # row groups


class Texts:
    """A column of texts. codes_P: 0 for a null and for a row that does not count, else the place in
    `values`, counted from 1.
    """

    def __init__(self, rows: int) -> None:
        self.values: list[str] = []
        self.codes_P = np.zeros(rows, np.uint8)

    def add(self, at: np.ndarray | slice, column: pa.ChunkedArray | pa.Array) -> None:
        """Enter the texts of the rows `at`."""
        places = self._places(column)
        if places.null_count > column.null_count:
            # Texts that occur for the first time, in the order of their rows.
            self.values += pc.unique(column.filter(places.is_null()).drop_null()).to_pylist()
            places = self._places(column)
        smallest = np.min_scalar_type(len(self.values))
        if smallest.itemsize > self.codes_P.itemsize:
            self.codes_P = self.codes_P.astype(smallest)
        self.codes_P[at] = pc.fill_null(pc.add(places, 1), 0).to_numpy()

    def _places(self, column: pa.ChunkedArray | pa.Array) -> pa.Array:
        return pc.index_in(column, value_set=pa.array(self.values, column.type))


class Labels:
    """The label column, for a task whose labels are names."""

    def __init__(self, rows: int, kind: Kind, name: str) -> None:
        self._kind = kind
        self._name = name
        self._raw = Texts(rows)
        self._texts: list[str | None] = []  # what each raw text means; None: unlabelled

    def add(self, at: np.ndarray | slice, column: pa.ChunkedArray) -> None:
        """Enter the labels of the rows `at`. Raises DataError for a text that is no label."""
        self._raw.add(at, column)
        new = self._raw.values[len(self._texts) :]
        self._texts += label_column.texts(new, self._kind, self._name)

    @property
    def distinct(self) -> list[str]:
        """The different labels, in the order of their rows."""
        return list(dict.fromkeys(text for text in self._texts if text is not None))

    def known(self, rows: slice) -> np.ndarray:
        """One bool a row: it has a label."""
        known_V = np.array([False, *(text is not None for text in self._texts)])
        return known_V[self._raw.codes_P[rows]]

    def encoded(self, task: Task, chosen_P: np.ndarray) -> np.ndarray:
        """The labels of the chosen rows as `Task.encode` gives them, whole numbers in the smallest
        type that holds them. Raises DataError for a label that the task lacks.
        """
        codes_N = self._raw.codes_P[chosen_P]
        is_used_V = np.zeros(len(self._texts) + 1, bool)
        is_used_V[codes_N] = True
        used = np.flatnonzero(is_used_V)
        encoded = task.encode([self._texts[code - 1] for code in used.tolist()])
        if encoded.dtype.kind == "i":
            encoded = encoded.astype(np.min_scalar_type(len(task.classes)))
        by_code = np.zeros((len(is_used_V), *encoded.shape[1:]), encoded.dtype)
        by_code[used] = encoded
        return by_code[codes_N]

    def counts(self, chosen_P: np.ndarray) -> dict[str, int]:
        """How often each label occurs among the chosen rows, in the order of the rows."""
        codes_N = self._raw.codes_P[chosen_P]
        counts: dict[str, int] = {}
        for first in range(0, len(codes_N), BLOCK):
            codes, at, found = np.unique(
                codes_N[first : first + BLOCK], return_index=True, return_counts=True
            )
            for i in np.argsort(at).tolist():
                text = self._texts[codes[i] - 1]
                assert text is not None, "a chosen row has a label"
                counts[text] = counts.get(text, 0) + int(found[i])
        return counts


class Numbers:
    """The label column, for a task whose labels are numbers: often no two are equal."""

    def __init__(self, rows: int, kind: Kind, name: str) -> None:
        self._task = Task(kind, (VALUE,))
        self._name = name
        self._values_P = np.full(rows, np.nan, np.float32)
        self.distinct: list[str] = []  # a number is no class

    def add(self, at: np.ndarray | slice, column: pa.ChunkedArray) -> None:
        """Enter the labels of the rows `at`. Raises DataError for a text that is no label."""
        raw = Texts(len(column))
        raw.add(slice(None), column)
        texts = label_column.texts(raw.values, self._task.kind, self._name)
        known = [text for text in texts if text is not None]
        values_V = np.full(len(texts) + 1, np.nan, np.float32)
        places = [place for place, text in enumerate(texts, 1) if text is not None]
        values_V[places] = self._task.encode(known)[:, 0]
        self._values_P[at] = values_V[raw.codes_P]

    def known(self, rows: slice) -> np.ndarray:
        return ~np.isnan(self._values_P[rows])

    def encoded(self, task: Task, chosen_P: np.ndarray) -> np.ndarray:
        return self._values_P[chosen_P][:, None]


@dataclass(frozen=True)
class Columns:
    """The columns of all planned row groups. ends_F: where each ends among all rows."""

    fragments: list[Fragment]
    ends_F: np.ndarray
    labels: Labels | Numbers
    splits: Texts
    matching: int
    """Rows that are not deleted and meet the conditions, with a label or without."""

    @classmethod
    def read(
        cls, table: ImageTable, version: TableVersion, kind: Kind, where: scan.Where
    ) -> Columns:
        """Raises DataError for a column that cannot be read, and for a text that is no label."""
        names = table.columns
        fragments, parts = scan.numbered(table, version, [names.label, names.split], where)
        ends_F = np.cumsum([fragment.rows for fragment in fragments], dtype=np.int64)
        rows = int(ends_F[-1]) if fragments else 0
        labels = (Numbers if kind in NUMERIC else Labels)(rows, kind, names.label)
        splits = Texts(rows)
        matching = 0
        for part, numbers_N in parts:
            at = _as_slice(numbers_N)
            labels.add(at, part[names.label])
            splits.add(at, part[names.split])
            matching += len(numbers_N)
        return cls(fragments, ends_F, labels, splits, matching)

    def labelled(self) -> dict[str | None, int]:
        """Labelled rows by split, where there are any; None: rows without a split."""
        return self._counted(is_labelled=True)

    def unlabelled(self) -> dict[str | None, int]:
        """Rows without a label by split; rows that do not count are among those of None."""
        return self._counted(is_labelled=False)

    def _counted(self, is_labelled: bool) -> dict[str | None, int]:
        values = [None, *self.splits.values]
        counts_V = np.zeros(len(values), np.int64)
        for first in range(0, len(self.splits.codes_P), BLOCK):
            rows = slice(first, first + BLOCK)
            codes = self.splits.codes_P[rows][self.labels.known(rows) == is_labelled]
            counts_V += np.bincount(codes, minlength=len(values))
        pairs = zip(values, counts_V.tolist(), strict=True)
        return {value: count for value, count in pairs if count}

    def with_footers(self, fragments: Sequence[Fragment]) -> tuple[Fragment, ...]:
        """Some of the row groups, as they were planned: with the footers that were read then."""
        planned = {(one.uri, one.path, one.row_group): one for one in self.fragments}
        return tuple(planned[one.uri, one.path, one.row_group] for one in fragments)

    def chosen(self, splits: Sequence[str]) -> np.ndarray:
        """chosen_P: the row has a label and one of these splits."""
        wanted_V = np.array([False, *(value in splits for value in self.splits.values)])
        chosen_P = np.empty(len(self.splits.codes_P), bool)
        for first in range(0, len(chosen_P), BLOCK):
            rows = slice(first, first + BLOCK)
            chosen_P[rows] = wanted_V[self.splits.codes_P[rows]] & self.labels.known(rows)
        return chosen_P

    def places(self, chosen_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(chosen rows of each row group, each chosen row's number in its row group).

        The second is of the smallest type that holds the rows of any row group.
        """
        sizes = np.diff(self.ends_F, prepend=0)
        smallest = np.min_scalar_type(int(sizes.max(initial=1)))
        chosen_F, row_N = [], [np.empty(0, smallest)]
        for first in range(0, len(sizes), GROUPS):
            size_f = sizes[first : first + GROUPS]
            ends_f = np.cumsum(size_f)
            before = int(self.ends_F[first] - sizes[first])
            chosen_p = chosen_P[before : before + int(ends_f[-1])]
            rows = np.flatnonzero(chosen_p)
            # `reduceat` sums from each row group's start to the next one's; an empty one has none.
            has_rows = size_f > 0
            chosen_f = np.zeros(len(size_f), np.int64)
            starts = (ends_f - size_f)[has_rows]
            if len(starts):
                chosen_f[has_rows] = np.add.reduceat(chosen_p, starts, dtype=np.int64)
            chosen_F.append(chosen_f)
            row_N.append((rows - np.repeat(ends_f - size_f, chosen_f)).astype(smallest))
        return np.concatenate([np.empty(0, np.int64), *chosen_F]), np.concatenate(row_N)


def _as_slice(numbers_N: np.ndarray) -> np.ndarray | slice:
    """Neighbouring rows as a slice, which is faster."""
    if len(numbers_N) and numbers_N[-1] - numbers_N[0] + 1 == len(numbers_N):
        return slice(int(numbers_N[0]), int(numbers_N[-1]) + 1)
    return numbers_N
