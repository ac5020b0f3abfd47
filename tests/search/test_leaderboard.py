"""In which order trials come."""

from __future__ import annotations

from raypipe.search.leaderboard import Trial, ranked

NAN = float("nan")


def trial(name: str, metric: float, *losses: float, failed: bool = False) -> Trial:
    """One with these losses, each at an epoch with that metric."""
    history = tuple({"val_accuracy": metric, "val_loss": loss} for loss in losses)
    return Trial(name, {}, metric, len(losses), False, history, None if failed else "somewhere")


def test_equal_accuracies_are_told_apart_by_the_loss_of_the_epoch_that_is_kept_and_then_by_name() -> None:
    trials = [
        trial("a", 0.9, 0.5, 0.1),  # the first of equal epochs is the one whose weights were kept
        trial("b", 0.9, 0.3),
        trial("c", 0.9, 0.3),
        trial("d", 0.95, 0.9),
        trial("e", 0.9, NAN),
        trial("f", NAN, failed=True),
        trial("g", 0.8, 0.01),
    ]
    order = [t.name for t in ranked(reversed(trials), "val_accuracy", "max")]
    assert order == ["d", "b", "c", "a", "g", "e", "f"]  # e has an accuracy, and weights of NaN
    assert [t.name for t in ranked(trials, "val_accuracy", "min")] == ["g", "b", "c", "a", "d", "e", "f"]
