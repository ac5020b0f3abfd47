"""What is said of trials that failed."""

from __future__ import annotations

import logging
from pathlib import Path

from ray.exceptions import RayTaskError

from raypipe.errors import DataError
from raypipe.search import tune_run

BROKEN = DataError("None of the 72 images of a split is readable", fix="Restore the table")
OTHER = DataError("Something else")
FOLDER = Path("search")


def test_what_all_trials_fail_of_is_the_message() -> None:
    """Of a table of broken images it said to lower train.lr."""
    assert tune_run.nothing_usable(2, FOLDER, [BROKEN, BROKEN]) is BROKEN
    mixed = str(tune_run.nothing_usable(4, FOLDER, [OTHER, BROKEN, None, BROKEN]))
    assert "Every one of 4 trials" in mixed and "2 of them: None of the 72 images" in mixed
    for nobody in ([], [None, None]):
        assert "lower train.lr" in str(tune_run.nothing_usable(2, FOLDER, nobody))


def test_a_trial_that_fails_with_a_message_of_ours_logs_no_traceback() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("ray.tune.execution.tune_controller")
    logger.addHandler(handler)
    try:
        for error in (RayTaskError("train", "a traceback", BROKEN), KeyError("a mistake")):
            with tune_run.failures_in_a_line():
                logger.error("Trial task failed for trial %s", "a", exc_info=error)
        logger.error("Trial task failed for trial a", exc_info=BROKEN)
    finally:
        logger.removeHandler(handler)
    ours, mistake, later = records
    assert ours.exc_info is None and ours.getMessage().startswith(
        "Trial task failed for trial a: None of the 72 images of a split is readable. Restore"
    )
    assert mistake.exc_info and later.exc_info
