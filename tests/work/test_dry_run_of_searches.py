"""What a dry run says of a search's trials."""

from __future__ import annotations

from raypipe.config import validate
from raypipe.job import Job
from raypipe.search.space.parse import parse
from raypipe.work.dry_run.searching import _drawn
from raypipe.work.result import Facts


def told(space: dict[str, str], scheduler: str = "asha") -> Facts:
    search = {"space": space, "budget_s": 600, "scheduler": scheduler}
    job = validate(Job, {"table": {"uri": "t"}, "train": {"epochs": 8}, "search": search})
    return _drawn(job.search, parse(space, job.training), 100.0, 200)


def test_what_trials_draw_is_said_to_be_theirs() -> None:
    """It said 8 epochs where trials draw up to 20, and one batch size where they draw thousands."""
    drawn = told({"train.epochs": "randint(1, 21)", "train.batch_size": "randint(8, 4096)"})
    assert drawn["epochs"] == "up to 20 of a trial, unless asha ends it earlier"
    assert drawn["batch"] == "each trial draws its own"
    fixed = told({"train.lr": "loguniform(1e-4, 1e-1)"})
    assert fixed["epochs"] == "8 of a trial, unless asha ends it earlier"
    assert "batch" not in fixed
    nobody = told({"train.lr": "loguniform(1e-4, 1e-1)"}, "none")
    assert nobody["epochs"] == "8 of a trial, unless the time ends it earlier"
