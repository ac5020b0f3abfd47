"""How many workers there is room for, and when it pays to start again with more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.train import elastic
from raypipe.train.elastic import RESTART_S, pays, room


def test_room_is_counted_node_by_node_in_whole_places() -> None:
    assert room({}, {"CPU": 1.0}) == 0
    assert room({"a": {"CPU": 1.5}, "b": {"CPU": 1.5}}, {"CPU": 1.0}) == 2
    assert room({"a": {"CPU": 0.9999999}}, {"CPU": 1.0}) == 1, (
        "Ray's arithmetic of free CPUs is inexact"
    )
    assert room({"a": {"CPU": 1.0}}, {"CPU": 0.25}) == 4
    assert room({"a": {"CPU": 16.0, "GPU": 4.0}, "b": {"CPU": 16.0}}, {"CPU": 1.0, "GPU": 1.0}) == 4
    assert room({"a": {"CPU": 2.0, "GPU": 4.0}}, {"CPU": 1.0, "GPU": 1.0}) == 2


def test_a_cpu_for_decode_tasks_stays_free_on_one_node() -> None:
    cpu = {"CPU": 1.0}
    assert room({"a": {"CPU": 2.0}}, cpu, decoding=True) == 1
    assert room({"a": {"CPU": 8.0}, "b": {"CPU": 8.0}}, cpu, decoding=True) == 15
    assert room({"a": {"CPU": 1.5}, "b": {"CPU": 1.0}}, cpu, decoding=True) == 1
    assert room({"a": {"CPU": 0.5}}, cpu, decoding=True) == 0
    gpus = {"a": {"CPU": 16.0, "GPU": 4.0}}
    assert room(gpus, {"CPU": 1.0, "GPU": 1.0}, decoding=True) == 4, (
        "there are CPUs to spare beside the GPUs"
    )


def test_each_worker_gets_as_many_cpus_as_leave_one_for_decode_tasks() -> None:
    def cpus(nodes: list[float], workers: int, decoding: bool = True) -> float:
        return elastic.cpus_of_each([{"CPU": n} for n in nodes], workers, {}, decoding)

    assert cpus([8, 8], 2) == 1 and cpus([2, 2], 4, decoding=False) == 1
    assert cpus([2], 2) == 0.5 and cpus([4], 4) == 0.75
    # Three CPUs for four workers: but 0.75 each would leave half a CPU on either node.
    assert cpus([2, 2], 4) == 0.6666
    assert cpus([1, 1], 2) == 0.5 and cpus([8, 1], 9) == 0.8888
    # The CPU that stays free may be the only one.
    assert cpus([1], 1) == 0 and cpus([1], 1, decoding=False) == 1
    gpus = [{"CPU": 2.0, "GPU": 4.0}]
    assert elastic.cpus_of_each(gpus, 4, {"GPU": 1.0}, True) == 0.25
    assert elastic.cpus_of_each(gpus, 5, {"GPU": 1.0}, True) == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12), st.booleans())
def test_workers_that_fit_one_by_one_fit_together(
    nodes: list[int], workers: int, decoding: bool
) -> None:
    """Placed as Ray packs them: as many as fit on one node after the other."""
    each = elastic.cpus_of_each([{"CPU": float(n)} for n in nodes], workers, {}, decoding)
    if not each:
        assert decoding and max(nodes) == 1 and sum(nodes) == 1
        return
    places = {str(n): {"CPU": float(cpus)} for n, cpus in enumerate(nodes)}
    assert room(places, {"CPU": each}, decoding) >= workers and 0 < each <= 1


def test_a_group_grows_only_if_what_is_left_gets_shorter_by_more_than_a_start_takes() -> None:
    assert not pays(None, 2, 2) and not pays(1e9, 2, 2), "nothing to win"
    assert pays(None, 1, 2), "how long it takes is not known before the first epoch"
    assert pays(2.1 * RESTART_S, 1, 2) and not pays(1.9 * RESTART_S, 1, 2)
    assert pays(8.1 * RESTART_S, 7, 8) and not pays(7.9 * RESTART_S, 7, 8)


def test_a_group_that_gives_its_places_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([0, 0, 1, 3, 3, 4])
    monkeypatch.setattr(elastic, "free_resources", lambda: {"a": {"CPU": float(next(seen))}})
    monkeypatch.setattr(elastic.time, "sleep", lambda s: None)
    assert elastic.steady_room({"CPU": 1.0}, False, 4) == 3
    assert elastic.steady_room({"CPU": 1.0}, False, 4) == 4
