"""What a drift detector is: a test of two samples, by one of two engines.

A detector looks at one or several kinds of arrays (`KINDS`), and each gives one piece of evidence.
`exact` computes the test here; a detector without it needs Alibi Detect's sidecar.

Letters: N rows of the reference, M of the batch, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raypipe.watch.groups import Units

# embedding: principal components. scores: of all classes. classes: the number of the predicted one.
# looks: brightness, contrast, sharpness, width and height. copies: how often one image comes
# (by_domain.py). arrival: components too, the batch in the order in which its images came.
KINDS = ("embedding", "scores", "classes", "looks", "copies", "arrival")


@dataclass(frozen=True)
class Night:
    """The images of a batch in the order in which they came, and those of them that are compared.

    places_M: of the batch's rows among all of them, from 0 on. images: how many came.
    """

    places_M: np.ndarray
    images: int


@dataclass(frozen=True)
class Pair:
    """Both sides of one kind. names: of the columns, or of the classes; may be empty. units: what
    changes places in a permutation; None: each row alone. night: where the batch's rows are from,
    for `arrival`; None: they are all that came."""

    reference: np.ndarray
    batch: np.ndarray
    names: tuple[str, ...] = ()
    units: Units | None = None
    night: Night | None = None


@dataclass(frozen=True)
class Setting:
    """What tests need beside the arrays. width: of MMD's kernel. window: images of online's."""

    permutations: int
    seed: int
    width: float
    window: int = 50


@dataclass(frozen=True)
class Found:
    """The result of one test. detail: what moved most, in words for people; may be empty."""

    statistic: float
    p_value: float
    detail: str = ""


Exact = Callable[[Pair, Setting], Found]


@dataclass(frozen=True)
class Detector:
    """A test and what it looks at.

    permutes: its p-value is never below 1 / (permutations + 1). exact: None where only Alibi Detect
    has it.
    """

    name: str
    looks_at: tuple[str, ...]
    permutes: bool
    exact: Exact | None = None
    by_domain: bool = False
    """It needs whole features, domains and groups: detect calls it (by_domain.py)."""
    moves_groups: bool = False
    """Where images come in groups, whole groups change places. Others take images for independent
    draws."""

    only_here: bool = False
    """Alibi Detect has no p-value for it, so it is computed here with any drift.engine."""

    @property
    def is_here(self) -> bool:
        """raypipe computes it."""
        return self.exact is not None or self.by_domain
