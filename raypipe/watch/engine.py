"""Where drift tests are computed: here (`exact`), or by Alibi Detect in its sidecar (`alibi`).

Both get the same arrays, the same kernel's width and the same permutations, and give the same
numbers: the statistics of mmd differ by less than 1e-5, p-values not at all (test_engines.py).
`auto` computes here what it can, as that needs no sidecar and is faster: 73 times with 2,000 rows a
side, 86 times with 10,000 (benchmarks/results/2026-11-25-drift.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raypipe.cluster import sidecar
from raypipe.errors import RaypipeError
from raypipe.watch.detectors import DETECTORS
from raypipe.watch.detectors.detector import Found, Pair, Setting

Engine = Literal["auto", "alibi", "exact"]
EXACT, ALIBI = "exact", "alibi"


@dataclass(frozen=True)
class Choice:
    """engine_by_detector: exact or alibi. why: one sentence for people."""

    engine_by_detector: Mapping[str, str]
    why: str

    def also(self, detector: str, engine: str) -> Choice:
        """With one detector more."""
        return Choice({**self.engine_by_detector, detector: engine}, self.why)

    @property
    def name(self) -> str:
        """exact, alibi, or both."""
        return " and ".join(sorted(set(self.engine_by_detector.values()), reverse=True))


def choose(engine: Engine, detectors: Sequence[str], grouped: bool = False) -> Choice:
    """The engine of each detector. Raises KeyError for an unknown detector.

    grouped: images come in groups, of which Alibi Detect knows nothing.
    """
    own = [name for name in detectors if DETECTORS[name].only_here]
    no_other = f"exact for {', '.join(own)}: Alibi Detect gives no p-value for it" if own else ""
    moving = [name for name in detectors if grouped and DETECTORS[name].moves_groups]
    if moving:
        own += moving
        no_other = "; ".join(
            filter(None, [no_other, f"exact for {', '.join(moving)}: whole groups change places"])
        )
    if engine != "auto":
        chosen = dict.fromkeys(detectors, engine) | dict.fromkeys(own, EXACT)
        return Choice(
            chosen, "; ".join(filter(None, [f"{engine}: drift.engine says so", no_other]))
        )
    here = [name for name in detectors if DETECTORS[name].exact and name not in own]
    there = [name for name in detectors if not DETECTORS[name].exact]
    parts = []
    if here:
        parts.append(
            f"exact for {', '.join(here)}: computed here with Alibi Detect's statistic and p-value,"
            " without its sidecar"
        )
    if there:
        parts.append(f"alibi for {', '.join(there)}: only Alibi Detect's sidecar has it")
    if no_other:
        parts.append(no_other)
    chosen = dict.fromkeys([*here, *own], EXACT) | dict.fromkeys(there, ALIBI)
    return Choice({name: chosen[name] for name in detectors}, "; ".join(parts))


def run(
    tests: Sequence[tuple[str, str]],
    choice: Choice,
    pairs: Mapping[str, Pair],
    setting: Setting,
    alpha: float,
) -> list[Found]:
    """The results of tests (detector, what it looks at), in their order.

    A test of Alibi Detect needs a connection to Ray; all of them are one call. Raises RaypipeError
    for a result that is no number.
    """
    found: dict[tuple[str, str], Found] = {}
    there = [test for test in tests if choice.engine_by_detector[test[0]] == ALIBI]
    if there:
        found |= _alibi(there, pairs, setting, alpha)
    for name, on in tests:
        exact = DETECTORS[name].exact
        if (name, on) not in found:
            assert exact is not None, f"the settings let {name} pass with engine exact"
            found[name, on] = exact(pairs[on], setting)
    for (name, on), one in found.items():
        if not np.isfinite([one.statistic, one.p_value]).all():
            raise RaypipeError(
                f"The drift test {name} of {on} gave no number",
                got=f"statistic {one.statistic}, p {one.p_value}",
                fix=f"Leave it out of drift.detectors, or try another drift.engine than "
                f"{choice.engine_by_detector[name]}",
            )
    return [found[test] for test in tests]


def _alibi(
    tests: Sequence[tuple[str, str]], pairs: Mapping[str, Pair], setting: Setting, alpha: float
) -> dict[tuple[str, str], Found]:
    arrays: dict[str, np.ndarray] = {}
    for on in {on for _, on in tests}:
        arrays |= {f"ref.{on}": pairs[on].reference, f"batch.{on}": pairs[on].batch}
    options = {
        "tests": [list(test) for test in tests],
        "permutations": setting.permutations,
        "seed": setting.seed,
        "width": setting.width,
        "alpha": alpha,
    }
    _, facts = sidecar.call(ALIBI, "raypipe.watch.alibi_sidecar:check", arrays, options)
    results = (Found(one["statistic"], one["p_value"]) for one in facts["evidence"])
    return dict(zip(tests, results, strict=True))
