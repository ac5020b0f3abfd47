"""An answer: what is known, who says so, what was checked, and why something is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["proven", "recorded", "unknown", "contradicted"]
NOT_RECORDED = "Not recorded: an earlier raypipe registered this version"


@dataclass(frozen=True)
class Check:
    """One thing that was compared. ok: None where it could not be, and `found` says why.

    is_seal: it says that a record is the one that was registered, and not that the record is true.
    """

    what: str
    ok: bool | None
    found: str = ""
    is_seal: bool = False


@dataclass(frozen=True)
class Answer:
    """One of the eight.

    name: for programs. text: the answer in a sentence. facts: plain values. sources: the file,
    table or run that says each part. why: what is not known, and why; "" if nothing is missing.
    """

    name: str
    question: str
    text: str
    facts: Mapping[str, Any]
    sources: tuple[str, ...]
    checks: tuple[Check, ...] = ()
    why: str = ""

    @property
    def status(self) -> Status:
        """contradicted: a check failed. proven: every check passed, and one of them of more than
        the seal. recorded: somebody says so, and not all of it can be checked now. unknown: nobody
        says."""
        if any(check.ok is False for check in self.checks):
            return "contradicted"
        if not self.text:
            return "unknown"
        passed = [check for check in self.checks if check.ok]
        if len(passed) == len(self.checks) and any(not check.is_seal for check in passed):
            return "proven"
        return "recorded"

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "question": self.question,
            "status": self.status,
            "answer": self.text or None,
            "facts": dict(self.facts),
            "source": list(self.sources),
            "checks": [asdict(check) for check in self.checks],
            "not_known": self.why or None,
        }


def overall(answers: Sequence[Answer]) -> Status:
    """The worst of them: one false record makes all of them doubtful."""
    said = {answer.status for answer in answers}
    for status in ("contradicted", "unknown", "recorded"):
        if status in said:
            return status
    return "proven"
